"""A plain matrix product as pointwise_gemm takes it, its tiles, and how blocks share it."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = [
    "BARRIER_BYTES",
    "CLUSTERS",
    "ITEM_BYTES",
    "SLAB_ROWS",
    "Config",
    "Matrix",
    "Product",
]

ROW_BYTES = (32, 64, 128)
"""What a row of shared memory may be, and is swizzled by."""
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
"""By their size, how many an H200 runs at the same time where a block fills a multiprocessor."""
ITEM_BYTES = 2
WARPGROUP, PRODUCERS = 128, 64
MOST_STAGES = 12
PATTERN_BYTES, BARRIER_BYTES, SLAB_ROWS, FRAGMENT_BYTES = 1024, 8, 16, 512
# Up to this many results a block has a second buffer for them.
BUFFERED = 64 * 128


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand of a product: its ``rows`` along the result (M or N), and the elements from one
    line in memory to the next. ``mn``: rows lie side by side, else the elements of a row."""

    rows: int
    pitch: int
    mn: bool


@dataclass(frozen=True, slots=True)
class Product:
    """result[rows, columns] = a[rows, depth] * b[columns, depth], of 16-bit elements.

    ``row_stride`` and ``column_stride`` are the result's. ``stores`` is whether the copy engine can
    store it: results of the operands' type in chunks of 16 bytes, at most scaled and with a bias.
    ``swapped``: of wgrad, the rows are input channels.
    """

    a: Matrix
    b: Matrix
    depth: int
    row_stride: int
    column_stride: int
    stores: bool
    swapped: bool = False

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
        return elements * ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of ``m`` x ``n`` in steps of ``depth``, and who does what.

    With ``cluster`` 0 blocks take one row tile after another and the copy engine stores
    (REDUCE 0), with ``resident`` b is copied once. Else a tile's reduction is split among the
    blocks of a cluster and ``parts`` clusters.
    """

    m: int
    n: int
    depth: int = 64
    cluster: int = 0
    parts: int = 1
    resident: bool = False

    def __str__(self) -> str:
        name = f"{self.m}x{self.n}" + (f"d{self.depth}" if self.depth != 64 else "")
        name += "r" * self.resident
        if self.cluster:
            name += f"_k{self.cluster}" + (f"/{self.parts}" if self.parts > 1 else "")
        return name

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return min(self.m // 64, 2)

    @property
    def threads(self) -> int:
        return self.consumers * WARPGROUP + PRODUCERS

    @property
    def splits(self) -> int:
        return max(self.cluster, 1) * self.parts

    @property
    def buffers(self) -> int:
        """Of a warp's results."""
        return 2 if self.m * self.n <= BUFFERED else 1

    @property
    def fragments(self) -> int:
        """Of a warp."""
        return self.m // (64 * self.consumers) * (self.n // 8)

    @property
    def owned(self) -> int:
        return ceil_div(self.fragments, max(self.cluster, 1))

    @property
    def d_bytes(self) -> int:
        """Of a block of results, swizzled; 0 for all columns in one, as they are."""
        return next((2 * wide for wide in (64, 32) if self.n % wide == 0), 0)

    def row_bytes(self, matrix: Matrix, extent: int) -> int:
        """Of an operand of which a tile has ``extent`` rows."""
        elements = extent if matrix.mn else self.depth
        return next((size for size in ROW_BYTES if elements * ITEM_BYTES <= size), ROW_BYTES[-1])

    def boxes(self, matrix: Matrix, extent: int) -> int:
        """Of a stage of an operand: how many rows there are beside each other."""
        elements = extent if matrix.mn else self.depth
        return ceil_div(elements * ITEM_BYTES, self.row_bytes(matrix, extent))

    def lines(self, matrix: Matrix, extent: int) -> int:
        """Of a stage of an operand: how many rows of shared memory."""
        return (self.depth if matrix.mn else extent) * self.boxes(matrix, extent)

    def side_bytes(self, matrix: Matrix, extent: int) -> int:
        """Of a stage of an operand."""
        return self.lines(matrix, extent) * self.row_bytes(matrix, extent)

    def is_whole(self, matrix: Matrix, extent: int) -> bool:
        """Whether boxes make up all of an operand's rows, and a tile's."""
        wide = self.row_bytes(matrix, extent) // ITEM_BYTES
        return matrix.mn and matrix.rows % wide == 0 and extent % wide == 0

    def steps(self, product: Product) -> int:
        return ceil_div(product.depth, self.depth)

    def steps_each(self, product: Product) -> int:
        """The most of one block, in a tile."""
        return ceil_div(self.steps(product), self.splits)

    def tiles(self, product: Product) -> tuple[int, int]:
        """Of rows and of columns."""
        return ceil_div(product.rows, self.m), ceil_div(product.columns, self.n)

    def grid(self, product: Product, device: CudaDevice) -> tuple[int, int, int]:
        rows, columns = self.tiles(product)
        if self.cluster:
            return self.splits, columns, rows
        return min(rows, max(1, device.multiprocessors // columns)), columns, 1

    def stage_bytes(self, product: Product) -> int:
        a = self.side_bytes(product.a, self.m)
        return a if self.resident else a + self.side_bytes(product.b, self.n)

    def shared_bytes(self, product: Product, stages: int) -> int:
        """Of a block: ring, what is resident, results on their way, barriers, and to align them."""
        if self.cluster:
            results = self.cluster * self.owned * self.consumers * 4 * FRAGMENT_BYTES
        else:
            results = self.buffers * self.m * self.n * ITEM_BYTES
        if self.resident:
            results += self.steps(product) * self.side_bytes(product.b, self.n)
        ring = stages * (self.stage_bytes(product) + 2 * BARRIER_BYTES)
        return 3 * PATTERN_BYTES + results + ring + 2 * BARRIER_BYTES

    def stages(self, product: Product, device: CudaDevice) -> int:
        """As many as fit."""
        room = device.shared_bytes_per_block - self.shared_bytes(product, 0)
        return min(MOST_STAGES, room // (self.stage_bytes(product) + 2 * BARRIER_BYTES))

    def defines(self, dtype: DType, product: Product) -> dict[str, object]:
        """What pointwise_gemm.cu expects."""
        return {
            "ELEMENT": CUDA_TYPES[dtype],
            "A_MN": int(product.a.mn),
            "B_MN": int(product.b.mn),
            "A_BYTES": self.row_bytes(product.a, self.m),
            "B_BYTES": self.row_bytes(product.b, self.n),
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.consumers,
            "DEPTH": self.depth,
            "REDUCE": int(self.cluster > 0),
            "RESIDENT": int(self.resident),
            "BUFFERS": self.buffers,
            "D_BYTES": self.d_bytes,
        }
