"""Whether cutting a convolution into tiles is worth it, or most of each tile meets nothing.

The tiled kernels copy what their tiles span and look at every tap; the direct ones visit only the
pairs that meet, each at some cost. With a huge dilation, stride or padding a tile spans megabytes
of which a few elements meet, and a tiny request would take hours. All is counted in steps of about
a nanosecond on one core, as float: rough is enough, since the two differ by orders of magnitude
where it matters. Pure sizes, blind to threads and memory: which kernel runs decides an answer's
bits.
"""

from __future__ import annotations

from math import prod

from convgrad_service.plans.cpu_dense import Dense, Tiles
from convgrad_service.problems.geometry import ConvShape

__all__ = ["direct_steps", "gather_steps", "weight_steps", "worth_tiling"]

# Of the direct kernels: a multiplication, and a result (its taps are found by a few divisions).
PAIR_STEPS, RESULT_STEPS = 2.0, 40.0
# Of the tiled ones: looking at a tap that may meet nothing.
LOOK_STEPS = 5.0
# A tiled kernel is passed over only where it loses by far more than these estimates err, and never
# in a problem so small that nobody would notice (ten milliseconds).
CLEARLY, UNNOTICED_STEPS = 16.0, 1e7


def worth_tiling(steps: float, direct: float) -> bool:
    """Whether tiles of so many steps are no clear loss beside the direct kernels'."""
    return steps <= CLEARLY * direct + UNNOTICED_STEPS


def direct_steps(direction: str, conv: ConvShape) -> float:
    """Of the direct kernels: the results, and the pairs that meet."""
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
    """Of a dense forward pass or gradient of the input: slabs copied, taps listed, multiplied."""
    result = dense.input if backward else dense.output
    columns = 2 * vector_bytes // sum_bytes
    blocks = -(-(dense.in_channels if backward else dense.out_channels) // columns)
    source = dense.out_channels if backward else dense.in_channels
    copied = tiles.tasks * tiles.scratch_bytes / sum_bytes
    # Each row of each phase asks every tap along D, then along H and W for those that divide.
    steps = dense.stride if backward else (1, 1, 1)
    met = [max(1.0, taps / step) for taps, step in zip(dense.kernel, steps, strict=True)]
    listed = dense.kernel[0] + met[0] * (dense.kernel[1] + met[1] * dense.kernel[2])
    rows = dense.batch * dense.groups * blocks * result[0] * result[1]
    phases = min(steps[2], result[2]) * -(-result[2] // (tiles.block[2] * steps[2]))
    # Padding along D and H is skipped; along W it is multiplied, all columns of a block at once.
    multiplied = rows * result[2] * prod(met) * source
    return copied + LOOK_STEPS * rows * phases * listed + multiplied


def weight_steps(dense: Dense, tiles: Tiles, *, sum_bytes: int) -> float:
    """Of a dense gradient of the weight: tiles copied, and every tap asked in each."""
    _, rows, columns, group_rows, k_share, c_share = tiles.block
    shares = -(-dense.out_channels // k_share) * -(-dense.in_channels // c_share)
    depth, height, width = dense.output
    visits = dense.batch * dense.groups * shares * depth * -(-height // rows) * -(-width // columns)
    asked = dense.taps * (-(-rows // group_rows) + rows)
    return visits * (tiles.scratch_bytes / sum_bytes + LOOK_STEPS * asked)
