"""A plain matrix product as pointwise_gemm takes it, its tiles, and how blocks share it."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["Config", "Matrix", "Product"]

ROW_BYTES = (32, 64, 128)
"""What a row of shared memory may be, and is swizzled by."""
WARPGROUP, PRODUCERS = 128, 64
MOST_STAGES = 12
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}
"""By their size, how many an H200 runs at the same time where a block fills a multiprocessor."""
# What the system has of a multiprocessor's shared memory for each block.
RESERVED_BYTES = 1024
PATTERN_BYTES, BARRIER_BYTES, SLAB_ROWS, FRAGMENT_BYTES = 1024, 8, 16, 512


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand of a product: so many rows of it along the result (M or N), ``pitch`` elements from
    one to the next in memory of what lies apart, and whether its rows lie side by side (``mn``) or its
    elements along the reduction."""

    rows: int
    pitch: int
    mn: bool


@dataclass(frozen=True, slots=True)
class Product:
    """result[rows, columns] = a[rows, depth] * b[columns, depth].

    ``row_stride`` and ``column_stride`` are the result's. ``stores`` is whether the copy engine can
    store it, as plain results of the operands' type.
    """

    a: Matrix
    b: Matrix
    depth: int
    itemsize: int
    row_stride: int
    column_stride: int
    stores: bool

    @property
    def rows(self) -> int:
        return self.a.rows

    @property
    def columns(self) -> int:
        return self.b.rows

    @property
    def bytes(self) -> int:
        """That must be read and written."""
        elements = (self.rows + self.columns) * self.depth + self.rows * self.columns
        return elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of ``m`` x ``n`` by so many warpgroups, in steps of ``depth``; a's and b's rows in shared
    memory, in bytes; stages.

    With ``cluster`` 0 blocks take one row tile after another and the copy engine stores (REDUCE 0),
    with ``resident`` b is copied once. Else a tile's reduction is split among the blocks of a cluster and
    ``parts`` clusters. A multiprocessor has so many ``blocks`` at a time. ``share_a`` (``share_b``) blocks of a
    cluster share a (b). ``swap`` is whether wgrad's rows are input channels.
    """

    m: int
    n: int
    consumers: int
    depth: int
    a_bytes: int
    b_bytes: int
    stages: int
    cluster: int = 0
    parts: int = 1
    resident: bool = False
    buffers: int = 1
    blocks: int = 1
    share_a: int = 1
    share_b: int = 1
    swap: bool = False

    def __str__(self) -> str:
        name = f"{self.m}x{self.n}" + (f"w{self.consumers}" if self.consumers != self.m // 64 else "")
        if self.depth != 64:
            name += f"d{self.depth}"
        if self.resident:
            name += "r"
        if self.blocks > 1:
            name += f"x{self.blocks}"
        if self.share_a > 1 or self.share_b > 1:
            name += f"a{self.share_a}" if self.share_a > 1 else f"b{self.share_b}"
        if self.swap:
            name += "t"
        if self.cluster:
            name += f"_k{self.cluster}" + (f"/{self.parts}" if self.parts > 1 else "")
        return name

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP + PRODUCERS

    @property
    def splits(self) -> int:
        return max(self.cluster, 1) * self.parts

    def a_stage_bytes(self, product: Product) -> int:
        return _side_bytes(product.a, self.a_extent(product), self.a_bytes, self.depth, product)

    def b_stage_bytes(self, product: Product) -> int:
        return _side_bytes(product.b, self.n, self.b_bytes, self.depth, product)

    def a_extent(self, product: Product) -> int:
        """Rows of a in a stage: fewer than the tile's where one box holds all there are."""
        wide = self.a_bytes // product.itemsize
        if product.a.mn and product.rows <= wide:
            return wide
        return self.m

    def steps(self, product: Product) -> int:
        return ceil_div(product.depth, self.depth)

    def steps_each(self, product: Product) -> int:
        """The most of one block."""
        return ceil_div(self.steps(product), self.splits)

    @property
    def fragments(self) -> int:
        """Of a warp."""
        return self.m // (64 * self.consumers) * (self.n // 8)

    @property
    def owned(self) -> int:
        return ceil_div(self.fragments, max(self.cluster, 1))

    def row_tiles(self, product: Product) -> int:
        return ceil_div(product.rows, self.m)

    def column_tiles(self, product: Product) -> int:
        return ceil_div(product.columns, self.n)

    def beside_bytes(self, product: Product) -> int:
        """Of shared memory, all but the ring and its barriers."""
        if self.cluster:
            results = self.cluster * self.owned * self.consumers * 4 * FRAGMENT_BYTES
        else:
            rows = self.consumers * 4 * SLAB_ROWS * (self.m // (64 * self.consumers))
            results = self.buffers * rows * self.n * product.itemsize
        resident = self.steps(product) * self.b_stage_bytes(product) if self.resident else 0
        return 3 * PATTERN_BYTES + results + resident + 2 * BARRIER_BYTES

    def stage_bytes(self, product: Product) -> int:
        b = 0 if self.resident else self.b_stage_bytes(product)
        return self.a_stage_bytes(product) + b

    def shared_bytes(self, product: Product) -> int:
        ring = self.stages * (self.stage_bytes(product) + 2 * BARRIER_BYTES)
        return ring + self.beside_bytes(product)

    def most_stages(self, product: Product, device: CudaDevice) -> int:
        """As many as fit where a multiprocessor has ``blocks``, and as there are copies."""
        each = device.shared_bytes_per_multiprocessor // self.blocks - RESERVED_BYTES
        room = min(device.shared_bytes_per_block, each)
        room -= self.beside_bytes(product)
        fitting = room // (self.stage_bytes(product) + 2 * BARRIER_BYTES)
        tiles = 1 if self.cluster else 4
        return max(min(fitting, MOST_STAGES, max(self.steps_each(product) * tiles, 2)), 0)

    def grid(self, product: Product, device: CudaDevice) -> tuple[int, int, int]:
        """Of blocks that take one row tile after another."""
        rows, columns = self.row_tiles(product), self.column_tiles(product)
        share = self.share_a * self.share_b
        clusters = CLUSTERS[share] * device.multiprocessors * self.blocks // CLUSTERS[1]
        if self.share_a > 1:
            columns = ceil_div(columns, self.share_a)
            return columns * self.share_a, min(rows, max(1, clusters // columns)), 1
        rows = min(ceil_div(rows, share), max(1, clusters // columns))
        return rows * share, columns, 1

    @property
    def d_bytes(self) -> int:
        """Of a block of results, swizzled; 0 for all columns in one, as they are."""
        return next((2 * wide for wide in (64, 32) if self.n % wide == 0), 0)

    def defines(self, dtype: DType, product: Product) -> dict[str, object]:
        """What pointwise_gemm.cu expects."""
        a, b = product.a, product.b
        return {
            "ELEMENT": CUDA_TYPES[dtype],
            "A_MN": int(a.mn),
            "B_MN": int(b.mn),
            "A_BYTES": self.a_bytes,
            "B_BYTES": self.b_bytes,
            "A_EXTENT": self.a_extent(product),
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.consumers,
            "DEPTH": self.depth,
            "STAGES": self.stages,
            "REDUCE": int(self.cluster > 0),
            "RESIDENT": int(self.resident),
            "BUFFERS": self.buffers,
            "D_BYTES": self.d_bytes,
            "SHARE_A": self.share_a,
            "SHARE_B": self.share_b,
        }


def is_whole(matrix: Matrix, extent: int, wide: int) -> bool:
    """Whether boxes ``wide`` rows make up all of them, and a tile's."""
    return matrix.rows % wide == 0 and extent % wide == 0


def row_bytes_of(matrix: Matrix, elements: int, itemsize: int) -> int:
    """The least that holds so many elements, or the most there is."""
    return next((size for size in ROW_BYTES if elements * itemsize <= size), ROW_BYTES[-1])


def _side_bytes(matrix: Matrix, extent: int, row_bytes: int, depth: int, product: Product) -> int:
    if not matrix.mn:
        return extent * depth * product.itemsize
    return ceil_div(extent * product.itemsize, row_bytes) * depth * row_bytes
