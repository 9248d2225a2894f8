"""Cost estimates that decide between tiled and direct kernels.

Tiled kernels copy the whole region that a tile spans and test every tap; direct kernels visit only
the pairs of elements that are multiplied, at a higher cost each. With a huge dilation, stride or
padding, a tile spans megabytes of which few elements are used, and a tiny request would take hours.
Costs are in steps of about one nanosecond on one core. Rough estimates suffice, since the costs
differ by orders of magnitude in the cases that matter. They ignore threads and memory because the
choice of the kernel determines the bits of a result.
"""

from __future__ import annotations

from math import prod

from convgrad_service.plans.cpu_dense import Dense, Tiles
from convgrad_service.problems.geometry import ConvShape

__all__ = ["direct_steps", "gather_steps", "weight_steps", "worth_tiling"]

# Direct kernels: the cost of one multiplication, and of one result, whose taps are found by a few
# divisions.
PAIR_STEPS, RESULT_STEPS = 2.0, 40.0
# Tiled kernels: the cost of testing a tap.
LOOK_STEPS = 5.0
# A tiled kernel is rejected only if it loses by far more than the error of these estimates, and
# takes longer than ten milliseconds.
CLEARLY, UNNOTICED_STEPS = 16.0, 1e7


def worth_tiling(steps: float, direct: float) -> bool:
    """Whether a tiled kernel of this cost is not clearly slower than the direct one."""
    return steps <= CLEARLY * direct + UNNOTICED_STEPS


def direct_steps(direction: str, conv: ConvShape) -> float:
    """Return the cost of a direct kernel: the results, and the pairs that are multiplied."""
    if direction == "bwd_weight":
        results = conv.out_channels * conv.in_channels_per_group * prod(conv.kernel_size)
    elif direction == "fwd":
        results = conv.batch * conv.out_channels * prod(conv.output_size)
    else:
        results = conv.batch * conv.in_channels * prod(conv.input_size)
    return RESULT_STEPS * results + PAIR_STEPS * conv.valid_flops / 2


def gather_steps(
    dense: Dense, tiles: Tiles, *, backward: bool, sum_bytes: int, vector_bytes: int
) -> float:
    """Return the cost of a dense forward pass or input gradient: packing, taps, products."""
    result = dense.input if backward else dense.output
    columns = 2 * vector_bytes // sum_bytes
    blocks = -(-(dense.in_channels if backward else dense.out_channels) // columns)
    source = dense.out_channels if backward else dense.in_channels
    copied = tiles.tasks * tiles.scratch_bytes / sum_bytes
    # Each row of each phase tests every tap along D and, if it is valid, those along H and W.
    steps = dense.stride if backward else (1, 1, 1)
    met = [max(1.0, taps / step) for taps, step in zip(dense.kernel, steps, strict=True)]
    listed = dense.kernel[0] + met[0] * (dense.kernel[1] + met[1] * dense.kernel[2])
    rows = dense.batch * dense.groups * blocks * result[0] * result[1]
    phases = min(steps[2], result[2]) * -(-result[2] // (tiles.block[2] * steps[2]))
    # Padding along D and H is skipped; along W it is multiplied, for whole channel blocks.
    multiplied = rows * result[2] * prod(met) * source
    return copied + LOOK_STEPS * rows * phases * listed + multiplied


def weight_steps(dense: Dense, tiles: Tiles, *, sum_bytes: int) -> float:
    """Return the cost of a dense weight gradient: packing the tiles, and testing every tap."""
    _, rows, columns, group_rows, k_share, c_share, planes = tiles.block
    shares = -(-dense.out_channels // k_share) * -(-dense.in_channels // c_share)
    depth, height, width = dense.output
    visits = dense.batch * dense.groups * shares * depth * -(-height // rows) * -(-width // columns)
    asked = dense.taps * (-(-rows // group_rows) + rows)
    return visits * (tiles.scratch_bytes / planes / sum_bytes + LOOK_STEPS * asked)
