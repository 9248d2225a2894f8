"""Estimated times of the tiled CPU engines, from which one is chosen: pure functions of sizes.

What an engine wastes depends on the layer: lanes without channels, padding between rows, copies. An
estimate adds up what is copied, multiplied and written, with costs in nanoseconds on one core that
were fitted to random layers (AVX2 on AMD Zen 3). It ignores threads, because the choice of the
kernel determines the bits of a result.
"""

from __future__ import annotations

from math import prod

from convgrad_service.plans.cpu_dense import GROUP_PIXELS, Dense
from convgrad_service.plans.planar import PlanarPlan

__all__ = [
    "correlation_ns",
    "first_ns",
    "gather_ns",
    "grouped_weight_ns",
    "stored_as_planes",
    "weight_ns",
]

# A multiplication of vectors: of positions; of two vectors of channels at a time; of one alone,
# whose few sums do not hide the latency. As many multiplications of positions hide it.
POSITIONS_NS, PAIR_NS, SINGLE_NS = 0.22, 0.18, 0.29
HIDING = 6
# What is copied between a tensor and planes: with contiguous channels squares of vectors, whose
# columns are in steps of 1 or more; with contiguous columns elements in steps of 1, 2 or more, and
# a row costs as much as so many more of them.
SQUARE_NS, COLUMNS_NS, ROW_COLUMNS = (40.0, 100.0), (0.25, 0.4, 1.5), 16
# A stride phase of a tile of results; a weight that is packed for planes.
PHASE_NS, PACKED_NS = 250.0, 12.0
# An element of planes that are multiplied in place.
IN_PLACE_NS = 0.06
# An element that the dense engines transpose, or else a pixel that they copy; a weight that they
# pack; one of their partial sums.
TRANSPOSED_NS, PIXEL_NS, WEIGHT_NS, PARTIAL_NS = 0.2, 1.5, 0.6, 0.5
# A register tile, of about so many rows: its call, loads and stores. The sums of a few products.
TILE_NS, TILE_ROWS, SUMS_NS = 27.0, 5, 2.5


