"""Tile shapes of hopper_gather and their cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.gather_axes import Axis, Phase
from convgrad_service.plans.cuda.device import RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["MOST_HALO", "ROW_BYTES", "TILES", "HopperTile", "tiles_of"]

ROW_BYTES = 128
"""Bytes of an operand's row in shared memory, the depth of a k-tile."""
BOX_ROWS = 64
"""Weight rows of a stage are a multiple of this."""
STAGING_BYTES = 64 * ROW_BYTES
ALIGNMENT, BARRIER_BYTES = 1024, 8
# The tile queue: four entries, with two mbarriers each.
QUEUE_BYTES = 4 * (2 * BARRIER_BYTES + 52)
WARPGROUP, WARP_FRAGMENT_BYTES = 128, 512
# Of single tiles: the producers' threads, the list of taps with what precedes it, and the pipeline.
PRODUCERS, LIST_BYTES, MOST_STAGES = 64, 528, 16
MOST_HALO = 8
"""The most pixels beside a tile whose taps of a kernel row share them."""
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Rates:
    """What a kind of tile reaches on an H200.

    Attributes
    ----------
    flops, l2_bytes_s
        FLOP/s in 16-bit types (TF32 takes as long per byte), and bytes/s from the L2 cache to all
        SMs.
    tile_s, byte_s
        Time of a tile outside its mainloop: fixed, and per result byte.
    """

    flops: float
    l2_bytes_s: float
    tile_s: float
    byte_s: float


