"""depthwise_weight_mma, emulated: strips at all corners of images and batches.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import DepthwiseWeightMma
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, either_type, layer
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.reference import Padding

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


LAYERS = {
    "kernel_3": layer(2, 16, (9, 14), (3, 3), 1, 1),
    "kernel_5_odd_batch": layer(3, 24, (8, 19), (5, 5), 1, 2),
    "kernel_7": layer(2, 8, (7, 14), (7, 7), 1, 3),
    "more_strips_than_a_tile": layer(1, 16, (4, 150), (7, 7), 1, 3),
    "many_images_a_tile": layer(20, 8, (5, 6), (3, 3), 1, 1),
    "kernel_13": layer(1, 16, (14, 20), (13, 13), 1, 6),
    "kernel_between_two_instances": layer(2, 16, (6, 9), (2, 3)),
    "one_row_of_taps": layer(2, 8, (3, 21), (1, 8), 1, (0, 3)),
    "uneven_padding": layer(2, 16, (11, 16), (3, 3), 1, ((0, 1), (2, 0))),
    "padding_beyond_the_kernel": layer(2, 8, (5, 6), (3, 3), 1, 4),
    "dilated": layer(2, 8, (9, 13), (3, 3), 1, 2, 2),
    "dilated_by_two_steps": layer(2, 8, (9, 13), (3, 2), 1, 3, (1, 3)),
    "multiplier_2": layer(2, 16, (7, 9), (3, 3), 1, 1, 1, 2),
    "multiplier_3": layer(2, 24, (7, 9), (5, 5), 1, 2, 1, 3),
}
CASES = [FROM_CONV["grouped_conv_bwd_weight"](*one) for one in LAYERS.items()]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=[DepthwiseWeightMma()]))


@either_type
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str, gate: str) -> None:
    compare(emulated, seed, case, dtype, gate)


@pytest.mark.parametrize("padding", [3, ((3, 9), (3, 3))])
def test_blocks_with_several_tiles(seed: int, padding: Padding) -> None:
    """Copies of rows below the input, which a tile skips, end before the next tile's start."""
    conv = layer(5, 16, (4, 150), (7, 7), 1, padding)
    families = replace(FAMILIES, bwd_weight=[DepthwiseWeightMma()])
    backend = EmulatedBackend(families, replace(H200, multiprocessors=1))
    compare(backend, seed, FROM_CONV["grouped_conv_bwd_weight"]("tiles", conv), "bfloat16", "exact")


@pytest.mark.parametrize("name", ["kernel_3", "uneven_padding", "dilated"])
def test_added_to_a_tensor(emulated: EmulatedBackend, seed: int, name: str) -> None:
    conv = LAYERS[name]
    case = FROM_CONV["grouped_conv_bwd_weight"](name, conv)
    case = case.with_tensor("accumulate", conv.weight_shape)
    compare(
        emulated, seed, case.with_params("bilinear", alpha=2.0, beta=-0.25), "bfloat16", "exact"
    )


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.name in ("kernel_5_odd_batch", "uneven_padding", "multiplier_2")
    ],
    ids=lambda case: case.id,
)
def test_what_is_not_finite_stays_in_its_channel(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", "NHWC")
