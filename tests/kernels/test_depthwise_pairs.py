"""Depthwise convolutions of pixels as they lie, run on the CPU: strips at every corner of images.

On a GPU this kernel meets the tests of the `backend` fixture and the random layers of its class.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise_pairs import DepthwisePairs
from tests.arrays import rng_for
from tests.cases import FROM_CONV, Case
from tests.emulator.backend import EmulatedBackend, works_here
from tests.geometries import Conv
from tests.kernels.harness import answers, check, drawn
from tests.oracle import expected
from tests.reference import Padding, Sizes

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


def layer(
    n: int,
    c: int,
    size: tuple[int, int],
    kernel: tuple[int, int],
    stride: int = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
) -> Conv:
    return Conv(n, c, c, size, kernel, stride, padding, dilation, groups=c)


LAYERS = {
    "kernel_3": layer(2, 16, (9, 14), (3, 3), 1, 1),
    "kernel_3_six_octets": layer(2, 48, (9, 14), (3, 3), 1, 1),
    "kernel_5_odd_batch": layer(3, 24, (8, 19), (5, 5), 1, 2),
    "kernel_5_uneven_padding": layer(2, 56, (8, 28), (5, 5), 1, ((0, 3), (4, 1))),
    "kernel_7": layer(2, 8, (7, 14), (7, 7), 1, 3),
    "kernel_7_six_octets": layer(5, 40, (15, 14), (7, 7), 1, 3),
    "more_strips_than_a_tile": layer(1, 16, (4, 150), (7, 7), 1, 3),
    "many_images_a_tile": layer(20, 8, (5, 6), (3, 3), 1, 1),
    "kernel_between_two_instances": layer(2, 16, (6, 9), (2, 4)),
    "one_row_of_taps": layer(2, 8, (3, 21), (1, 8), 1, (0, 3)),
    "one_tap": layer(2, 8, (3, 9), (1, 1)),
    "stride_2": layer(2, 16, (12, 19), (3, 3), 2, 1),
    "stride_2_even": layer(2, 48, (16, 28), (3, 3), 2, 1),
    "stride_2_uneven_padding": layer(2, 16, (11, 16), (3, 3), 2, ((0, 1), (2, 0))),
    "stride_2_kernel_5": layer(2, 16, (11, 18), (5, 5), 2, 2),
    "stride_2_kernel_4": layer(9, 16, (11, 8), (4, 4), 2, 1),
    "stride_2_kernel_2": layer(2, 16, (11, 18), (2, 2), 2),
    "stride_2_kernel_1": layer(2, 16, (11, 18), (1, 1), 2),
    "padding_beyond_the_kernel": layer(2, 8, (5, 6), (3, 3), 1, 4),
    "dilated": layer(2, 8, (9, 13), (3, 3), 1, 2, 2),
    "dilated_by_two_steps": layer(2, 8, (9, 13), (3, 2), 2, 3, (1, 3)),
}


def without_bias(case: Case) -> Case:
    shapes = {name: shape for name, shape in case.shapes.items() if name != "bias"}
    return replace(case, shapes=shapes)


CASES = [
    without_bias(FROM_CONV[operation](name, conv))
    for name, conv in LAYERS.items()
    for operation in ("conv_fwd", "conv_bwd_data")
    if operation == "conv_bwd_data" or conv.stride == 1
]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    families = replace(FAMILIES, fwd=[DepthwisePairs()], bwd_data=[DepthwisePairs()])
    return EmulatedBackend(families)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case) -> None:
    for dtype, gate in (("bfloat16", "exact"), ("float16", "bounded")):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(emulated, case, tensors, "NHWC")
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("kernel_5_odd_batch", "stride_2", "dilated")],
    ids=lambda case: case.id,
)
def test_infinities_stay_with_their_taps(
    emulated: EmulatedBackend, seed: int, case: Case, value: float
) -> None:
    rng = rng_for(seed, case.id)
    tensors, _ = drawn(seed, case, "bfloat16", "bounded")
    for name in tensors:
        tensors[name] = tensors[name].copy()
        tensors[name].reshape(-1)[int(rng.integers(tensors[name].size))] = value
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    wanted = expected(case.operation, wide, case.params)
    check(answers(emulated, case, tensors, "NHWC"), wanted, "bounded", f"seed {seed}, {case.id}")