# Fitted to tests/perf's dense layers. The mainloops of PINGPONG overlap stores and are limited by
# power; OF_PARTS are fitted to 396 times of 107 random and networks' layers. Sharing weights gains
# little.
COOPERATIVE = Rates(865e12, 12e12, 0.35e-6, 3.7e-11)
PINGPONG = Rates(800e12, 11.3e12, 0.9e-6, 3.7e-11)
OF_PARTS = Rates(938e12, 8.33e12, 0.3e-6, 2.8e-11)
SHARED = 0.995
# The most accumulators of a tile with float32 operands.
MOST_SUMS = 128 * 256
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 8: 15}
"""Concurrent clusters of an H200 by cluster size, with one block per SM."""
# Registers per thread of producers and consumers, by the number of consumer warpgroups.
REGISTERS = {2: (56, 224), 3: (56, 152)}
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
        Blocks of a cluster that split the K of one tile; only of a ``single`` one.
    pingpong
        Whether consumer warpgroups alternate tiles: one stores its results while the other
        multiplies. Otherwise they cooperate on a tile.
    single
        Whether a block has one tile (hopper_gather_single.cuh).
    blocks
        Blocks per SM; of a ``single`` tile.
    taps
        Taps of a kernel row that share the tile's pixels; of a ``single`` or ``pingpong`` tile.
    parts
        The bfloat16 parts that float32 operands are split into; several only of other tiles.
    """

    m: int
    n: int
    warpgroups: int = 2
    sharing: int = 1
    split: int = 1
    pingpong: bool = False
    single: bool = False
    blocks: int = 1
    taps: int = 1
    parts: int = 1

    def __str__(self) -> str:
        sharing = f"_x{self.sharing}" if self.sharing > 1 else ""
        split = f"_k{self.split}" if self.split > 1 else ""
        way = "a" if self.pingpong else f"{'s' if self.single else 'w'}{self.warpgroups}"
        more = "_row" * (self.taps > 1) + (f"_b{self.blocks}" if self.blocks > 1 else "")
        return f"{self.m}x{self.n}{way}{sharing}{split}{more}"

    @property
    def cluster(self) -> int:
        """Blocks per cluster."""
        return self.sharing * self.split

    @property
    def pixels(self) -> int:
        """Pixels of a cluster's tile."""
        return self.m * self.sharing

    def step_s(self, across: bool, apart_a: float, apart_b: float) -> float:
        """Return the seconds of a k-tile, of all ``taps``, limited by wgmma or by loads from L2.

        The L2 rate per SM does not rise if other SMs are idle. N-major weights (``across``) are
        loaded in whole boxes. Loads of pixels take ``apart_a`` times as long, those of weights
        ``apart_b`` times.
        """
        rates = self._rates
        products = self.taps * self.m * self.n * ROW_BYTES / rates.flops
        shared = SHARED if self.sharing > 1 else 1.0
        a_rows = self.m + (MOST_HALO if self.taps > 1 else 0)
        b_rows = self.taps * (ceil_div(self.n, BOX_ROWS) * BOX_ROWS if across else self.n)
        loaded = (a_rows * apart_a + b_rows * apart_b) * ROW_BYTES
        if self.parts > 1:
            products *= self.parts * (self.parts + 1) // 2
            loaded *= self.parts
        return max(products, loaded / rates.l2_bytes_s) * MULTIPROCESSORS * shared

    def tile_s(self, itemsize: int) -> float:
        """Return the seconds of a tile outside its mainloop."""
        return self._rates.tile_s + self.m * self.n * itemsize * self._rates.byte_s

    @property
    def _rates(self) -> Rates:
        return OF_PARTS if self.parts > 1 else PINGPONG if self.pingpong else COOPERATIVE

    @property
    def threads(self) -> int:
        return self.warpgroups * WARPGROUP + (PRODUCERS if self.single else WARPGROUP)

    @property
    def has_epilogue(self) -> bool:
        """Whether a bias and an activation fit into registers without spilling."""
        return self.split == 1 and self._thread_sums <= (160 if self.pingpong else 128)

    @property
    def has_planes(self) -> bool:
        """Whether it can store channels-first results."""
        return not (self.single or self.pingpong)

    @property
    def _thread_sums(self) -> int:
        """Accumulators of a thread."""
        return self.m * self.n // (WARPGROUP * (1 if self.pingpong else self.warpgroups))

    @property
    def stage_bytes(self) -> int:
        halo = MOST_HALO if self.taps > 1 else 0
        return (self.m + halo + self.taps * ceil_div(self.n, BOX_ROWS) * BOX_ROWS) * ROW_BYTES

    @property
    def owned(self) -> int:
        """The fragments of a warp that each block of a split tile reduces."""
        return ceil_div(self.m // self.warpgroups // 64 * (self.n // 8), self.split)

    @property
    def epilogue_bytes(self) -> int:
        """Shared memory of the results: partial sums, or staging buffers."""
        if self.split > 1:
            return self.split * self.owned * self.warpgroups * 4 * WARP_FRAGMENT_BYTES
        return self.warpgroups * STAGING_BYTES

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
        room = device.shared_bytes_per_multiprocessor // self.blocks - RESERVED_BYTES
        room = min(room, device.shared_bytes_per_block) - self.shared_bytes(0)
        most = MOST_STAGES if self.single else 8
        return min(most, room // (self.stage_bytes + 2 * BARRIER_BYTES))

    def shared_bytes(self, stages: int) -> int:
        ring = stages * (self.stage_bytes + 2 * BARRIER_BYTES)
        if self.single:
            return ALIGNMENT + ring + self.epilogue_bytes + 2 * BARRIER_BYTES + LIST_BYTES
        turns = BARRIER_BYTES * self.warpgroups if self.pingpong else 0
        return ALIGNMENT + ring + self.epilogue_bytes + QUEUE_BYTES + turns

    def defines(
        self,
        dtype: DType,
        *,
        across: bool,
        maps: int,
        stages: int,
        planes: bool = False,
        finished: bool = False,
    ) -> dict[str, object]:
        """Return the preprocessor macros of an instance; ``planes`` and ``finished`` say how
        cooperative warpgroups store results."""
        shape: dict[str, object] = {
            "ELEMENT": dtype,
            "ACROSS": across,
            "MAPS": maps,
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.warpgroups,
            "TAPS": self.taps,
        }
        if self.parts > 1:
            shape |= {"PARTS": self.parts, "RESULT": DType.FLOAT32}
        if self.single:
            return shape | {"SINGLE": 1}
        producer, consumer = REGISTERS[self.warpgroups]
        many = self.pingpong and self.m * self.n > MOST_SUMS_OF_FEW
        # With several phases, producers need more.
        if many or (self.parts > 1 and maps == 1 and self.warpgroups == 2):
            producer, consumer = REGISTERS_OF_MANY
        shape |= {
            "PINGPONG": self.pingpong,
            "SHARING": self.sharing,
            "STAGES": stages,
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
        }
        if not self.pingpong:
            shape |= {"PLANES": 1} if planes else {"EPILOGUE": 1} if finished else {}
        return shape


# Single tiles: pixels, channels, warpgroups, blocks per SM, and taps of a kernel row that share
# pixels; those that may be split, and others.
SPLIT = (
    *((64, 64, 1, 1, 1), (64, 64, 1, 2, 1), (64, 64, 1, 1, 3), (64, 192, 1, 1, 1)),
    *((128, 64, 1, 1, 1), (128, 64, 1, 2, 1), (128, 64, 2, 1, 3), (128, 128, 2, 1, 1)),
)
WHOLE = ((64, 64, 1, 2, 3), (256, 64, 2, 1, 3))
SPLITS = (1, 2, 3, 4, 6, 8)
TILES = (
    HopperTile(128, 256),
    HopperTile(128, 256, sharing=2),
    HopperTile(256, 128),
    HopperTile(192, 128, 3),
    HopperTile(256, 160),
    HopperTile(128, 224),
    HopperTile(128, 128),
    HopperTile(256, 64),
    HopperTile(128, 64),
    *(
        HopperTile(m, n, pingpong=True)
        for m, n in ((192, 128), (128, 128), (128, 160), (256, 64), (256, 32))
    ),
    HopperTile(256, 64, pingpong=True, taps=3),
    *(
        HopperTile(m, n, warpgroups, split=split, single=True, blocks=blocks, taps=taps)
        for m, n, warpgroups, blocks, taps in (*SPLIT, *WHOLE)
        for split in (SPLITS if (m, n, warpgroups, blocks, taps) in SPLIT else (1,))
    ),
)
"""Tile shapes that were the fastest for some layer."""
OF_FLOAT32 = ("128x160a", "128x224w2", "64x192s1")
"""Tiles of TF32 alone. Without the first, 27 layers take 1.12 times as long in TF32, and 15 layers
0.985 times in 16-bit types, whose plans hardly ever choose the others."""


PART_TILES = (
    HopperTile(128, 128, parts=3),
    HopperTile(128, 96, parts=3),
    HopperTile(192, 64, 3, parts=3),
    HopperTile(128, 64, parts=3),
    *(
        HopperTile(m, 64, warpgroups, split=split, single=True, blocks=blocks, parts=3)
        for m, warpgroups, blocks in ((64, 1, 2), (128, 2, 1))
        for split in SPLITS
    ),
)
"""Tile shapes of operands in parts: besides its sums, a thread holds as many of a k-tile."""


@cache
def tiles_of(dtype: DType, parts: int = 1) -> tuple[HopperTile, ...]:
    """Return the tiles for a dtype: for 32-bit types, those whose results fit into registers; for
    16-bit types, those at least a k-tile wide that were the fastest for some layer."""
    if parts > 1:
        return PART_TILES
    if dtype.itemsize == 2:
        wide = (tile for tile in TILES if tile.n >= BOX_ROWS)
        return tuple(tile for tile in wide if str(replace(tile, split=1)) not in OF_FLOAT32)
    return tuple(tile for tile in TILES if tile.m * tile.n <= MOST_SUMS)
