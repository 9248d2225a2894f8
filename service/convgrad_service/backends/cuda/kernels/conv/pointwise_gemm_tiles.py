"""GEMMs of pointwise_gemm, its tile shapes, and their partition among blocks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_matrices import (
    BARRIER_BYTES,
    ITEM_BYTES,
    SHIFTED,
    TF32,
    UNALIGNED,
    Matrix,
    Product,
)
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["BOX_PIXELS", "CHUNK_BYTES", "CLUSTERS", "ITEM_BYTES", "MOST_GRID_PARTS", "ROW_BYTES"]
__all__ += ["SHIFTED", "SLAB_ROWS", "TF32", "UNALIGNED", "Config", "Matrix", "Product"]

ROW_BYTES = (32, 64, 128)
"""Row lengths in shared memory, which are also the swizzle widths."""
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}
"""Concurrent clusters of an H200 by cluster size, with one block per SM."""
NAME = re.compile(r"(\d+)x(\d+)(?:d(\d+))?(r?)(?:m(\d))?(a?)(?:_k(\d+))?(?:/(\d+))?")
"""A configuration's name."""
WARPGROUP, PRODUCERS = 128, 64
MOST_STAGES = 12
PATTERN_BYTES, SLAB_ROWS, FRAGMENT_BYTES = 1024, 16, 512
CHUNK_BYTES = 16
# Fragments that a warp reduces at a time, and the most parts (pointwise_gemm_grid_reduce.cuh).
GRID_FRAGMENTS, MOST_GRID_PARTS = 4, 255
# The most results of a tile for which a block has a second store buffer.
BUFFERED = 64 * 128
# Threads besides the usual ones that copy or align planes that do not start at multiples of 16
# bytes, and that load rows which are no whole chunks.
ALIGNERS, LOADERS = 192, 64
BOX_PIXELS = 56
"""Pixels of such a plane in a box (pointwise_gemm_shift.cuh)."""
# Rows of a warpgroup's product, and columns of a slice of it that it stores.
WARPGROUP_ROWS, SLICE_COLUMNS = 64, 64


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of ``m`` x ``n`` with k-tiles of ``depth``, and its schedule.

    With ``cluster`` 0 and one part, blocks are persistent over row tiles (of a transposed product:
    over column tiles) and TMA stores results (REDUCE 0); with ``resident``, B is loaded once. With
    ``cluster`` 0 and more ``parts``, K is split among that many blocks of the grid (REDUCE 2).
    Otherwise K is split among the blocks of a cluster, and among ``parts`` clusters (REDUCE 1).
    With ``multicast``, clusters of so many blocks share the operand that their tiles have in
    common. With ``alternate``, a block's two warpgroups take a tile each in turn (ping-pong).
    """

    m: int
    n: int
    depth: int = 64
    cluster: int = 0
    parts: int = 1
    resident: bool = False
    multicast: int = 1
    alternate: bool = False

    def __str__(self) -> str:
        name = f"{self.m}x{self.n}" + (f"d{self.depth}" if self.depth != 64 else "")
        name += "r" * self.resident
        name += f"m{self.multicast}" if self.multicast > 1 else ""
        name += "a" * self.alternate
        if self.cluster:
            name += f"_k{self.cluster}"
        return name + (f"/{self.parts}" if self.parts > 1 else "")

    @classmethod
    def named(cls, name: str) -> Config | None:
        """Return the configuration of this name; None if it is none."""
        found = NAME.fullmatch(name)
        if found is None:
            return None
        m, n, depth, cluster, parts = (int(found[i] or 0) for i in (1, 2, 3, 7, 8))
        return cls(
            m,
            n,
            depth or 64,
            cluster,
            parts or 1,
            resident=bool(found[4]),
            multicast=int(found[5] or 1),
            alternate=bool(found[6]),
        )

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return 2 if self.alternate else {64: 1, 192: 3}.get(self.m, 2)

    def threads(self, product: Product) -> int:
        more = ALIGNERS * product.shifted + LOADERS * product.unaligned
        return self.consumers * WARPGROUP + PRODUCERS + more

    @property
    def in_grid(self) -> bool:
        """Whether blocks of the grid reduce a tile, without clusters."""
        return self.cluster == 0 and self.parts > 1

    @property
    def reduces(self) -> bool:
        """Whether results are reduced through shared memory, not stored by TMA."""
        return self.cluster > 0 or self.in_grid

    @property
    def slices(self) -> int:
        """With ``in_grid``, warps that divide the parts of a fragment: as many as leave each warp
        ``GRID_FRAGMENTS`` fragments at a time."""
        warps = self.consumers * 4
        count = ceil_div(warps * self.fragments, self.parts)
        slices = warps
        while slices > 1 and (slices > self.parts or warps // slices * GRID_FRAGMENTS < count):
            slices //= 2
        return slices

    @property
    def splits(self) -> int:
        return max(self.cluster, 1) * self.parts

    @property
    def parts_of_m(self) -> int:
        """Products of 64 rows that a warpgroup computes at a time."""
        return self.m // (WARPGROUP_ROWS * (1 if self.alternate else self.consumers))

    def in_slices(self, product: Product) -> bool:
        """Return whether results are stored a slice of the columns at a time."""
        return self.alternate or (product.images > 0 and not product.transposed)

    def buffers(self, product: Product) -> int:
        """Return the store buffers per warp or, of planes, per warpgroup."""
        if self.in_slices(product):
            return 2
        return self.parts_of_m * (2 if self.m * self.n <= BUFFERED else 1)

    def stored_columns(self, product: Product) -> int:
        """Return the columns of a store buffer."""
        whole = not self.in_slices(product) or self.n % SLICE_COLUMNS
        return self.n if whole else SLICE_COLUMNS

    @property
    def fragments(self) -> int:
        """Accumulator fragments of a warp."""
        return self.parts_of_m * (self.n // 8)

    @property
    def owned(self) -> int:
        return ceil_div(self.fragments, max(self.cluster, 1))

    @property
    def d_bytes(self) -> int:
        """Bytes of a row of a swizzled block of results, or 0 for one block without swizzle."""
        return next((2 * wide for wide in (64, 32) if self.n % wide == 0), 0)

    def row_bytes(self, matrix: Matrix, extent: int) -> int:
        """Return the bytes of a row in shared memory of an operand with ``extent`` rows per
        tile."""
        elements = extent if matrix.mn else self.depth
        return next(
            (size for size in ROW_BYTES if elements * matrix.item_bytes <= size), ROW_BYTES[-1]
        )

    def boxes(self, matrix: Matrix, extent: int) -> int:
        """Return the number of adjacent boxes per stage of an operand."""
        elements = extent if matrix.mn else self.depth
        return ceil_div(elements * matrix.item_bytes, self.row_bytes(matrix, extent))

    def lines(self, matrix: Matrix, extent: int) -> int:
        """Return the rows of shared memory per stage of an operand."""
        return (self.depth if matrix.mn else extent) * self.boxes(matrix, extent)

    def side_bytes(self, matrix: Matrix, extent: int) -> int:
        """Return the bytes per stage of an operand."""
        return self.lines(matrix, extent) * self.row_bytes(matrix, extent)

    def is_whole(self, matrix: Matrix, extent: int) -> bool:
        """Return whether whole boxes cover all rows of an MN-major operand, and those of a tile."""
        wide = self.row_bytes(matrix, extent) // matrix.item_bytes
        return matrix.mn and not matrix.image and matrix.rows % wide == extent % wide == 0

    def depth_of(self, product: Product) -> int:
        """Return the elements of K of a k-tile."""
        boxes = self.depth * ITEM_BYTES // ROW_BYTES[-1]
        return boxes * BOX_PIXELS if product.shifted and product.summed_images else self.depth

    def image_steps(self, product: Product) -> int:
        """Return the k-tiles of an image of those that are summed, or of all of K."""
        images = max(product.summed_images, 1)
        return ceil_div(product.depth // images, self.depth_of(product))

    def steps(self, product: Product) -> int:
        return max(product.summed_images, 1) * self.image_steps(product)

    def steps_each(self, product: Product) -> int:
        """Return the most k-tiles of any block in a tile."""
        return ceil_div(self.steps(product), self.splits)

    def tiles(self, product: Product) -> tuple[int, int]:
        """Return the tiles along rows and along columns, of all images."""
        images = max(product.images, 1)
        over_m, over_n = (1, images) if product.transposed else (images, 1)
        rows = over_m * ceil_div(product.rows // over_m, self.m)
        return rows, over_n * ceil_div(product.columns // over_n, self.n)

    def grid(self, product: Product, device: CudaDevice) -> tuple[int, int, int]:
        rows, columns = self.tiles(product)
        if self.in_grid:
            return rows * columns, self.parts, 1
        if self.cluster:
            return self.splits, columns, rows
        if product.transposed:
            rows, columns = columns, rows
        # Clusters that share an operand are of neighbouring tiles.
        together = CLUSTERS[self.multicast] * device.multiprocessors // CLUSTERS[1]
        clusters = min(ceil_div(rows, self.multicast), max(1, together // columns))
        return clusters * self.multicast, columns, 1

    def copied_bytes(self, product: Product) -> int:
        """Return the bytes per stage of planes that are not aligned yet."""
        if product.summed_images:
            return (self.m + self.n) * self.depth * ITEM_BYTES
        return self.depth * self.n // BOX_PIXELS * ROW_BYTES[-1]

    def unaligned_bytes(self, matrix: Matrix, extent: int) -> int:
        """Return the bytes per stage of an operand whose rows are no whole chunks."""
        rows, wide = (self.depth, extent) if matrix.mn else (extent, self.depth)
        return rows * (wide * ITEM_BYTES + CHUNK_BYTES)

    def stage_bytes(self, product: Product) -> int:
        if product.unaligned:
            a = self.unaligned_bytes(product.a, self.m)
            return a + self.unaligned_bytes(product.b, self.n)
        a = self.side_bytes(product.a, self.m)
        operands = a if self.resident else a + self.side_bytes(product.b, self.n)
        return operands + (self.copied_bytes(product) if product.shifted else 0)

    def shared_bytes(self, product: Product, stages: int) -> int:
        """Return the bytes of shared memory: the pipeline, resident B, results, mbarriers, and
        alignment."""
        if product.in_tf32 and not self.reduces:
            results = 0  # stored from registers
        elif self.cluster:
            results = self.cluster * self.owned * self.consumers * 4 * FRAGMENT_BYTES
        elif self.in_grid:
            results = GRID_FRAGMENTS * self.consumers * 4 * FRAGMENT_BYTES
        else:
            rows = self.consumers * WARPGROUP_ROWS
            results = self.buffers(product) * rows * self.stored_columns(product) * ITEM_BYTES
        parts = [self.stage_bytes(product)]
        if self.resident:
            parts.append(self.side_bytes(product.b, self.n))
            results += self.steps(product) * parts[1]
        aligned = 1 + sum(size % PATTERN_BYTES > 0 for size in parts)
        ring = stages * (parts[0] + product.barrier_bytes)
        return aligned * PATTERN_BYTES + results + ring + 2 * BARRIER_BYTES

    def stages(self, product: Product, device: CudaDevice) -> int:
        """Return the number of pipeline stages that fit."""
        room = device.shared_bytes_per_block - self.shared_bytes(product, 0)
        return min(MOST_STAGES, room // (self.stage_bytes(product) + product.barrier_bytes))

    def defines(self, dtype: DType, product: Product) -> dict[str, object]:
        """Return the preprocessor macros of an instance."""
        return {
            "ELEMENT": CUDA_TYPES[dtype],
            "IN_TF32": int(product.in_tf32),
            "A_MN": int(product.a.mn),
            "B_MN": int(product.b.mn),
            "A_BYTES": ROW_BYTES[0] if product.unaligned else self.row_bytes(product.a, self.m),
            "B_BYTES": ROW_BYTES[0] if product.unaligned else self.row_bytes(product.b, self.n),
            "BM": self.m,
            "BN": self.n,
            "CONSUMERS": self.consumers,
            "DEPTH": self.depth,
            "REDUCE": 2 if self.in_grid else int(self.cluster > 0),
            "RESIDENT": int(self.resident),
            "MULTICAST": int(self.multicast > 1),
            "BUFFERS": self.buffers(product),
            "STORED": self.stored_columns(product),
            "PINGPONG": int(self.alternate),
            "TRANSPOSED": int(product.transposed and not self.reduces),
            "PLANES": int(product.images > 0),
            "IMAGES": int(product.summed_images > 0),
            "SHIFTED": int(product.shifted),
            "UNALIGNED": (1 + product.straddles) * product.unaligned,
            "D_BYTES": self.d_bytes,
        }
