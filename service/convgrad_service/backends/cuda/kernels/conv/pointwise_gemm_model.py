"""What a launch of pointwise_gemm should take, and the choice of its tile and splits by it.

The constants were fitted on an H200 to 170 products, of whole networks and of random layers
(`tests/perf/random_layers.py`, seed 77), bfloat16, with up to 30 configurations each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import (
    BARRIER_BYTES,
    CLUSTERS,
    ITEM_BYTES,
    Config,
    Matrix,
    Product,
)
from convgrad_service.plans.cuda.device import CudaDevice

__all__ = ["chosen", "every_config", "timed"]

ROWS, COLUMNS = (64, 128, 256), (16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 160, 192, 224, 256)
"""Rows of a tile."""
SHALLOW, USUAL, DEEP = (16, 32), 64, 128
"""Of a step along the reduction: where that is no longer, and where a stage has room for more."""
MULTIPROCESSORS = 132
# Sums of a warpgroup's thread. Results of a small tile, of one with deep steps, of one whose
# reduction is split, which other blocks send. What was never the fastest is left out (`_Ways`).
MOST_SUMS, SMALL, MOST_DEEP, MOST_SPLIT = 128, 64 * 64, 64 * 128, 128 * 192
MOST_RESIDENT_COLUMNS, MOST_RESIDENT_BYTES, MOST_COLUMN_TILES = 160, 100_000, 4
LEAST_TALL_COLUMNS = 64
LEAST_STAGES, LEAST_DEEP_STAGES, MANY_STAGES = 3, 4, 4
# Columns of tiles beyond the result's; tiles of 256 rows, fewer of which leave some SMs idle.
MOST_SPARE, LEAST_TALL = 1.4, 60
# A tensor-core clock in microseconds, and the fewest clocks of a wgmma.
CLOCK, LEAST_CLOCKS = 1 / 1755, 16


@dataclass(frozen=True, slots=True)
class Rates:
    """In microseconds, kilobytes and thousands of rows.

    ``start`` and ``start_split`` are a launch with its first copies. A step takes the longest of:
    its bytes (``bandwidth``) and rows (``line``) on their way to a multiprocessor, its products
    (``products`` times what the tensor cores need, and ``issue``), all multiprocessors' bytes from
    the L2 cache (``l2``, megabytes), and ``step``; ``few_stages`` more where little is under way.
    Neighbouring blocks read the same b at the same time, which the L2 cache answers once for
    several: ``near`` of its bytes count, with splits ``near_split_a`` of a's and ``near_split_b``
    of b's.
    ``tile`` and ``tile_size`` are a tile's results. ``memory`` is a bandwidth, in megabytes, and
    ``beside`` how much of the shorter of memory's and multiprocessors' time is not hidden.
    ``resident`` and ``resident_size``: b, copied once. ``join``, ``sent`` and ``finish``: a
    cluster's reduction, of what is sent and of what a thread finishes; ``meet`` and ``left`` the
    one through a workspace.
    """

    start: float
    start_split: float
    bandwidth: float
    line: float
    products: float
    issue: float
    l2: float
    near: float
    near_split_a: float
    near_split_b: float
    step: float
    few_stages: float
    tile: float
    tile_size: float
    memory: float
    beside: float
    resident: float
    resident_size: float
    join: float
    sent: float
    finish: float
    meet: float
    left: float


GATHER = Rates(
    start=4.8611,
    start_split=4.8821,
    bandwidth=0.1099,
    line=0.4759,
    products=0.95,
    issue=0.0228,
    l2=7.2549,
    near=0.5702,
    near_split_a=1.0257,
    near_split_b=0.543,
    step=0.1197,
    few_stages=0.0661,
    tile=0.2708,
    tile_size=0.0099,
    memory=9.8592,
    beside=0.9236,
    resident=0.0539,
    resident_size=0.0048,
    join=0.3719,
    sent=0.0523,
    finish=0.1534,
    meet=3.1574,
    left=0.0357,
)
WGRAD = Rates(
    start=5.1502,
    start_split=5.2941,
    bandwidth=0.1387,
    line=0.579,
    products=1.0,
    issue=0.0006,
    l2=7.8286,
    near=0.3133,
    near_split_a=0.931,
    near_split_b=0.8204,
    step=0.0956,
    few_stages=0.0167,
    tile=0.1544,
    tile_size=0.0045,
    memory=8.0715,
    beside=0.8937,
    resident=0.5314,
    resident_size=0.0011,
    join=0.3891,
    sent=0.0619,
    finish=0.1336,
    meet=2.9103,
    left=0.0096,
)


@dataclass(frozen=True, slots=True)
class _Ways:
    """How a tile's results are stored: by TMA, by TMA with B resident, or after split-K."""

    stored: bool
    resident: bool
    split: bool


