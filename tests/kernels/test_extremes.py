"""Geometries at the limits of the API: small tensors, enormous strides, padding and dilation.

They are cheap to compute, but a kernel that pads in memory or overflows 32 bits fails.
"""

from __future__ import annotations

import pytest

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check, drawn, with_layouts
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


def _cases() -> list[Case]:
    cases = [make(name, conv) for name, conv in CONVS.items() for make in FROM_CONV.values()]
    cases += [make("dilation_3d", CONVS["dilation_3d"]) for make in FROM_CONV3D.values()]
    cases += [
        make(name, pool) for name, pool in POOLS.items() for make in (maxpool_fwd, maxpool_bwd)
    ]
    return cases


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.id)
def test_extreme_geometry(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
    for layout in layouts:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")
