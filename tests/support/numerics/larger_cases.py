"""Cases large enough to be computed by several threads."""

from __future__ import annotations

from tests.support.numerics.cases import (
    FROM_CONV,
    FUSED,
    Case,
    conv3d_backprop_input,
    conv3d_transpose,
    maxpool_bwd,
    maxpool_fwd,
)
from tests.support.numerics.geometries import Conv, Pool

# Large enough for several threads to have work, and for sums to depend on their order.
CONV_SHAPES = {
    "dense": Conv(3, 48, 40, (19, 23), (3, 3), padding=1),
    "strided": Conv(2, 24, 32, (21, 22), (3, 3), 2, 1),
    "depthwise": Conv(2, 40, 40, (20, 19), (3, 3), padding=1, groups=40),
    "grouped": Conv(2, 64, 32, (14, 13), (3, 3), padding=1, groups=8),
    "first_layer": Conv(2, 3, 32, (30, 31), (7, 7), 2, 3),
    "1d": Conv(2, 31, 33, (200,), (5,), padding=2),
    "3d": Conv(1, 16, 12, (6, 9, 10), (3, 3, 3), padding=1),
}


POOL_SHAPES = {
    "2d": Pool(2, 33, (27, 25), 3, 2, 1),
    "3d": Pool(1, 17, (9, 11, 10), 3, 2, 1),
}


def _cases() -> list[Case]:
    cases = [make(name, conv) for name, conv in CONV_SHAPES.items() for make in FROM_CONV.values()]
    cases += [make("3d", CONV_SHAPES["3d"]) for make in (conv3d_transpose, conv3d_backprop_input)]
    for name, pool in POOL_SHAPES.items():
        cases += [maxpool_fwd(name, pool), maxpool_bwd(name, pool)]
    return [*cases, *FUSED[:4]]


LARGER = _cases()
