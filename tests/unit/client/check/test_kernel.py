"""`convgrad.check.kernel`: a kernel is run on generated tensors, and every result checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import check
from convgrad.check.bounds import rounded
from convgrad.check.convolve import NumpyConvolver
from convgrad.check.operations import targets
from convgrad.contract import OPERATIONS
from convgrad.contract.examinations import VERIFICATIONS
from convgrad.errors import ConvgradError
from tests.support.numerics import reference

Array = NDArray[Any]


def reference_kernel(operation: str) -> Callable[..., dict[str, Array]]:
    """A kernel that rounds the float64 reference; of channels-first tensors."""

    def run(**arguments: Any) -> dict[str, Array]:
        tensors = {name: each for name, each in arguments.items() if isinstance(each, np.ndarray)}
        dtype = next(iter(tensors.values())).dtype
        parameters = {name: each for name, each in arguments.items() if name not in tensors}
        found = {}
        for name, target in targets(operation, tensors, parameters, NumpyConvolver()).items():
            value = np.concatenate([target.part(span).value for span in target.spans])
            if value.ndim > 3:  # groups are apart
                groups = 0 if name == "grad_weight" else 1
                shape = value.shape
                value = value.reshape(*shape[:groups], -1, *shape[groups + 2 :])
            found[name] = rounded(value, dtype).astype(dtype)
        return found

    return run


def kernel(grad_output: Array, weight: Array, input_size: Any, **geometry: Any) -> Array:
    found = reference.conv_bwd_data(grad_output, weight, input_size, **geometry)
    return found.value.astype(grad_output.dtype)


def test_a_kernel_is_run_through_both_gates() -> None:
    found = check.kernel(kernel, "conv_bwd_data", "g2mb2ic8ih7oc8kh3sh2ph1", seed=3)
    assert found.passed, found.sentences
    assert set(found.gates) == {"integers", "normal"}
    assert found.gates["integers"].outputs["grad_input"].exact.passed
    bits = found.gates["normal"].outputs["grad_input"].bits
    assert bits.equal_to_second
    assert bits.equal_when_doubled


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "the kernel returned None; expected grad_input as an array"),
        (np.zeros((2, 8, 7, 7), np.float32), r"is \[2, 2, 4, 7, 7\] as \(sample, group, channel"),
    ],
)
def test_a_kernel_that_returns_something_else_is_refused(returned: Any, said: str) -> None:
    with pytest.raises(ConvgradError, match=said):
        check.kernel(lambda **_: returned, "conv_bwd_data", "g2mb2ic4ih7oc8kh3ph1")


def test_a_kernel_that_adds_by_chance_is_named() -> None:
    rng = np.random.default_rng()

    def atomic(**arguments: Any) -> Array:
        good = kernel(**arguments)
        return good * (1 + rng.choice([0.0, 2.0**-23], good.shape)).astype(good.dtype)

    found = check.kernel(atomic, "conv_bwd_data", "mb2ic8ih7oc8kh3ph1")
    assert not found.passed
    assert any("not deterministic" in sentence for sentence in found.sentences)


def test_a_kernel_that_clips_a_tensor_is_not_linear() -> None:
    """Drawn numbers are below 3.5, so only the sum of two tensors shows the clipping."""

    def clipping(weight: Array, **arguments: Any) -> Array:
        return kernel(weight=np.clip(weight, -3.5, 3.5), **arguments)

    found = check.kernel(clipping, "conv_bwd_data", "g2mb2ic8ih7oc8kh3sh2ph1")
    assert [each.code for each in found.gates["normal"].findings] == ["not-linear"]
    assert "not linear in weight" in found.sentences[0]
    linear = found.gates["normal"].linearity["grad_input"]
    assert linear["grad_output"].passed
    assert not linear["weight"].passed
    assert linear["weight"].exceeding > 0


def test_one_wrong_element_is_not_called_nonlinear() -> None:
    def off(**arguments: Any) -> Array:
        result = kernel(**arguments)
        result[0, 3, 5, 5] += 1
        return result

    found = check.kernel(off, "conv_bwd_data", "mb2ic8ih7oc8kh3ph1")
    assert [each.code for each in found.gates["normal"].findings] == ["single-element"]
    assert not found.gates["normal"].linearity["grad_input"]["weight"].passed


def test_the_tensors_of_the_linearity_check_are_exact() -> None:
    x = check.draw("weight", (64, 33), "bfloat16", 3)
    y, total = check.linear_pair("weight", x, 3)
    wide = x.astype(np.float64)
    assert set((y.astype(np.float64) / wide).ravel()) == {-2.0, -1.0, -0.5, 0.0, 1.0}
    assert (total.astype(np.float64) == wide + y.astype(np.float64)).all()
    assert (check.linear_pair("weight", x, 4)[0] != y).any()


def test_beside_a_bias_nothing_is_linear() -> None:
    """Of conv_fwd with a bias only the second run is compared, and the gradient of a bias with
    its own operand."""
    module = "Conv2d(4, 6, kernel_size=(3, 3)) on 1x4x5x5"
    found = check.kernel(reference_kernel("conv_fwd"), "conv_fwd", module)
    assert found.passed, found.sentences
    assert not found.gates["normal"].linearity
    operation = "grouped_conv_bwd_weight"
    found = check.kernel(reference_kernel(operation), operation, module)
    assert found.passed, found.sentences
    linear = found.gates["normal"].linearity
    assert set(linear["grad_weight"]) == {"input", "grad_output"}
    assert set(linear["grad_bias"]) == {"grad_output"}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_float64_reference_passes_every_check(operation: str) -> None:
    layer = VERIFICATIONS[operation].example["layer"]
    found = check.kernel(reference_kernel(operation), operation, layer, dtype="bfloat16")
    assert found.passed, found.sentences
    normal = found.gates["normal"]
    nonlinear = "maxpool" in operation or "max_pool" in operation or "conv_conv" in operation
    if nonlinear and operation.endswith("fwd"):
        assert not normal.linearity
    else:
        assert set(normal.outputs) - set(normal.linearity) <= {"grad_grad_output"}
        applies = {each.applies for each in normal.adjointness.values()}
        assert applies == {"unpool" not in operation}
