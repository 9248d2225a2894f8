"""hopper_depthwise_strips, emulated: products with all or only some of their strips and images.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.hopper_depthwise_strips import (
    HopperDepthwiseStrips,
    StripsTile,
)
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, either_type, layer
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

TILES = tuple(StripsTile(kernel, side) for kernel in (3, 5, 7) for side in (4, 2))
LAYERS: dict[str, Conv] = {
    "kernel_7": layer(5, 40, (9, 14), (7, 7), 1, 3),
    "kernel_7_wide": layer(3, 32, (8, 70), (7, 7), 1, 3),
    "kernel_5": layer(3, 24, (8, 19), (5, 5), 1, 2),
    "kernel_5_uneven_padding": layer(9, 72, (6, 13), (5, 5), 1, ((0, 1), (2, 4))),
    "kernel_3": layer(17, 32, (7, 7), (3, 3), 1, 1),
    "kernel_3_long": layer(1, 32, (150, 8), (3, 3), 1, 1),
    "no_padding": layer(2, 40, (12, 40), (7, 7)),
    "padding_beyond_the_kernel": layer(2, 8, (5, 6), (5, 5), 1, 6),
}
CASES = [FROM_CONV["grouped_conv_bwd_weight"](name, conv) for name, conv in LAYERS.items()]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return EmulatedBackend(
        replace(FAMILIES, bwd_weight=[HopperDepthwiseStrips(TILES, always=True)])
    )


@either_type
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str, gate: str) -> None:
    compare(emulated, seed, case, dtype, gate)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("kernel_5_uneven_padding", "kernel_7")],
    ids=lambda case: case.id,
)
def test_what_is_not_finite_stays_in_its_channel(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", "NHWC")
