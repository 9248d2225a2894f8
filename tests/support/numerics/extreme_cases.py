"""Geometries at the limits of the API: small tensors, enormous strides, padding and dilation."""

from __future__ import annotations

from tests.support.numerics.cases import FROM_CONV, FROM_CONV3D, Case, maxpool_bwd, maxpool_fwd
from tests.support.numerics.geometries import Conv, Pool

MOST = 2**31 - 1
HALF = 2**30

CONVS = {
    "largest_stride": Conv(1, 4, 4, (5, 5), (3, 3), stride=MOST, padding=1),
    "dilation": Conv(1, 4, 4, (3, 3), (2, 2), dilation=HALF, padding=((HALF, 0), (0, HALF))),
    "dilation_in_groups": Conv(
        1, 8, 8, (3, 3), (2, 2), dilation=HALF, padding=((HALF, 0), (0, HALF)), groups=2
    ),
    "dilation_depthwise": Conv(
        1, 8, 8, (3, 3), (2, 2), dilation=HALF, padding=((HALF, 0), (0, HALF)), groups=8
    ),
    "dilation_3d": Conv(
        1, 4, 4, (3, 3, 3), (2, 2, 2), 1, ((HALF, 0), (0, HALF), (HALF, 0)), HALF, 2
    ),
    "dilation_1d": Conv(1, 4, 4, (9,), (3,), padding=HALF // 2, dilation=HALF // 2, groups=4),
    "stride_and_padding": Conv(1, 8, 8, (3, 3), (2, 2), stride=HALF, padding=HALF),
    "stride_and_padding_in_groups": Conv(
        1, 8, 8, (3, 3), (1, 1), stride=HALF, padding=HALF, groups=8
    ),
    # Taps farther apart than 32-bit kernels allow, and within what they do.
    "dilation_near": Conv(
        2, 16, 16, (6, 40), (3, 3), padding=((9, 9), (50, 50)), dilation=(9, 50), groups=16
    ),
    "padding_1d": Conv(1, 4, 4, (3,), (3,), padding=30_000, groups=4),
    "kernel": Conv(1, 2, 2, (3, 3), (41, 43), padding=((20, 20), (21, 21))),
}
POOLS = {
    "largest_stride": Pool(1, 3, (5, 5), 3, MOST, 1),
    "dilation": Pool(2, 3, (3, 3), 2, 1, ((HALF, 0), (0, HALF)), HALF),
    "dilation_3d": Pool(1, 3, (3, 2, 3), 2, 1, ((HALF, 0), (0, HALF), (HALF, 0)), HALF),
    "stride_past_the_input": Pool(1, 2, (3, 4), 1, HALF, ceil_mode=True),
    "kernel": Pool(1, 2, (5, 4), (61, 71), 1, ((30, 30), (35, 35))),
}


def extreme_cases() -> list[Case]:
    cases = [make(name, conv) for name, conv in CONVS.items() for make in FROM_CONV.values()]
    cases += [make("dilation_3d", CONVS["dilation_3d"]) for make in FROM_CONV3D.values()]
    cases += [
        make(name, pool) for name, pool in POOLS.items() for make in (maxpool_fwd, maxpool_bwd)
    ]
    return cases
