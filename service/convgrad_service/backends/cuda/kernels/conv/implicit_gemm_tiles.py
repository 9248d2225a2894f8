"""Tile shapes of implicit_gemm, and the split of a problem among blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = [
    "ANY_PLANES",
    "CHUNK_BYTES",
    "CLUSTERS",
    "FLAT_PLANES",
    "STEP_BYTES",
    "TILES",
    "Config",
    "Copies",
    "Gemm",
    "Tile",
]
__all__ += ["tiles_of"]

STEP_BYTES = 128
"""Bytes along K of a k-tile."""
CHUNK_BYTES = 16
"""Bytes of the largest vector that a thread copies."""
CLUSTERS = (1, 2, 4, 8)
"""Cluster sizes, up to the largest portable one."""
STAGES = 4
"""The default number of pipeline stages, which tile names omit."""
# Shared memory in front of the pipeline for the mbarrier.
BARRIER_BYTES = 128
# ClusterReduce: a 16 x 8 fragment of accumulators, padded.
FRAGMENT_BYTES, FRAGMENT_ELEMENTS = 656, 128


ANY_PLANES, FLAT_PLANES = 1, 2


@dataclass(frozen=True, slots=True)
class Copies:
    """How threads copy operands, and multiply them.

    Attributes
    ----------
    vector
        Bytes of a copy.
    split
        Whether products of float32 are three of TF32 (``core/split_tf32.cuh``).
    planes
        Whether activations are channels first, in float32: ``ANY_PLANES``, or ``FLAT_PLANES`` of
        1x1 (``Planes`` in implicit_gemm_args.cuh).
    pointwise
        Whether the layer is 1x1 with stride 1, channels last in whole chunks, and plain.
    """

    vector: int
    split: bool = False
    planes: int = 0
    pointwise: bool = False


@dataclass(frozen=True, slots=True)
class Tile:
    """Block tile and warp tile (M x N), pipeline stages, and blocks per SM that registers allow."""

    m: int
    n: int
    warp_m: int
    warp_n: int
    stages: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}" + (f"s{self.stages}" if self.stages != STAGES else "")

    @property
    def threads(self) -> int:
        return self.m // self.warp_m * (self.n // self.warp_n) * 32

    @property
    def fragments(self) -> int:
        """Fragments of a warp, which bound the cluster size: each block reduces at least one."""
        return self.warp_m // 16 * (self.warp_n // 8)

    def pipeline_bytes(self, steps: int) -> int:
        """Return the pipeline bytes of a block with that many k-tiles, without unused stages."""
        return min(self.stages, max(steps, 1)) * (self.m + self.n) * STEP_BYTES

    def shared_bytes(self, cluster: int, steps: int) -> int:
        pipeline = self.pipeline_bytes(steps)
        accumulators = self.m * self.n // FRAGMENT_ELEMENTS * FRAGMENT_BYTES
        both = max(pipeline, accumulators) if cluster == 1 else pipeline + accumulators
        return BARRIER_BYTES + both

    def resident(self, device: CudaDevice, cluster: int, steps: int) -> int:
        """Return the resident blocks per SM."""
        return min(self.blocks, device.fitting_blocks(self.shared_bytes(cluster, steps)))

    def defines(self, dtype: DType, operation: str, copies: Copies) -> dict[str, object]:
        """Return the preprocessor macros of an instance."""
        return {
            "ELEMENT": dtype,
            "OPERATION": operation,
            "BM": self.m,
            "BN": self.n,
            "WM": self.warp_m,
            "WN": self.warp_n,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "VECTOR": copies.vector,
            "SPLIT": copies.split,
            "PLANES": copies.planes,
            "POINTWISE": copies.pointwise,
        }


TILES = (
    Tile(64, 64, 32, 32, 4, 3),
    Tile(64, 32, 32, 16, 4, 4),
    Tile(32, 64, 16, 32, 4, 4),
    Tile(32, 32, 16, 16, 6, 4),
    Tile(128, 16, 32, 16, 4, 3),
    Tile(128, 32, 32, 32, 4, 3),
    Tile(128, 64, 32, 32, 4, 2),
    Tile(128, 128, 64, 32, 4, 1),
    Tile(128, 64, 32, 64, 3, 2),
    Tile(128, 32, 32, 32, 3, 2),
    Tile(32, 128, 32, 32, 3, 2),
)
# Tiles of 16-bit types by whether it is a wgrad, and the bytes of a copy: those without which 2,300
# layers would be expected to take more than 0.3 % longer on average (0.8 % in wgrads with copies of
# 8 bytes).
MENUS = {
    (False, 16): "128x128 128x16 128x32 128x64 32x32s6 32x64 64x32",
    (False, 8): "128x128 128x16 128x32 128x64 32x32s6",
    (False, 4): "128x128 128x16 128x32 128x64 32x32s6",
    (True, 16): "32x32s6 32x64 64x32 64x64",
    (True, 8): "128x64 32x64 64x32",
    (True, 4): "32x64 64x32",
}
# Of float32 by whether it is a wgrad, and whether channels are first: those whose absence costs
# 0.3 % or more of the time of 52 to 216 random layers. Narrow copies are of few layers.
FLOAT32 = {
    (False, False): "128x16 32x32s6 64x32 64x64",
    (False, True): "128x16 128x32s3 128x64s3 64x32 64x64",
    (True, False): "32x32s6 64x32 64x64",
    (True, True): "32x128s3 32x64 64x32 64x64",
}
NARROW_FLOAT32 = "32x32s6 64x64"


@cache
def tiles_of(dtype: DType, copies: Copies, *, weight: bool) -> list[Tile]:
    """Return the tiles for a dtype and a kind of copies, of wgrad or the others."""
    planes = copies.planes > 0
    if dtype is not DType.FLOAT32:
        menu = MENUS[weight, copies.vector]
    elif planes or copies.vector == CHUNK_BYTES:
        menu = FLOAT32[weight, planes]
    else:
        menu = NARROW_FLOAT32
    return [tile for tile in TILES if str(tile) in menu.split()]


@dataclass(frozen=True, slots=True)
class Config:
    """A tile and its split-K: over the blocks of a cluster, and over clusters that reduce through a
    workspace."""

    tile: Tile
    cluster: int = 1
    workspace: int = 1

    def __str__(self) -> str:
        split = f"_k{self.cluster}" if self.cluster > 1 else ""
        return f"{self.tile}{split}" + (f"/{self.workspace}" if self.workspace > 1 else "")

    @property
    def splits(self) -> int:
        return self.cluster * self.workspace

    def steps(self, gemm: Gemm, dtype: DType) -> int:
        """Return the most k-tiles of any block."""
        return ceil_div(gemm.steps(dtype), self.splits)


@dataclass(frozen=True)
class Gemm:
    """A convolution as the GEMM that implicit_gemm computes.

    Attributes
    ----------
    phases
        M and K (in whole chunks) of each phase.
    columns, groups
        N, and the number of groups.
    bytes
        Bytes of the inputs and the result.
    weight
        Whether it is wgrad.
    irregular
        Whether the kernel must compute pixel addresses from position and tap.
    copies
        How operands are copied.
    """

    phases: tuple[tuple[int, int], ...]
    columns: int
    groups: int
    bytes: int
    weight: bool
    irregular: bool
    copies: Copies = Copies(CHUNK_BYTES)

    @cached_property
    def rows(self) -> int:
        """M of the largest phase."""
        return max(rows for rows, _ in self.phases)

    @cached_property
    def depth(self) -> int:
        """K of the deepest phase."""
        return max(depth for _, depth in self.phases)

    @cached_property
    def deepest(self) -> int:
        """Phases as deep as the deepest."""
        return sum(depth == self.depth for _, depth in self.phases)

    def tiles(self, tile: Tile) -> int:
        """Return the number of tiles in the grid per phase and group."""
        return ceil_div(self.rows, tile.m) * ceil_div(self.columns, tile.n)

    def steps(self, dtype: DType) -> int:
        """Return the most k-tiles of any phase."""
        return ceil_div(self.depth * dtype.itemsize, STEP_BYTES)

    def mean_steps(self, dtype: DType) -> float:
        """Return the k-tiles of a phase on average."""
        return (
            sum(depth for _, depth in self.phases)
            * dtype.itemsize
            / (STEP_BYTES * len(self.phases))
        )
