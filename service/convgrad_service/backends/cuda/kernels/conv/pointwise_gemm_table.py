"""The times that configurations of pointwise_gemm are expected to take, as vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_configs import (
    DEEP,
    SHALLOW,
    USUAL,
    every_config,
    sharing,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_rates import (
    GATHER,
    GATHER_TF32,
    GATHER_UNALIGNED,
    PLANES_UNALIGNED,
    WGRAD,
    WGRAD_TF32,
    WGRAD_UNALIGNED,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    CHUNK_BYTES,
    CLUSTERS,
    ITEM_BYTES,
    MOST_GRID_PARTS,
    SHIFTED,
    TF32,
    UNALIGNED,
    Config,
    Matrix,
    Product,
)
from convgrad_service.backends.cuda.kernels.core.limits import MAX_GRID_YZ
from convgrad_service.backends.cuda.tuning.features import features
from convgrad_service.plans.cuda.device import CudaDevice

__all__ = ["TRANSPOSED_KINDS", "WEIGHT_KINDS", "Table", "table_of_kind"]

# Weight gradients, and whether their operands are MN-major.
WEIGHT_KINDS = {
    "weight": True,
    f"weight{TF32}": True,
    "weight_planes": False,
    f"weight_planes{SHIFTED}": False,
    f"weight{UNALIGNED}": True,
    f"weight_planes{UNALIGNED}": False,
    f"weight_planes{TF32}": False,
}
TRANSPOSED_KINDS = (
    "transposed",
    f"planes_transposed{SHIFTED}",
    f"planes_transposed{UNALIGNED}",
    f"transposed{TF32}",
)
MULTIPROCESSORS = 132
MOST_RESIDENT_BYTES, MOST_COLUMN_TILES = 100_000, 4
LEAST_STAGES, LEAST_DEEP_STAGES, MANY_STAGES = 3, 4, 4
# The lowest tiles, and those of which a product must have many.
LEAST_ROWS, TALL_ROWS = 64, 192
# The most columns of all tiles relative to the result's, and the fewest tiles of 256 rows and the
# fewest transposed tiles, as fewer would leave SMs idle.
MOST_SPARE, LEAST_TALL, LEAST_TRANSPOSED = 1.4, 60, 40
# How much slower than expected transposed tiles may be: their correction is fitted to fewer layers
# and errs more. Without it, more of the layers that were held out would be slower than before.
DOUBT = 1.05
# Microseconds per thousand results that are stored element by element, of 37 forward passes.
ELEMENTS = 0.012
# A tensor-core clock in microseconds, and the fewest clocks of a wgmma.
CLOCK, LEAST_CLOCKS = 1 / 1755, 16
# Tensor-core clocks of TF32 by mma.sync over those of as many products by wgmma in 16 bits; bytes
# of shared memory in a clock.
TF32_CLOCKS, LINE_BYTES = 3.2, 128


class Table:
    """All configurations for one layout of the operands.

    Arrays hold the parts of the model that do not depend on sizes or the device, so that planning,
    which adds to the latency of a request, is a few vector operations.
    """

    def __init__(self, kind: str, *, a_mn: bool, b_mn: bool) -> None:
        wgrad, transposed = kind in WEIGHT_KINDS, kind in TRANSPOSED_KINDS
        self._tf32 = tf32 = kind.endswith(TF32)
        self._wgrad, self._transposed = wgrad, transposed
        self._unaligned = unaligned = kind.endswith(UNALIGNED)
        # Weight gradients of planes in TF32 have few measurements, and no rates of their own.
        self._rates = rates = WGRAD if wgrad else GATHER
        if tf32 and (a_mn or not wgrad):
            self._rates = rates = WGRAD_TF32 if wgrad else GATHER_TF32
        if unaligned:
            planes = PLANES_UNALIGNED if transposed else GATHER_UNALIGNED
            self._rates = rates = WGRAD_UNALIGNED if wgrad else planes
        images: dict[str, int] = {}
        if "planes" in kind:
            images = {"summed_images" if wgrad else "images": 1}
        item_bytes = 4 if tf32 else ITEM_BYTES
        a, b = (Matrix(1, 1, mn, item_bytes=item_bytes) for mn in (a_mn, b_mn))
        shifted = kind.endswith(SHIFTED)
        like = Product(
            a,
            b,
            1,
            1,
            1,
            stores=not (tf32 and wgrad),
            swapped=transposed,
            together=8 * shifted,
            unaligned=unaligned,
            **images,
        )
        # Each configuration is repeated for the numbers of parts that `times` tries.
        kinds = 3 if wgrad else 1
        alone = [
            replace(config, cluster=cluster) if cluster > 1 else config
            for config in every_config(like.menu)
            for cluster in (CLUSTERS if config.cluster else (0,))
        ]
        self.configs = [config for config in alone for _ in range(kinds)]
        self.kind = np.tile(np.arange(1.0, kinds + 1), len(alone))

        # The ways to run persistent blocks, by the configuration without.
        self.shared = [
            (index, one)
            for index, config in enumerate(alone if kinds == 1 else ())
            for one in sharing(config, like)
        ]

        def column(of: Callable[[Config], float]) -> NDArray[np.float64]:
            return np.repeat(np.array([of(config) for config in alone], np.float64), kinds)

        self.shared_of = np.array([index for index, _ in self.shared], np.int64)
        self.multicast = np.array([one.multicast for _, one in self.shared], np.float64)
        self.alternate = np.array([one.alternate for _, one in self.shared], np.float64)
        self.m, self.n = column(lambda one: one.m), column(lambda one: one.n)
        self.depth = column(lambda one: one.depth)
        self.summed = column(lambda one: one.depth_of(like))
        self.cluster = column(lambda one: one.cluster)
        self.resident = column(lambda one: one.resident) > 0
        self.in_grid = column(lambda one: one.in_grid) > 0
        self.deep = self.depth == DEEP
        # Columns of the next narrower tile that is otherwise the same, or 0.
        self.narrower = column(
            lambda one: max(
                (each.n for each in alone if each.n < one.n and each == replace(one, n=each.n)),
                default=0,
            )
        )
        self.could_stay = column(lambda one: replace(one, resident=True) in alone) > 0
        self.clusters = column(lambda one: CLUSTERS[max(one.cluster, 1)])
        self.b_bytes = column(lambda one: one.side_bytes(like.b, one.n))
        self.stage = column(lambda one: one.stage_bytes(like))
        self.barriers = like.barrier_bytes
        a_bytes = column(lambda one: one.side_bytes(like.a, one.m))
        split = (self.cluster > 0) & ~self.in_grid
        # Adjacent blocks read the same B at the same time; of a transposed product, the same A.
        near_a, near_b = (rates.near, 1.0) if transposed else (1.0, rates.near)
        self.read = np.where(split, rates.near_split_a, near_a) * a_bytes
        near = np.where(split, rates.near_split_b, near_b)
        self.read += np.where(self.resident, 0, near * self.b_bytes)
        self.beside = column(lambda one: one.shared_bytes(like, 0))
        # shared_bytes counted one k-tile of resident B; `times` adds all of them.
        self.beside -= np.where(self.resident, self.b_bytes, 0)

        results = self.m * self.n
        clocks = self.m / 64 * self.depth / 16 * np.maximum(self.n / 2, LEAST_CLOCKS)
        if tf32 and a_mn and b_mn:
            # Of shared memory: a warp loads 16 rows and all columns, and the copy engine stores.
            loads = column(lambda one: one.consumers * 4 * (16 * one.parts_of_m + one.n))
            loads = (loads * 4 * self.depth + self.stage) / LINE_BYTES
            clocks = np.maximum(clocks * TF32_CLOCKS, loads)
        elif tf32:
            clocks = clocks * 2
        if unaligned:
            # Words that the warps load from shared memory.
            loads = column(lambda one: one.consumers * 4 * (4 * one.parts_of_m + one.n // 4))
            clocks = np.maximum(clocks, loads * self.depth / 16)
        lines = column(
            lambda one: one.lines(like.a, one.m) + (0 if one.resident else one.lines(like.b, one.n))
        )
        self.products = rates.products * clocks * CLOCK + rates.issue
        self.copies = np.maximum(self.stage / 1e6 / rates.bandwidth, lines / 1e3 * rates.line)
        self.copies = np.maximum(self.copies, rates.step)
        self.tile = rates.tile + rates.tile_size * results * item_bytes / 1e3
        blocks = np.maximum(self.cluster, 1)
        threads = column(lambda one: one.consumers * 128)
        self.join = rates.finish * results / blocks / (threads * 16)
        self.join += rates.sent * results * 4 * (blocks - 1) / blocks / 1e3
        self.join += rates.join * (blocks > 1)
        self.join *= split
        left = np.where(self.in_grid, 0, rates.left)
        self.left = left * results * 4 / blocks / 1e3
        self.met = np.where(self.in_grid, rates.grid + rates.grid_size * results * 4 / 1e3, 0)
        self.met += np.where(self.in_grid, 0, rates.meet)

    def _together(self, device: CudaDevice) -> NDArray[np.float64]:
        """Return the number of clusters that run at once, of each configuration."""
        found: NDArray[np.float64] = self.clusters * device.multiprocessors // MULTIPROCESSORS
        return np.maximum(1, found)

    def times(
        self, product: Product, device: CudaDevice, counters: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the time of each configuration in microseconds, and its number of parts.

        The time is infinite if the configuration is not a candidate, if its clusters would not all
        be resident or are more than a grid holds, or if there are not enough ``counters``.
        """
        rates, many = self._rates, device.multiprocessors
        m, n, depth, cluster = self.m, self.n, self.depth, self.cluster
        resident, deep, together = self.resident, self.deep, self._together(device)
        split, in_grid = cluster > 0, self.in_grid
        images = max(product.images, 1)
        over_m, over_n = (1, images) if self._transposed else (images, 1)
        rows = over_m * np.ceil(product.rows / over_m / m)
        across = over_n * np.ceil(product.columns / over_n / n)
        summed = max(product.summed_images, 1)
        tiles, steps = rows * across, summed * np.ceil(product.depth / summed / self.summed)
        # Blocks are persistent over the tiles of one dimension and keep their tile of the other.
        moving, kept = (across, rows) if self._transposed else (rows, across)

        # No tile is wider than the narrowest one that has all columns.
        allowed = self.narrower < product.columns
        allowed &= (
            (n <= 32) | (n >= product.columns) | (across * n <= MOST_SPARE * product.columns + 8)
        )
        if self._transposed:
            allowed &= (m == LEAST_ROWS) | (rows * m <= MOST_SPARE * product.rows)
            allowed &= (tiles >= LEAST_TRANSPOSED) | (product.images > 0) | self._tf32
        else:
            allowed &= (m < TALL_ROWS) | (tiles >= LEAST_TALL)
        if self._wgrad:
            allowed &= (m == LEAST_ROWS) | (product.rows > LEAST_ROWS)
        elif product.images or product.unaligned or self._tf32:
            pass
        elif product.depth <= USUAL:
            allowed &= depth == next((d for d in SHALLOW if d >= product.depth), USUAL)
        else:
            allowed &= depth >= USUAL
        stays = product.depth * n * ITEM_BYTES <= MOST_RESIDENT_BYTES
        stays &= across <= MOST_COLUMN_TILES
        stored = np.where(
            resident, stays & (tiles > many), ~(self.could_stay & stays & (tiles > 2 * many))
        )
        stored &= product.stores & (kept <= many) & (self.kind == 1)
        stored &= ~in_grid
        # Kind 1 has one part; kinds 2 and 3 fill all and half of the concurrent clusters, or of the
        # SMs. Clusters of 3 and 6 were not measured with several parts.
        kind = self.kind
        parts = np.where(kind == 1, 1, together // (tiles * np.maximum(kind - 1, 1)))
        if self._unaligned:
            parts = np.where(in_grid, np.minimum(parts, steps), parts)
        joined = (cluster * parts <= steps) & ((kind == 1) | (parts > 1))
        joined &= (tiles <= together) | ((cluster == 1) & (not product.stores))
        joined &= rows <= MAX_GRID_YZ
        joined &= (parts == 1) | ((tiles * cluster <= counters) & (cluster % 3 != 0))
        if not self._wgrad:
            joined &= (cluster > 1) | (not product.stores)
        met = (parts > 1) & (parts <= np.minimum(steps, MOST_GRID_PARTS)) & (tiles <= counters)
        allowed &= np.where(split, joined, np.where(in_grid, met, stored))

        splits = np.maximum(cluster, 1) * np.maximum(parts, 1)
        each_steps = np.ceil(steps / splits)
        room = device.shared_bytes_per_block - self.beside
        room -= np.where(resident, steps * self.b_bytes, 0)
        stages = room // (self.stage + self.barriers)
        allowed &= stages >= np.minimum(np.where(deep, LEAST_DEEP_STAGES, LEAST_STAGES), each_steps)

        clusters = tiles * np.maximum(parts, 1)
        grid = np.minimum(moving, np.maximum(1, many // kept))
        each = np.where(in_grid, 1, np.ceil(np.where(split, clusters / together, moving / grid)))
        active = np.where(split, np.minimum(clusters, together) * cluster, grid * kept)
        active = np.where(in_grid, clusters, active)
        shared = self.read / 1e6 * active / rates.l2 * MULTIPROCESSORS / many
        products = self.products * (rates.straddle if product.straddles else 1.0)
        step = np.maximum.reduce([self.copies, products, shared])
        step += rates.few_stages * (stages < MANY_STAGES)
        tile = self.tile
        busy = each * each_steps * step
        turn = each * (each_steps * products + tile)
        busy = np.where(split | in_grid, busy, np.maximum(busy, turn))
        memory = product.bytes / 1e6 / rates.memory
        beside = np.where(in_grid, rates.grid_beside, rates.beside)
        total = np.maximum(busy, memory) + beside * np.minimum(busy, memory) + tile
        copied = rates.resident + rates.resident_size * steps * self.b_bytes / 1e3
        total += np.where(resident, copied, 0) + each * self.join
        total += np.where(split, rates.start_split, rates.start)
        total += np.where(parts > 1, self.met + self.left * parts, 0)
        if not (self._wgrad or product.unaligned) and product.column_stride == 1:
            # Rows of the result that are no whole chunks are stored element by element.
            whole = product.row_stride * product.a.item_bytes % CHUNK_BYTES == 0
            total += 0 if whole else ELEMENTS * product.rows * product.columns / 1e3
        if self._transposed and not self._tf32:
            total *= DOUBT
        return np.where(allowed, total, np.inf), parts

    def lines(
        self,
        product: Product,
        device: CudaDevice,
        order: NDArray[np.int64],
        seconds: NDArray[np.float64],
        parts: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the `features` of the configurations ``order``, with their expected seconds."""
        cluster, resident = self.cluster[order], self.resident[order]
        m, n, k = self.m[order], self.n[order], self.depth[order]
        rows, columns, images = product.rows, product.columns, product.images
        over_m, over_n = (1, images) if self._transposed else (images, 1)
        split = cluster > 0
        return features(
            expected_s=seconds,
            rows=_covered(rows, over_m, m),
            columns=_covered(columns, over_n, n),
            depth=_covered(product.depth, product.summed_images, self.summed[order]),
            m=m,
            n=n,
            k=k,
            inner=cluster,
            outer=parts,
            workers=np.where(
                split, self._together(device)[order] * cluster, device.multiprocessors
            ),
            moved=product.bytes,
            kind=resident + 2 * split + 4 * self.in_grid[order],
            order=product.swapped,
        )

    def sharing(
        self,
        product: Product,
        device: CudaDevice,
        order: NDArray[np.int64],
        seconds: NDArray[np.float64],
    ) -> tuple[NDArray[np.int64], list[Config], NDArray[np.float64]]:
        """Return the ways to run the configurations ``order``: the places in ``order``, the
        configurations, and the `features`."""
        place = np.full(len(self.configs), -1)
        place[order] = np.arange(len(order))
        found = np.flatnonzero(place[self.shared_of] >= 0)
        of, multicast = self.shared_of[found], self.multicast[found]
        kept = np.ceil(product.columns / self.n[of])
        fits = kept * multicast <= device.multiprocessors
        found, of, multicast = found[fits], of[fits], multicast[fits]
        lines = features(
            expected_s=seconds[place[of]],
            rows=product.rows,
            columns=product.columns,
            depth=product.depth,
            m=self.m[of],
            n=self.n[of],
            k=self.depth[of],
            inner=multicast,
            outer=1,
            workers=device.multiprocessors,
            moved=product.bytes,
            kind=self.alternate[found],
            order=product.swapped,
        )
        return place[of], [self.shared[i][1] for i in found], lines


def _covered(extent: int, images: int, tile: NDArray[np.float64]) -> NDArray[np.float64] | int:
    """Return an extent; if several images divide it, as tiles of each image cover it."""
    return images * np.ceil(extent / images / tile) * tile if images > 1 else extent


@cache
def table_of_kind(kind: str, a_mn: bool, b_mn: bool) -> Table:
    """Return the configurations of products of a `Product.kind`, made once."""
    return Table(kind, a_mn=a_mn, b_mn=b_mn)
