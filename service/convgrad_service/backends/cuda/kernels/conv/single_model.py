"""Cost model of kernels whose blocks, or clusters that split K, have one tile each."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["Rates", "SingleWave", "single_s"]

LINE_BYTES, BOX_ROWS, SUM_BYTES, ITEM_BYTES = 128, 64, 4, 2
# Tensor cores' floating-point operations per second of one SM.
SM_FLOPS = 865e12 / 132


@dataclass(frozen=True, slots=True)
class Rates:
    """Constants of the model, in microseconds and kilobytes.

    Attributes
    ----------
    start
        A launch with its first copies.
    copied, l2
        Kilobytes per microsecond that are copied to one SM, and from the L2 cache to all.
    products
        Fraction of the tensor cores' rate.
    step
        Least time of a k-tile.
    apart_a, apart_b
        Factors on the bytes of A and B if their rows are not whole cache lines.
    tile, tile_size
        Storing the results of a tile: fixed, and per kilobyte of 16-bit results.
    join, joined
        Reduction within a cluster: fixed, and per kilobyte that a block receives.
    memory, beside
        Kilobytes per microsecond from memory, and the fraction of the shorter of memory and SM time
        that is not overlapped.
    """

    start: float
    copied: float
    l2: float
    products: float
    step: float
    apart_a: float
    apart_b: float
    tile: float
    tile_size: float
    join: float
    joined: float
    memory: float
    beside: float


@dataclass(frozen=True, slots=True)
class SingleWave:
    """A GEMM of tiles of ``m`` x ``n``, one for each cluster of ``split`` blocks.

    Attributes
    ----------
    steps, mean_steps
        K-tiles of the deepest tile, and of all tiles on average.
    empty
        Tiles that have none.
    blocks, slots
        Blocks per SM that fit, and blocks that run at once.
    a_rows
        Rows of A that a k-tile copies.
    taps
        K-tiles of B that it copies with them.
    apart
        Whether rows of A and of B are not whole cache lines.
    moved_bytes
        Bytes that must be read and written.
    parts
        Parts of both operands that a k-tile copies, and multiplies as often as they make pairs.
    """

    m: int
    n: int
    tiles: int
    steps: float
    mean_steps: float
    empty: int
    split: int
    blocks: int
    slots: int
    a_rows: int
    taps: int
    apart: tuple[bool, bool]
    moved_bytes: int
    parts: int = 1


def single_s(of: SingleWave, rates: Rates) -> float:
    """Return the expected seconds of a launch in a graph."""
    total = of.tiles * of.split
    multiprocessors = of.slots // of.blocks
    resident = min(of.blocks, ceil_div(total, multiprocessors))
    at_once = multiprocessors * resident
    # Tiles without products, as those between the pixels of a stride, leave an SM to the others.
    multiplying = total - of.empty * of.split
    sharing = min(of.blocks, max(1, ceil_div(multiplying, multiprocessors)))
    a_kb = of.a_rows * LINE_BYTES / 1e3 * (rates.apart_a if of.apart[0] else 1.0)
    b_rows = of.taps * ceil_div(of.n, BOX_ROWS) * BOX_ROWS
    copied = a_kb + b_rows * LINE_BYTES / 1e3 * (rates.apart_b if of.apart[1] else 1.0)
    products = of.taps * of.m * of.n * LINE_BYTES / SM_FLOPS * 1e6
    copied *= of.parts
    products *= of.parts * (of.parts + 1) // 2
    step = max(
        sharing * copied / rates.copied,
        sharing * products / rates.products,
        min(multiplying, at_once) * copied / rates.l2,
        rates.step,
    )
    steps = max(of.steps, of.mean_steps * total / (multiprocessors * sharing)) / of.split
    busy = steps * step
    stored = rates.tile + rates.tile_size * of.m * of.n * ITEM_BYTES / 1e3 / of.split
    busy += ceil_div(total, at_once) * stored
    if of.split > 1:
        received = of.m * of.n * SUM_BYTES / 1e3 * (of.split - 1) / of.split
        busy += rates.join + rates.joined * received
    memory = of.moved_bytes / 1e3 / rates.memory
    return (rates.start + max(busy, memory) + rates.beside * min(busy, memory)) * 1e-6
