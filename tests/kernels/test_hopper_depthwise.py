"""Depthwise kernels of Hopper's own, run on the CPU: columns and rows at every corner of a stage.

On a GPU these kernels meet the tests of the `backend` fixture and the random layers of their class.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.hopper_depthwise_weight import (
    HopperDepthwiseWeight,
)
from tests.cases import FROM_CONV, Case
from tests.emulator.backend import EmulatedBackend, works_here
from tests.geometries import Conv
from tests.kernels.nonfinite import check_rule
from tests.kernels.test_cuda_depthwise import compare, either_type, layer

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "one_tile": layer(2, 16, (12, 19), (3, 3), 2, 1),
    "uneven_padding": layer(2, 96, (11, 40), (3, 3), 2, ((0, 1), (2, 0))),
    "channels_72": layer(1, 72, (11, 66), (3, 3), 2, 1),
    "wide": layer(1, 32, (5, 290), (3, 3), 2, 1),
    "long": layer(1, 32, (150, 20), (3, 3), 2, 1),
    "many_images": layer(140, 32, (7, 7), (3, 3), 2, 1),
    "no_padding": layer(1, 40, (12, 40), (3, 3), 2),
    "padding_beyond_the_kernel": layer(2, 8, (5, 6), (3, 3), 2, 4),
}
CASES = [FROM_CONV["grouped_conv_bwd_weight"](name, conv) for name, conv in LAYERS.items()]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    family = HopperDepthwiseWeight(least_elements=0)
    return EmulatedBackend(replace(FAMILIES, bwd_weight=[family]))


@either_type
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str, gate: str) -> None:
    compare(emulated, seed, case, dtype, gate)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("no_padding", "uneven_padding")],
    ids=lambda case: case.id,
)
def test_what_is_not_finite_stays_in_its_channel(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", "NHWC")
