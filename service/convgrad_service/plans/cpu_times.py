"""Estimated times of the tiled CPU engines, from which one is chosen: pure functions of sizes.

What an engine wastes depends on the layer: lanes without channels, padding between rows, copies. An
estimate adds up what is copied, multiplied and written, with costs in nanoseconds on one core that
were fitted to random layers (AMD Zen 3, AVX2). It ignores threads, because the choice of the kernel
determines the bits of a result.
"""

from __future__ import annotations

from math import prod

from convgrad_service.plans.cpu_dense import GROUP_PIXELS, Dense
from convgrad_service.plans.planar import PlanarPlan

__all__ = ["correlation_ns", "first_ns", "gather_ns", "grouped_weight_ns", "weight_ns"]

# A multiplication of vectors: of positions; of two vectors of channels at a time; of one alone,
# whose few sums do not hide the latency. As many multiplications of positions hide it.
POSITIONS_NS, PAIR_NS, SINGLE_NS = 0.22, 0.18, 0.29
HIDING = 6
# An element copied between a tensor and planes: with contiguous channels, in steps of 1 or more;
# with contiguous columns in steps of 1, 2 or more. A row costs as much as so many more columns.
CHANNELS_NS, COLUMNS_NS, ROW_COLUMNS = (0.6, 1.5), (0.25, 0.4, 1.5), 16
# A stride phase of a tile of results; a weight that is packed for planes.
PHASE_NS, PACKED_NS = 250.0, 4.0
# An element that the dense engines transpose; a weight that they pack; one of their partial sums.
TRANSPOSED_NS, WEIGHT_NS, PARTIAL_NS = 0.2, 0.6, 0.5
# A register tile, of about so many rows: its call, loads and stores. The sums of a few products.
TILE_NS, TILE_ROWS, SUMS_NS = 27.0, 5, 2.5


def correlation_ns(
    dense: Dense, plan: PlanarPlan, lanes: int, *, backward: bool, last: bool
) -> float:
    """Estimate the grouped engine's forward pass or, if ``backward``, its input gradient.

    Parameters
    ----------
    plan : PlanarPlan
        Its plan.
    lanes : int
        Accumulators in a vector.
    last : bool
        Whether channels are contiguous.
    """
    source, channels = _source_and_result(dense, backward)
    steps, (depth, height, width) = plan.dst_step, plan.tile
    rows = channels * depth * height
    products = max(channels * _vectors(plan, lanes), HIDING)
    each = _copied_ns(plan, source, lanes, last) + len(plan.dst_phase) * (
        PHASE_NS + rows * _row_ns(width, steps[2], lanes, last)
    )
    return PACKED_NS * dense.groups * len(plan.taps) * source * channels + _tiles(dense, plan) * (
        each + POSITIONS_NS * len(plan.taps) * source * products
    )


def grouped_weight_ns(dense: Dense, plan: PlanarPlan, lanes: int, *, last: bool) -> float:
    """Estimate the grouped engine's weight gradient; see `correlation_ns`."""
    pairs = len(plan.taps) * dense.in_channels * dense.out_channels
    rows = dense.out_channels * plan.tile[0] * plan.box[1]
    return _tiles(dense, plan) * (
        _copied_ns(plan, dense.in_channels, lanes, last, weight=True)
        + rows * _row_ns(plan.box[2], 1, lanes, last)
        + (POSITIONS_NS * _vectors(plan, lanes) + SUMS_NS) * pairs
    )


