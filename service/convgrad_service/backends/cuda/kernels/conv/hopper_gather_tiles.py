"""Tile shapes of hopper_gather and their cost model."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, Phase
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["ROW_BYTES", "TILES", "HopperTile", "tiles_of"]

ROW_BYTES = 128
"""Bytes of an operand's row in shared memory, the depth of a k-tile."""
BOX_ROWS = 64
"""Weight rows of a stage are a multiple of this."""
STAGING_BYTES = 64 * ROW_BYTES
ALIGNMENT, BARRIER_BYTES = 1024, 8
# The tile queue: four entries, with two mbarriers each.
QUEUE_BYTES = 4 * (2 * BARRIER_BYTES + 52)
WARPGROUP = 128
# The most pixels beside a tile that taps of a row share.
MOST_HALO = 8
# Rates of an H200, fitted to tests/perf's dense layers: FLOP/s in 16-bit types (TF32 takes as long
# per byte), bytes/s from the L2 cache to all SMs (sharing weights gains little: SHARED), and the
# time of a tile outside its mainloop: fixed, per result byte, and of a split-K reduction.
MULTIPROCESSORS, FLOPS, L2_BYTES_S = 132, 865e12, 12e12
TILE_S, BYTE_S, JOIN_S = 0.35e-6, 3.7e-11, 2.5e-6
# With split-K: bytes/s at which a block receives partial sums, and bytes/s from L2 to all SMs.
JOINED_BYTES_S, SPLIT_L2_BYTES_S = 30e9, 5.5e12
SHARED = 0.995
# The rates of PINGPONG, whose mainloops overlap stores and are limited by power.
PINGPONG_FLOPS, PINGPONG_L2_BYTES_S, PINGPONG_TILE_S = 800e12, 11.3e12, 0.9e-6
# The most accumulators of a tile with float32 operands.
MOST_SUMS = 128 * 256
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}
"""Concurrent clusters of an H200 by cluster size, with one block per SM."""
# Registers per thread of producers and consumers, by the number of consumer warpgroups.
REGISTERS = {1: (40, 216), 2: (56, 224), 3: (56, 152)}
MOST_SUMS_OF_FEW, REGISTERS_OF_MANY = 128 * 160, (40, 232)


