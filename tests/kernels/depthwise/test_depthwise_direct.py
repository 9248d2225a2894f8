"""depthwise_direct, emulated: every configuration, with results that positions do not divide.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import (
    DepthwiseDirect,
    DirectGather,
)
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, layer
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "3x3": layer(2, 24, (7, 9), (3, 3), 1, 1),
    "channels_36": layer(1, 36, (5, 6), (3, 3), 1, 1),
    "channels_13": layer(2, 13, (5, 6), (3, 3), 2, 1),
    "padding_beyond_the_kernel": layer(1, 16, (5, 6), (3, 3), 1, 4),
    "5x5": layer(1, 70, (6, 7), (5, 5), 1, 2),
    "5x5_no_padding": layer(1, 8, (8, 9), (5, 5)),
    "7x7": layer(1, 16, (7, 8), (7, 7), 1, 3),
    "stride_2": layer(2, 16, (8, 11), (3, 3), 2, 1),
    "stride_2_uneven_padding": layer(1, 24, (9, 7), (5, 5), 2, ((1, 2), (3, 1))),
    "stride_2_unread_column": layer(1, 16, (8, 8), (3, 3), 2, 0),
    "7x7_stride_2": layer(1, 8, (9, 10), (7, 7), 2, 3),
}
CASES = [FROM_CONV["conv_bwd_data"](*one) for one in LAYERS.items()]


def only(family: DepthwiseDirect) -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, fwd=[family], bwd_data=[family]))


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return only(DepthwiseDirect())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    for gate in ("exact", "bounded"):
        compare(emulated, seed, case, dtype, gate)


@pytest.mark.parametrize(
    "layout",
    [DirectGather(2, 4, 2, 8), DirectGather(1, 7, 1, 16), DirectGather(1, 2, 2, 24)],
    ids=str,
)
def test_every_shape(seed: int, layout: DirectGather) -> None:
    case = FROM_CONV["conv_bwd_data"]("wide", layer(2, 40, (9, 17), (3, 3), 1, 1))
    compare(only(DepthwiseDirect(layout)), seed, case, "bfloat16", "exact")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("3x3", "stride_2")], ids=lambda case: case.id
)
def test_what_is_not_finite_stays_in_its_channel(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", "NHWC")
