"""PyTorch's results pass verification, with oneDNN and without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
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


def to_torch(array: Array) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Any) -> Array:
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


def padding_of(padding: Any) -> list[int]:
    assert all(before == after for before, after in padding)
    return [before for before, _ in padding]


def backward(dy: Any, x: Any, w: Any, p: dict[str, Any], wanted: tuple[bool, bool]) -> Any:
    none = [0] * len(p["stride"])
    return torch.ops.aten.convolution_backward(
        dy, x, w, None, p["stride"], padding_of(p["padding"]), p["dilation"], False, none,
        p["groups"], (*wanted, False),
    )  # fmt: skip


def conv_fwd(input: Array, weight: Array, **p: Any) -> Array:
    function = getattr(torch.nn.functional, f"conv{input.ndim - 2}d")
    found = function(
        to_torch(input), to_torch(weight), None, p["stride"], padding_of(p["padding"]),
        p["dilation"], p["groups"],
    )  # fmt: skip
    return to_numpy(found)


def conv_bwd_data(grad_output: Array, weight: Array, **p: Any) -> Array:
    shape = (len(grad_output), weight.shape[1] * p["groups"], *p["input_size"])
    dy, w = to_torch(grad_output), to_torch(weight)
    return to_numpy(backward(dy, torch.empty(shape, dtype=dy.dtype), w, p, (True, False))[0])


def grouped_conv_bwd_weight(input: Array, grad_output: Array, **p: Any) -> Array:
    x, dy = to_torch(input), to_torch(grad_output)
    shape = (dy.shape[1], x.shape[1] // p["groups"], *p["weight_size"])
    return to_numpy(backward(dy, x, torch.empty(shape, dtype=x.dtype), p, (False, True))[1])


KERNELS: dict[str, Callable[..., Array]] = {
    "conv_fwd": conv_fwd,
    "conv_bwd_data": conv_bwd_data,
    "grouped_conv_bwd_weight": grouped_conv_bwd_weight,
}


@contextmanager
def onednn(enabled: bool) -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("operation", KERNELS)
@pytest.mark.parametrize("enabled", [True, False], ids=["oneDNN", "ATen"])
def test_pytorch_is_right(operation: str, layer: str, enabled: bool) -> None:
    with onednn(enabled):
        found = check.kernel(KERNELS[operation], operation, layer)
    assert found.passed, found.sentences


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="on this CPU, PyTorch computes it without oneDNN, and sums in bfloat16",
)
@pytest.mark.parametrize("operation", KERNELS)
def test_onednn_is_right_in_bfloat16(operation: str) -> None:
    found = check.kernel(KERNELS[operation], operation, LAYERS[0], dtype="bfloat16")
    assert found.passed, found.sentences


def max_pool(input: Array, **p: Any) -> Array:
    found = torch.nn.functional.max_pool2d(
        to_torch(input), p["kernel_size"], p["stride"], padding_of(p["padding"]), p["dilation"]
    )
    return to_numpy(found)


def avg_pool(input: Array, **p: Any) -> Array:
    found = torch.nn.functional.avg_pool2d(
        to_torch(input), p["kernel_size"], p["stride"], padding_of(p["padding"]),
        p.get("ceil_mode", False), p.get("count_include_pad", True),
    )  # fmt: skip
    return to_numpy(found)


def avg_pool_without_padding(input: Array, **p: Any) -> Array:
    return avg_pool(input, **{**p, "count_include_pad": False})


def conv_transpose_fwd(input: Array, weight: Array, bias: Array, **p: Any) -> Array:
    found = torch.nn.functional.conv_transpose2d(
        to_torch(input), to_torch(weight), to_torch(bias), p["stride"], padding_of(p["padding"]),
        p["output_padding"], p["groups"], p["dilation"],
    )  # fmt: skip
    return to_numpy(found)


@pytest.mark.parametrize(
    ("run", "operation", "layer"),
    [
        (max_pool, "maxpool2d_fwd", "--pool mb2ic5ih13kh3sh2ph1"),
        (avg_pool, "avg_pool_fwd", "AvgPool2d(3, stride=2, padding=1, ceil_mode=True) on 2x4x8x8"),
        (
            conv_transpose_fwd,
            "conv_transpose_fwd",
            "ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2) on 2x8x5x5",
        ),
    ],
)
def test_pytorch_pools_and_transposes_right(
    run: Callable[..., Array], operation: str, layer: str
) -> None:
    found = check.kernel(run, operation, layer)
    assert found.passed, found.sentences


def test_another_divisor_is_found() -> None:
    layer = "AvgPool2d(3, stride=2, padding=1) on 2x4x9x9"
    assert not check.kernel(avg_pool_without_padding, "avg_pool_fwd", layer).passed
