"""depthwise_scale, emulated: channels last and first, chunks within a plane and across planes.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_scale
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import DepthwiseDirect
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_scale import DepthwiseScale
from convgrad_service.plans.cuda.program import Launch
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import layer
from tests.support.kernels.harness import answers, check, drawn, problem_and_tensors, with_layouts
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "7x7": layer(3, 24, (7, 7), (1, 1)),
    "whole_chunks": layer(2, 16, (4, 8), (1, 1)),
    "channels_13": layer(2, 13, (5, 3), (1, 1)),
    "planes_of_two": layer(3, 9, (1, 2), (1, 1)),
    "one_position": layer(2, 11, (1, 1), (1, 1)),
    "one_image": layer(1, 8, (3, 9), (1, 1)),
    "1d": Conv(2, 12, 12, (37,), (1,), groups=12),
    "3d": Conv(2, 10, 10, (2, 3, 5), (1, 1, 1), groups=10),
}
OPERATIONS = ("conv_fwd", "conv_bwd_data")
ONLY = EmulatedBackend(replace(FAMILIES, fwd=[DepthwiseScale()], bwd_data=[DepthwiseScale()]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(seed: int, name: str, operation: str, dtype: str) -> None:
    case = FROM_CONV[operation](name, LAYERS[name])
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        for layout in with_layouts(case.ndim, grouped=False)[1:]:
            found = answers(ONLY, case, tensors, layout)
            check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", ["7x7", "channels_13", "planes_of_two"])
def test_added_to_a_tensor_and_to_a_bias(seed: int, name: str, layout: str) -> None:
    conv = LAYERS[name]
    gradient = FROM_CONV["conv_bwd_data"](name, conv).with_tensor("accumulate", conv.input_shape)
    forward = FROM_CONV["conv_fwd"](name, conv).with_tensor("bias", (conv.k,))
    cases = (
        (gradient.with_params("bilinear", alpha=2.0, beta=-0.25), "exact"),
        (forward, "exact"),
    )
    for case, gate in cases:
        tensors, wanted = drawn(seed, case, "bfloat16", gate)
        check(answers(ONLY, case, tensors, layout), wanted, gate, f"seed {seed}, {case.id}")


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_images_that_32_bit_numbers_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, seed: int, layout: str
) -> None:
    """Several launches, with the bits of one."""
    case = FROM_CONV["conv_fwd"]("images", layer(19, 5, (3, 3), (1, 1)))
    tensors, _ = drawn(seed, case, "bfloat16", "bounded")
    whole = answers(ONLY, case, tensors, layout)
    monkeypatch.setattr(depthwise_scale, "MOST_ELEMENTS", 8 * 45)
    problem, _ = problem_and_tensors(case, tensors, layout)
    assert len(ONLY.explain(problem).steps) == 3
    for name, array in answers(ONLY, case, tensors, layout).items():
        assert_same_bits(array, whole[name])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_of_other_families(seed: int, operation: str, layout: str) -> None:
    """Parts of a problem may have other strides, and so other kernels: also of a negative zero."""
    case = FROM_CONV[operation]("7x7", LAYERS["7x7"])
    tensors, _ = drawn(seed, case, "float32", "bounded")
    source = next(name for name in tensors if name != "weight")
    tensors[source] = np.where(tensors[source] < 0, np.float32(-0.0), tensors[source])
    direct = DepthwiseDirect(in_planes=layout == "NCHW")
    other = EmulatedBackend(replace(FAMILIES, fwd=[direct], bwd_data=[direct]))
    wanted = answers(other, case, tensors, layout)
    for name, array in answers(ONLY, case, tensors, layout).items():
        assert_same_bits(array, wanted[name], f"seed {seed}, {case.id}")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_not_finite(seed: int, operation: str, dtype: str) -> None:
    check_rule(ONLY, seed, FROM_CONV[operation]("7x7", LAYERS["7x7"]), dtype)


def test_what_it_leaves_to_others(seed: int) -> None:
    for conv in (
        layer(2, 16, (7, 7), (1, 1), 2),
        layer(2, 16, (7, 7), (1, 1), 1, 1),
        layer(2, 16, (7, 7), (3, 3), 1, 1),
        layer(2, 16, (7, 7), (1, 1), 1, 0, 1, 2),
    ):
        case = FROM_CONV["conv_fwd"]("other", conv)
        tensors, _ = drawn(seed, case, "bfloat16", "exact")
        problem, _ = problem_and_tensors(case, tensors, "NHWC")
        steps = EmulatedBackend(FAMILIES).explain(problem).steps
        kernels = {one.instance.source for one in steps if isinstance(one, Launch)}
        assert not any("depthwise_scale" in kernel for kernel in kernels)