def _ways(m: int, n: int, depth: int, *, wgrad: bool) -> _Ways:
    size, deep = m * n, depth == DEEP
    if size > MOST_SUMS * 128 * min(m // 64, 2) or (deep and size > MOST_DEEP):
        return _Ways(stored=False, resident=False, split=False)
    if wgrad:
        low, small = m < ROWS[-1], size <= SMALL
        split = low and deep == small and size <= MOST_SPLIT
        return _Ways(stored=low and (small or not deep), resident=False, split=split)
    tall = m == ROWS[-1]
    return _Ways(
        stored=not tall or (depth == USUAL and n >= LEAST_TALL_COLUMNS),
        resident=not tall and not deep and n <= MOST_RESIDENT_COLUMNS,
        split=not tall and not deep and size <= (MOST_SPLIT if depth == USUAL else SMALL),
    )


def every_config(*, wgrad: bool) -> Iterator[Config]:
    """One configuration per instance: all tiles, k-tile depths and ways to store."""
    for depth in (USUAL, DEEP) if wgrad else (*SHALLOW, USUAL, DEEP):
        for m in ROWS:
            for n in COLUMNS:
                ways = _ways(m, n, depth, wgrad=wgrad)
                if ways.stored:
                    yield Config(m, n, depth)
                if ways.resident:
                    yield Config(m, n, depth, resident=True)
                if ways.split:
                    yield Config(m, n, depth, cluster=1)


class _Table:
    """All configurations for products whose operands lie so, with what of their times does not
    depend on sizes: arrays, so that a plan, which is made in a request's time, is a few sums of
    them. Those with fewer columns come first."""

    def __init__(self, device: CudaDevice, *, wgrad: bool, b_mn: bool) -> None:
        self._device, self._wgrad = device, wgrad
        self._rates = rates = WGRAD if wgrad else GATHER
        # How many kinds of parts each configuration has: see `times`.
        kinds = 3 if wgrad else 1
        alone = sorted(
            (
                replace(config, cluster=cluster) if cluster > 1 else config
                for config in every_config(wgrad=wgrad)
                for cluster in (CLUSTERS if config.cluster else (0,))
            ),
            key=lambda config: config.n,
        )
        self.configs = [config for config in alone for _ in range(kinds)]
        self.kind = np.tile(np.arange(1.0, kinds + 1), len(alone))
        like = Product(Matrix(1, 1, wgrad), Matrix(1, 1, b_mn), 1, 1, 1, stores=True)

        def column(of: Callable[[Config], float]) -> NDArray[np.float64]:
            return np.repeat(np.array([of(config) for config in alone], np.float64), kinds)

        self.m, self.n = column(lambda one: one.m), column(lambda one: one.n)
        self.depth = column(lambda one: one.depth)
        self.cluster = column(lambda one: one.cluster)
        self.resident = column(lambda one: one.resident) > 0
        self.deep = self.depth == DEEP
        self.could_stay = (self.n <= MOST_RESIDENT_COLUMNS) & (not wgrad)
        self.together = column(lambda one: CLUSTERS[max(one.cluster, 1)])
        self.together = np.maximum(1, self.together * device.multiprocessors // MULTIPROCESSORS)
        self.b_bytes = column(lambda one: one.side_bytes(like.b, one.n))
        self.stage = column(lambda one: one.stage_bytes(like))
        a_bytes = column(lambda one: one.side_bytes(like.a, one.m))
        split = self.cluster > 0
        self.read = np.where(split, rates.near_split_a, 1.0) * a_bytes
        near = np.where(split, rates.near_split_b, rates.near)
        self.read += np.where(self.resident, 0, near * self.b_bytes)
        self.room = column(lambda one: device.shared_bytes_per_block - one.shared_bytes(like, 0))
        # A single k-tile's time is included already.
        self.room += np.where(self.resident, self.b_bytes, 0)

        results = self.m * self.n
        clocks = self.m / 64 * self.depth / 16 * np.maximum(self.n / 2, LEAST_CLOCKS)
        lines = column(
            lambda one: one.lines(like.a, one.m) + (0 if one.resident else one.lines(like.b, one.n))
        )
        self.products = rates.products * clocks * CLOCK + rates.issue
        self.alone = np.maximum.reduce(
            [self.stage / 1e6 / rates.bandwidth, lines / 1e3 * rates.line, self.products]
        )
        self.alone = np.maximum(self.alone, rates.step)
        self.tile = rates.tile + rates.tile_size * results * ITEM_BYTES / 1e3
        blocks = np.maximum(self.cluster, 1)
        threads = column(lambda one: one.consumers * 128)
        self.join = rates.finish * results / blocks / (threads * 16)
        self.join += rates.sent * results * 4 * (blocks - 1) / blocks / 1e3
        self.join += rates.join * (blocks > 1)
        self.join *= split
        self.left = rates.left * results * 4 / blocks / 1e3

    def times(
        self, product: Product, counters: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """In microseconds, infinite where a configuration is not worth a thought, has clusters that
        would not run at once, or not enough ``counters``; and parts of the reduction."""
        rates, many = self._rates, self._device.multiprocessors
        widest = next((n for n in COLUMNS if n >= product.columns), COLUMNS[-1])
        end = int(np.searchsorted(self.n, widest, "right"))
        m, n, depth, cluster = (each[:end] for each in (self.m, self.n, self.depth, self.cluster))
        resident, deep, together = self.resident[:end], self.deep[:end], self.together[:end]
        split = cluster > 0
        rows, across = np.ceil(product.rows / m), np.ceil(product.columns / n)
        tiles, steps = rows * across, np.ceil(product.depth / depth)

        allowed = (n <= 32) | (n == widest) | (across * n <= MOST_SPARE * product.columns + 8)
        allowed &= (m < ROWS[-1]) | (tiles >= LEAST_TALL)
        if self._wgrad:
            allowed &= (m == ROWS[0]) | (product.rows > ROWS[0])
        elif product.depth <= USUAL:
            allowed &= depth == next((d for d in SHALLOW if d >= product.depth), USUAL)
        else:
            allowed &= depth >= USUAL
        stays = product.depth * n * ITEM_BYTES <= MOST_RESIDENT_BYTES
        stays &= across <= MOST_COLUMN_TILES
        stored = np.where(
            resident, stays & (tiles > many), ~(self.could_stay[:end] & stays & (tiles > 2 * many))
        )
        stored &= product.stores & (across <= many) & (self.kind[:end] == 1)
        # The second and third kind of parts fill all clusters, and half of them; clusters of 3 and
        # 6 were not measured so.
        kind = self.kind[:end]
        parts = np.where(kind == 1, 1, together // (tiles * np.maximum(kind - 1, 1)))
        joined = (cluster * parts <= steps) & ((kind == 1) | (parts > 1))
        joined &= (tiles <= together) | ((cluster == 1) & (not product.stores))
        joined &= (parts == 1) | ((tiles * cluster <= counters) & (cluster % 3 != 0))
        if not self._wgrad:
            joined &= (cluster > 1) | (not product.stores)
        allowed &= np.where(split, joined, stored)

        splits = np.maximum(cluster, 1) * np.maximum(parts, 1)
        each_steps = np.ceil(steps / splits)
        room = self.room[:end] - np.where(resident, steps * self.b_bytes[:end], 0)
        stages = room // (self.stage[:end] + 2 * BARRIER_BYTES)
        allowed &= stages >= np.minimum(np.where(deep, LEAST_DEEP_STAGES, LEAST_STAGES), each_steps)

        clusters = tiles * np.maximum(parts, 1)
        grid = np.minimum(rows, np.maximum(1, many // across))
        each = np.ceil(np.where(split, clusters / together, rows / grid))
        active = np.where(split, np.minimum(clusters, together) * cluster, grid * across)
        shared = self.read[:end] / 1e6 * active / rates.l2 * MULTIPROCESSORS / many
        step = np.maximum(self.alone[:end], shared) + rates.few_stages * (stages < MANY_STAGES)
        tile = self.tile[:end]
        busy = each * each_steps * step
        turn = each * (each_steps * self.products[:end] + tile)
        busy = np.where(split, busy, np.maximum(busy, turn))
        memory = product.bytes / 1e6 / rates.memory
        total = np.maximum(busy, memory) + rates.beside * np.minimum(busy, memory) + tile
        copied = rates.resident + rates.resident_size * steps * self.b_bytes[:end] / 1e3
        total += np.where(resident, copied, 0) + each * self.join[:end]
        total += np.where(split, rates.start_split, rates.start)
        total += np.where(parts > 1, rates.meet + self.left[:end] * parts, 0)
        return np.where(allowed, total, np.inf), parts


@lru_cache(maxsize=16)
def _table(device: CudaDevice, wgrad: bool, b_mn: bool) -> _Table:
    return _Table(device, wgrad=wgrad, b_mn=b_mn)


def timed(product: Product, device: CudaDevice, counters: int) -> list[tuple[float, Config]]:
    """The configurations to consider with their expected seconds, fastest first."""
    table = _table(device, product.a.mn, product.b.mn)
    times, parts = table.times(product, counters)
    order = [int(i) for i in np.argsort(times, kind="stable") if np.isfinite(times[i])]
    return [
        (float(times[i]) * 1e-6, replace(table.configs[i], parts=max(int(parts[i]), 1)))
        for i in order
    ]


@lru_cache(maxsize=1024)
def chosen(
    products: Sequence[Product], device: CudaDevice, counters: int
) -> tuple[float, Product, Config] | None:
    """Of these ways to see the work, what should take the least time, and that time in seconds;
    None where nothing fits. From sizes and the device model alone."""
    best = None
    for product in products:
        table = _table(device, product.a.mn, product.b.mn)
        times, parts = table.times(product, counters)
        i = int(np.argmin(times))
        if np.isfinite(times[i]) and (best is None or times[i] * 1e-6 < best[0]):
            config = replace(table.configs[i], parts=max(int(parts[i]), 1))
            best = float(times[i]) * 1e-6, product, config
    return best