def gather_ns(dense: Dense, lanes: int, *, backward: bool, last: bool) -> float:
    """Estimate the dense engine's forward pass or, if ``backward``, its input gradient."""
    source, channels = _source_and_result(dense, backward)
    result, read = (dense.input, dense.output) if backward else (dense.output, dense.input)
    steps = dense.stride if backward else (1, 1, 1)
    images = dense.batch * dense.groups
    rows = images * result[0] * result[1] * min(steps[2], result[2])
    pixels, blocks = images * prod(result), -(-channels // (2 * lanes))
    return (
        pixels * dense.taps / prod(steps) * source * _products_ns(channels, lanes)
        + TILE_NS * (pixels / TILE_ROWS + rows) * blocks
        + (0 if last else TRANSPOSED_NS * images * prod(read) * source)
        + WEIGHT_NS * dense.groups * dense.taps * source * blocks * 2 * lanes
    )


def weight_ns(dense: Dense, lanes: int, *, last: bool) -> float:
    """Estimate the dense engine's weight gradient: vectors are input channels."""
    tiles = dense.taps * dense.out_channels / TILE_ROWS
    return _weight_ns(dense, dense.out_channels, dense.in_channels, tiles, lanes, last=last)


def first_ns(dense: Dense, lanes: int, *, last: bool) -> float:
    """Estimate the "first" engine's weight gradient: vectors are output channels."""
    tiles = dense.taps * dense.in_channels / TILE_ROWS
    sums = dense.groups * dense.taps * dense.in_channels * dense.out_channels
    return PARTIAL_NS * sums + _weight_ns(
        dense, dense.in_channels, dense.out_channels, tiles, lanes, last=last
    )


def _weight_ns(
    dense: Dense, rows: int, channels: int, tiles: float, lanes: int, *, last: bool
) -> float:
    pixels = dense.batch * dense.groups * prod(dense.output)
    copied = pixels * dense.out_channels + dense.batch * dense.groups * dense.in_channels * prod(
        dense.input
    )
    blocks = -(-channels // (2 * lanes))
    return (
        pixels * dense.taps * rows * _products_ns(channels, lanes)
        + TILE_NS * tiles * blocks * pixels / GROUP_PIXELS
        + (0 if last else TRANSPOSED_NS * copied)
    )


def _source_and_result(dense: Dense, backward: bool) -> tuple[int, int]:
    channels = dense.in_channels, dense.out_channels
    return channels[::-1] if backward else channels


def _products_ns(channels: int, lanes: int) -> float:
    """Return the cost of multiplying one value with a vector of each ``lanes`` channels."""
    vectors = -(-channels // lanes)
    return PAIR_NS * (vectors - vectors % 2) + (SINGLE_NS if vectors % 2 else 0)


def _tiles(dense: Dense, plan: PlanarPlan) -> int:
    return dense.batch * dense.groups * prod(plan.tiles)


def _vectors(plan: PlanarPlan, lanes: int) -> int:
    """Return the vectors of a tile's positions, with those between its rows."""
    (depth, height, width), box = plan.tile, plan.box
    return -(-(((depth - 1) * box[1] + height - 1) * box[2] + width) // lanes)


def _copied_ns(
    plan: PlanarPlan, channels: int, lanes: int, last: bool, *, weight: bool = False
) -> float:
    if not (last or weight) and _stored_as_boxes(plan):
        return 0.0
    depth, height, width = plan.box
    rows = len(plan.src_phase) * channels * depth * height
    return rows * _row_ns(width, plan.src_step[2], lanes, last)


def _row_ns(columns: int, step: int, lanes: int, last: bool) -> float:
    if last:
        return CHANNELS_NS[min(step, 2) - 1] * -(-columns // lanes) * lanes
    return COLUMNS_NS[min(step, 3) - 1] * (columns + ROW_COLUMNS)


def _stored_as_boxes(plan: PlanarPlan) -> bool:
    """Whether planes with contiguous columns are read in place: they have no padding or phases."""
    if plan.src_step != (1, 1, 1) or min(plan.origin) < 0:
        return False
    whole = plan.box[:2] == (1, 1) or plan.box[2] == plan.src_size[2]
    ends = zip(plan.origin, plan.dst_size, plan.dst_step, plan.box, plan.tile, strict=True)
    reached = [o - (-size // step) + b - t for o, size, step, b, t in ends]
    return whole and all(r <= size for r, size in zip(reached, plan.src_size, strict=True))
