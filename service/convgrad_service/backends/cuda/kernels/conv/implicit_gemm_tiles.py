"""Tile shapes of implicit_gemm, and how a problem is split among blocks."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["CLUSTERS", "STEP_BYTES", "TILES", "Config", "Gemm", "Tile"]

STEP_BYTES = 128
"""Bytes along K of a k-tile."""
CLUSTERS = (1, 2, 4, 8)
"""The largest portable cluster."""
STAGES = 4
"""Bytes of most tiles' pipelines, where blocks share an SM."""
# In front of the ring, for the barrier; what the system has of a multiprocessor's for each block.
BARRIER_BYTES, RESERVED_BYTES = 128, 1024
# ClusterReduce: a fragment of 16 x 8 sums, padded.
FRAGMENT_BYTES, FRAGMENT_SUMS = 656, 128


@dataclass(frozen=True, slots=True)
class Tile:
    """Block tile and warp tile (M x N), pipeline stages, and blocks per SM by registers."""

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
        """Fragments of a warp: the most blocks of a cluster that can own a part each."""
        return self.warp_m // 16 * (self.warp_n // 8)

    def ring_bytes(self, steps: int) -> int:
        """Pipeline bytes of a block with that many k-tiles: no more stages than it fills."""
        return min(self.stages, max(steps, 1)) * (self.m + self.n) * STEP_BYTES

    def shared_bytes(self, cluster: int, steps: int) -> int:
        ring = self.ring_bytes(steps)
        sums = self.m * self.n // FRAGMENT_SUMS * FRAGMENT_BYTES
        return BARRIER_BYTES + (max(ring, sums) if cluster == 1 else ring + sums)

    def resident(self, device: CudaDevice, cluster: int, steps: int) -> int:
        """Resident blocks per SM."""
        each = self.shared_bytes(cluster, steps) + RESERVED_BYTES
        return min(self.blocks, device.shared_bytes_per_multiprocessor // each)

    def defines(self, dtype: DType, operation: str, vector: int) -> dict[str, object]:
        """Return the preprocessor macros of an instance."""
        return {
            "ELEMENT": CUDA_TYPES[dtype],
            "OPERATION": operation,
            "BM": self.m,
            "BN": self.n,
            "WM": self.warp_m,
            "WN": self.warp_n,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "VECTOR": vector,
        }


TILES = (
    Tile(64, 64, 32, 32, 4, 3),
    Tile(64, 64, 32, 32, 6, 2),
    Tile(64, 32, 32, 16, 4, 4),
    Tile(32, 64, 16, 32, 4, 4),
    Tile(32, 32, 16, 16, 6, 4),
    Tile(128, 16, 32, 16, 4, 3),
    Tile(128, 32, 32, 32, 4, 3),
    Tile(128, 64, 32, 32, 4, 2),
    Tile(64, 128, 32, 32, 4, 2),
    Tile(128, 128, 64, 32, 4, 1),
)


@dataclass(frozen=True, slots=True)
class Config:
    """A tile, and its split of K: blocks of a cluster, and clusters through a workspace."""

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
        """The most k-tiles of one block."""
        return ceil_div(gemm.steps(dtype), self.splits)


@dataclass(frozen=True, slots=True)
class Gemm:
    """A convolution as implicit_gemm takes it: for each phase its rows and the elements of its
    reduction (in whole chunks), columns, and groups; the bytes that it must read and write; whether
    it is wgrad; whether its pixels are looked up (``irregular``), by position and tap."""

    phases: tuple[tuple[int, int], ...]
    columns: int
    groups: int
    bytes: int
    weight: bool
    irregular: bool

    @property
    def rows(self) -> int:
        """Rows of the largest phase."""
        return max(rows for rows, _ in self.phases)

    def tiles(self, tile: Tile) -> int:
        """Blocks of one phase and group in the grid."""
        return ceil_div(self.rows, tile.m) * ceil_div(self.columns, tile.n)

    def steps(self, dtype: DType) -> int:
        """The most k-tiles of any phase."""
        return max(ceil_div(depth * dtype.itemsize, STEP_BYTES) for _, depth in self.phases)
