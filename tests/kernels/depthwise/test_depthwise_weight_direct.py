"""depthwise_weight_direct, emulated: strips, units and chunks that end within rows or do not.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_direct import (
    DepthwiseWeightDirect,
)
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, either_type, layer
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "inner_strips": layer(2, 40, (9, 14), (3, 3), 1, 1),
    "rows_that_strips_do_not_fill": layer(3, 24, (8, 19), (3, 3), 1, 1),
    "many_images": layer(70, 16, (5, 6), (3, 3), 1, 1),
    "wide": layer(1, 16, (3, 290), (3, 3), 1, 1),
    "no_padding": layer(1, 40, (12, 16), (3, 3)),
    "padding_beyond_the_kernel": layer(2, 16, (5, 6), (3, 3), 1, 4),
    "stride_2": layer(2, 16, (12, 16), (3, 3), 2, 1),
    "stride_2_uneven_padding": layer(2, 48, (11, 24), (3, 3), 2, ((0, 1), (1, 0))),
    "stride_2_unread_column": layer(1, 16, (9, 18), (3, 3), 2, 0),
}
CASES = [FROM_CONV["grouped_conv_bwd_weight"](name, conv) for name, conv in LAYERS.items()]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=[DepthwiseWeightDirect(always=True)]))


@either_type
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str, gate: str) -> None:
    compare(emulated, seed, case, dtype, gate)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("rows_that_strips_do_not_fill", "stride_2")],
    ids=lambda case: case.id,
)
def test_what_is_not_finite_stays_in_its_channel(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", "NHWC")