@dataclass(frozen=True, slots=True)
class HopperTile:
    """A tile shape and its kernel schedule.

    Attributes
    ----------
    m, n
        Pixels and result channels of a block tile.
    warpgroups
        Consumer warpgroups.
    sharing
        Blocks of a cluster that share the weights by multicast, each with its own pixels.
    split
        Blocks of a cluster that split the K of one tile.
    pingpong
        Whether consumer warpgroups alternate tiles: one stores its results while the other
        multiplies. Otherwise they cooperate on a tile.
    """

    m: int
    n: int
    warpgroups: int = 2
    sharing: int = 1
    split: int = 1
    pingpong: bool = False
    blocks: int = 1
    lean: int = 0
    single: bool = False
    taps: int = 1

    def __str__(self) -> str:
        sharing = f"_x{self.sharing}" if self.sharing > 1 else ""
        split = f"_k{self.split}" if self.split > 1 else ""
        way = "a" if self.pingpong else f"w{self.warpgroups}"
        if self.single:
            way = "s" if self.warpgroups * 64 == min(self.m, 128) else f"s{self.warpgroups}"
        blocks = (f"_b{self.blocks}" if self.blocks > 1 else "") + ("_lean" if self.lean else "")
        return f"{self.m}x{self.n}{way}{sharing}{split}{blocks}{'_row' if self.taps > 1 else ''}"

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self.sharing * self.split

    @property
    def pixels(self) -> int:
        """Pixels of a cluster's tile."""
        return self.m * self.sharing

    def step_s(self, across: bool) -> float:
        """Return the seconds of a k-tile, limited by wgmma or by loads from L2.

        The L2 rate per SM does not rise if other SMs are idle. N-major weights (``across``) are
        loaded in whole boxes.
        """
        flops, l2_bytes_s = (
            (PINGPONG_FLOPS, PINGPONG_L2_BYTES_S) if self.pingpong else (FLOPS, L2_BYTES_S)
        )
        products = self.m * self.n * ROW_BYTES / flops
        shared = SHARED if self.sharing > 1 else 1.0
        loaded = self.stage_bytes if across else (self.m + self.n) * ROW_BYTES
        return max(products, loaded / l2_bytes_s) * MULTIPROCESSORS * shared

    def split_step_s(self, tiles: int) -> float:
        """Return the seconds of a split-K k-tile with that many concurrent tiles."""
        return self.stage_bytes * tiles * self.split / SPLIT_L2_BYTES_S

    def tile_s(self, itemsize: int) -> float:
        """Return the seconds of a tile outside its mainloop."""
        joined = 0.0
        if self.split > 1:
            got = self.m * self.n * 4 * (self.split - 1) // self.split
            joined = JOIN_S + got / JOINED_BYTES_S
        fixed = PINGPONG_TILE_S if self.pingpong else TILE_S
        return fixed + self.m * self.n * itemsize * BYTE_S + joined

    @property
    def threads(self) -> int:
        if self.single:
            return self.warpgroups * WARPGROUP + 64
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def has_epilogue(self) -> bool:
        """Whether a bias and an activation fit into registers without spilling."""
        sums = self.m * self.n // (WARPGROUP * (1 if self.pingpong else self.warpgroups))
        return self.split == 1 and sums <= (160 if self.pingpong else 128)

    @property
    def stage_bytes(self) -> int:
        rows = self.taps * ceil_div(self.n, BOX_ROWS) * BOX_ROWS
        return (self.m + (MOST_HALO if self.taps > 1 else 0) + rows) * ROW_BYTES

    def halo(self, axis: Axis, phase: Phase) -> int:
        """Return the pixels by which rows extend beyond the result's."""
        return (phase.taps - 1) * abs(axis.x_tap) if self.taps > 1 else 0

    def clusters(self, device: CudaDevice) -> int:
        """Return the number of concurrent clusters, which can leave SMs of a GPC idle."""
        return self.blocks * (device.multiprocessors * CLUSTERS[self.cluster] // MULTIPROCESSORS)

    def weight_rows(self, depth: int | None) -> int:
        """Return the rows of weights that one block loads per k-tile.

        Rows are result channels, or with ``depth``, the source channels of an N-major k-tile.
        """
        if depth is None:
            return self.n // self.sharing
        return depth // self.sharing if ceil_div(self.n, BOX_ROWS) % self.sharing else depth

    def stages(self, device: CudaDevice) -> int:
        """Return the number of pipeline stages that fit."""
        room = device.shared_bytes_per_block - self.shared_bytes(0)
        if self.blocks > 1:
            room = device.shared_bytes_per_multiprocessor // self.blocks - 1024 - self.shared_bytes(0)
        most = 16 if self.single else 8
        return min(most, room // (self.stage_bytes + 2 * BARRIER_BYTES))

    def shared_bytes(self, stages: int) -> int:
        ring = stages * (self.stage_bytes + 2 * BARRIER_BYTES)
        if self.single:
            return ALIGNMENT + ring + self.reduce_bytes + 32 + 512
        turns = BARRIER_BYTES * (self.warpgroups if self.pingpong else int(self.split > 1))
        return 2048 * self.lean + ALIGNMENT + ring + self.warpgroups * STAGING_BYTES + QUEUE_BYTES + turns

    @property
    def reduce_bytes(self) -> int:
        if self.split > 1:
            return self.split * self.owned * self.warpgroups * 4 * 512
        return self.warpgroups * STAGING_BYTES

    @property
    def owned(self) -> int:
        return ceil_div(self.m // self.warpgroups // 64 * (self.n // 8), self.split)

    def defines(
        self, dtype: DType, across: bool, maps: int, stages: int, planes: bool = False
    ) -> dict[str, object]:
        """Return the preprocessor macros of an instance."""
        if self.single:
            return {
                "ELEMENT": CUDA_TYPES[dtype],
                "ACROSS": int(across),
                "MAPS": maps,
                "BM": self.m,
                "BN": self.n,
                "CONSUMERS": self.warpgroups,
                "SPLIT": int(self.split > 1),
                "BLOCKS": self.blocks,
                "TAPS": self.taps,
            }
        producer, consumer = REGISTERS[self.warpgroups]
        if self.pingpong and self.m * self.n > MOST_SUMS_OF_FEW:
            producer, consumer = REGISTERS_OF_MANY
        if self.blocks > 1:
            pool = 65536 // self.blocks // self.threads // 8 * 8 * (self.warpgroups + 1)
            producer = 40 if self.warpgroups == 1 else 24
            consumer = min(232, (pool - producer) // self.warpgroups // 8 * 8)
        return {
            "ELEMENT": CUDA_TYPES[dtype],
            "ACROSS": int(across),
            "MAPS": maps,
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.warpgroups,
            "PINGPONG": int(self.pingpong),
            "CLUSTER": self.cluster,
            "SHARING": self.sharing,
            "SPLIT": self.split,
            "STAGES": stages,
            "BLOCKS": self.blocks,
            "LEAN": self.lean,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            **({"PLANES": 1} if planes else {}),
        }


_OLD = (
    HopperTile(128, 256),
    HopperTile(128, 256, sharing=2),
    HopperTile(256, 128),
    HopperTile(192, 128, 3),
    HopperTile(256, 160),
    HopperTile(128, 224),
    HopperTile(128, 128),
    HopperTile(256, 64),
    HopperTile(128, 64),
    *(HopperTile(128, n, split=split) for n in (64, 128) for split in (2, 3, 4, 6, 8)),
    *(
        HopperTile(m, n, pingpong=True)
        for m, n in ((192, 128), (128, 128), (128, 160), (256, 64), (128, 64), (256, 32))
    ),
)
from convgrad_service.plans.cuda.device import H200 as _H
def _fits(t):
    if t.split == 1: return True
    rows = t.m + (t.split-1)*ceil_div(t.m, t.split)
    return rows*(t.n+8)*4 <= t.stages(_H)*t.stage_bytes
from dataclasses import replace as _r
_NEW = tuple(t for t in (
    *(HopperTile(64, n, 1, split=split, blocks=blocks) for n, blocks in ((64, 2), (64, 3), (128, 2), (128, 1), (256, 1)) for split in (1, 2, 3, 4, 6, 8)),
    *(HopperTile(128, n, 2, split=split, blocks=2) for n in (64, 128) for split in (1, 2, 3, 4, 6, 8)),
) if _fits(t))
_SINGLE = tuple(
    HopperTile(m, n, wg, split=split, blocks=blocks, single=True)
    for m, n, wg, bs in ((64, 64, 1, (1, 2)), (64, 128, 1, (1, 2)), (64, 192, 1, (1,)), (64, 256, 1, (1,)), (128, 64, 2, (1,)), (128, 128, 2, (1,)), (128, 192, 2, (1,)), (128, 256, 2, (1,)), (128, 64, 1, (1,2)), (256, 64, 2, (1,)), (256, 128, 2, (1,)))
    for blocks in bs for split in (1, 2, 3, 4, 6, 8))
_SINGLE = tuple(t for t in _SINGLE if t.stages(_H) >= 3 and not (t.split > 1 and t.m*t.n > 128*192))
_ROW = tuple(
    HopperTile(m, n, wg, split=split, single=True, taps=taps, blocks=blocks)
    for m, n, wg, blocks, many in ((64, 64, 1, 1, (3, 5, 7)), (64, 64, 1, 2, (3,)), (64, 128, 1, 1, (3,)), (128, 64, 2, 1, (3, 5, 7)), (128, 64, 1, 1, (3,)), (128, 128, 2, 1, (3,)), (192, 64, 3, 1, (3,)), (256, 64, 2, 1, (3,)))
    for taps in many
    for split in (1, 2, 3, 4, 6, 8))
_SINGLE = (*_SINGLE, *(t for t in _ROW if t.stages(_H) >= 3))
import os as _os
TILES = {
 "old": _OLD,
 "new": (*_OLD, *_NEW),
 "all": (*_OLD, *_SINGLE),
 "all3": (*_OLD, *_NEW, *(_r(t, lean=1) for t in (*_OLD, *_NEW) if t.m*t.n <= 128*128)),
}[_os.environ.get("C3", "all")]
"""Tile shapes that were the fastest for some layer."""


def tiles_of(dtype: DType) -> tuple[HopperTile, ...]:
    """Return the tiles for a dtype: for 32-bit types, those whose results fit into registers; for
    16-bit types, those at least a k-tile wide."""
    if dtype.itemsize == 2:
        return tuple(tile for tile in TILES if tile.n >= BOX_ROWS)
    return tuple(tile for tile in TILES if tile.m * tile.n <= MOST_SUMS)