def correlation_ns(
    dense: Dense, plan: PlanarPlan, lanes: int, *, backward: bool, last: bool, in_place: bool
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
    in_place : bool
        Whether planes are read and written in place.
    """
    source, channels = _source_and_result(dense, backward)
    steps, (depth, height, width) = plan.dst_step, plan.tile
    rows = channels * depth * height
    products = max(channels * _vectors(plan, lanes), HIDING)
    if in_place:
        positions = dense.batch * dense.groups * prod(dense.output)
        return (
            PACKED_NS * dense.groups * source * channels
            + IN_PLACE_NS * positions * (source + channels)
            + _tiles(dense, plan) * (PHASE_NS + POSITIONS_NS * source * products)
        )
    filled = dense.groups * channels if last else 0
    each = _copied_ns(dense, plan, source, lanes, last) + len(plan.dst_phase) * (
        PHASE_NS + rows * _row_ns(width, steps[2], lanes, filled)
    )
    return PACKED_NS * dense.groups * len(plan.taps) * source * channels + _tiles(dense, plan) * (
        each + POSITIONS_NS * len(plan.taps) * source * products
    )


def grouped_weight_ns(
    dense: Dense, plan: PlanarPlan, lanes: int, *, last: bool, in_place: bool
) -> float:
    """Estimate the grouped engine's weight gradient; see `correlation_ns`."""
    pairs = len(plan.taps) * dense.in_channels * dense.out_channels
    rows = dense.out_channels * plan.tile[0] * plan.box[1]
    if in_place:
        positions = dense.batch * dense.groups * prod(dense.output)
        read = IN_PLACE_NS * positions * (dense.in_channels + dense.out_channels)
        products = (POSITIONS_NS * _vectors(plan, lanes) + SUMS_NS) * pairs
        return read + _tiles(dense, plan) * products
    return _tiles(dense, plan) * (
        _copied_ns(dense, plan, dense.in_channels, lanes, last, weight=True)
        + rows * _row_ns(plan.box[2], 1, lanes, dense.groups * dense.out_channels if last else 0)
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
        pixels * _taps_met(dense) / prod(steps) * source * _products_ns(channels, lanes)
        + TILE_NS * (pixels / TILE_ROWS + rows) * blocks
        + images * prod(read) * _pixel_ns(source, lanes, last)
        + WEIGHT_NS * dense.groups * dense.taps * source * blocks * 2 * lanes
    )


def weight_ns(dense: Dense, lanes: int, *, last: bool) -> float:
    """Estimate the dense engine's weight gradient: vectors are input channels."""
    channels = dense.out_channels, dense.in_channels
    products = _products_of_weight_ns(dense, _taps_met(dense), *channels, lanes)
    return products + _copied_of_weight_ns(dense, lanes, last)


def first_ns(dense: Dense, lanes: int, *, last: bool) -> float:
    """Estimate the "first" engine's weight gradient: vectors are output channels."""
    channels = dense.in_channels, dense.out_channels
    sums = dense.groups * dense.taps * prod(channels)
    return (
        PARTIAL_NS * sums
        + _products_of_weight_ns(dense, dense.taps, *channels, lanes)
        + _copied_of_weight_ns(dense, lanes, last)
    )


def _products_of_weight_ns(
    dense: Dense, taps: float, rows: int, channels: int, lanes: int
) -> float:
    pixels = dense.batch * dense.groups * prod(dense.output)
    tiles = taps * rows / TILE_ROWS * -(-channels // (2 * lanes))
    return pixels * (taps * rows * _products_ns(channels, lanes) + TILE_NS * tiles / GROUP_PIXELS)


def _copied_of_weight_ns(dense: Dense, lanes: int, last: bool) -> float:
    read = prod(dense.input) * _pixel_ns(dense.in_channels, lanes, last)
    gradients = prod(dense.output) * _pixel_ns(dense.out_channels, lanes, last)
    return dense.batch * dense.groups * (read + gradients)


def _pixel_ns(channels: int, lanes: int, last: bool) -> float:
    return PIXEL_NS if last else TRANSPOSED_NS * -(-channels // lanes) * lanes


def _taps_met(dense: Dense) -> float:
    """Return the mean number of taps of an output; the dense kernels skip rows of padding."""
    met = float(dense.kernel[2])
    for d in range(2):
        pairs, stride = 0, dense.stride[d]
        for tap in range(dense.kernel[d]):
            shift = dense.pad[d] - tap * dense.dilation[d]
            last = min(dense.output[d] - 1, (dense.input[d] - 1 + shift) // stride)
            pairs += max(0, last - max(0, -(-shift // stride)) + 1)
        met *= pairs / dense.output[d]
    return met


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
    dense: Dense, plan: PlanarPlan, channels: int, lanes: int, last: bool, *, weight: bool = False
) -> float:
    if not (last or weight) and _stored_as_boxes(plan):
        return 0.0
    depth, height, width = plan.box
    rows = len(plan.src_phase) * channels * depth * height
    filled = dense.groups * channels if last else 0
    return rows * _row_ns(width, plan.src_step[2], lanes, filled)


def _row_ns(columns: int, step: int, lanes: int, filled: int) -> float:
    """Return the cost of a row of a channel, of ``filled`` contiguous ones or, if 0, of columns."""
    if filled:
        return SQUARE_NS[min(step, 2) - 1] * -(-columns // lanes) / min(filled, lanes)
    return COLUMNS_NS[min(step, 3) - 1] * (columns + ROW_COLUMNS)


def stored_as_planes(plan: PlanarPlan) -> bool:
    """Whether planes with contiguous columns need no copy: one tap without padding or steps."""
    whole = plan.tile[:2] == (1, 1) or plan.tile[2] == plan.dst_size[2]
    whole &= plan.tile[0] == 1 or plan.tile[1] == plan.dst_size[1]
    whole &= plan.src_size == plan.dst_size and plan.box == plan.tile
    steps = plan.src_step == plan.dst_step == (1, 1, 1) and plan.origin == (0, 0, 0)
    return whole and steps and len(plan.taps) == 1


def _stored_as_boxes(plan: PlanarPlan) -> bool:
    """Whether planes with contiguous columns are read in place: they have no padding or phases."""
    if plan.src_step != (1, 1, 1) or min(plan.origin) < 0:
        return False
    whole = plan.box[:2] == (1, 1) or plan.box[2] == plan.src_size[2]
    ends = zip(plan.origin, plan.dst_size, plan.dst_step, plan.box, plan.tile, strict=True)
    reached = [o - (-size // step) + b - t for o, size, step, b, t in ends]
    return whole and all(r <= size for r, size in zip(reached, plan.src_size, strict=True))
