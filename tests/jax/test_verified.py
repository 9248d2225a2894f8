"""XLA's results pass verification, and a planted error does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import check

Array = NDArray[Any]
LAYERS = (
    "mb2ic16ih14oc24oh14kh3ph1",
    "mb2ic8ih15oc12oh8kh3sh2ph1",
    "g4mb1ic8ih11oc12oh9kh5dh0ph1",
    "g12mb2ic12ih13oc12oh13kh7ph3",
    "mb1ic6id7oc8od4kd3sd2pd1",
)


def conv_fwd(input: Array, weight: Array, **p: Any) -> Any:
    return jax.lax.conv_general_dilated(
        input, weight, p["stride"], p["padding"], rhs_dilation=p["dilation"],
        feature_group_count=p["groups"], precision="highest",
    )  # fmt: skip


def conv_bwd_data(grad_output: Array, weight: Array, **p: Any) -> Array:
    shape = (len(grad_output), weight.shape[1] * p["groups"], *p["input_size"])
    back = jax.linear_transpose(lambda x: conv_fwd(x, weight, **p), np.zeros(shape, weight.dtype))
    return np.asarray(back(grad_output)[0])


def bwd_weight(input: Array, grad_output: Array, **p: Any) -> Array:
    shape = (grad_output.shape[1], input.shape[1] // p["groups"], *p["weight_size"])
    back = jax.linear_transpose(lambda w: conv_fwd(input, w, **p), np.zeros(shape, input.dtype))
    return np.asarray(back(grad_output)[0])


KERNELS: dict[str, Callable[..., Array]] = {
    "conv_fwd": conv_fwd,
    "conv_bwd_data": conv_bwd_data,
    "grouped_conv_bwd_weight": bwd_weight,
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("operation", KERNELS)
def test_xla_is_right(operation: str, layer: str) -> None:
    found = check.kernel(KERNELS[operation], operation, layer)
    assert found.passed, found.sentences


def test_a_default_precision_that_is_lower_is_found() -> None:
    def rounded(grad_output: Array, weight: Array, **p: Any) -> Array:
        coarse = weight.astype(jax.numpy.bfloat16).astype(np.float32)
        return conv_bwd_data(grad_output, coarse, **p)

    found = check.kernel(rounded, "conv_bwd_data", LAYERS[0])
    assert [each.code for each in found.gates["normal"].findings] == ["low-precision"]
