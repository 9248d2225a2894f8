"""A layer's forward and backward pass on a backend, from and to PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from convgrad.torch._backends import Backend, Geometry, convolution, convolution_backward, max_pool
from convgrad.torch._report import record
from convgrad.torch._tensors import DTYPES, dense, is_channels_last, with_precision

__all__ = [
    "PoolGeometry",
    "computable",
    "conv_backward",
    "conv_forward",
    "pool_backward",
    "pool_forward",
    "transposed_output_size",
]

PoolGeometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""kernel_size, stride, padding, dilation, ceil_mode."""

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")


def computable(*tensors: torch.Tensor) -> str | None:
    """Why a backend cannot take these tensors; None where it can."""
    first = tensors[0]
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"dtype {tensor.dtype}"
        if tensor.dtype is not first.dtype or tensor.device != first.device:
            return "tensors of different dtypes or devices"
        if tensor.numel() == 0:
            return "an empty tensor"
        if tensor.layout is not torch.strided or not 3 <= tensor.dim() <= 5:
            return f"a {tensor.dim()}-dimensional {tensor.layout} tensor"
    return None


def conv_forward(
    backend: Backend,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
) -> torch.Tensor:
    """The output of a convolution, transposed or not."""
    last = is_channels_last(input, weight)
    tensors = {"input": dense(input, last), "weight": dense(weight, last)}
    size: tuple[int, ...] = ()
    if geometry.transposed:
        size = transposed_output_size(input.shape[2:], weight.shape[2:], geometry)
    elif bias is not None:
        tensors["bias"] = bias.contiguous()
    operation = with_precision(convolution(geometry, size, bias="bias" in tensors), input)
    results, kernel = backend.run(operation, tensors, channels_last=last)
    record(operation.name, _layer(input, weight, geometry), backend.name, kernel)
    output = results["output"]
    if geometry.transposed and bias is not None:
        output = output + bias.view(1, -1, *(1,) * (input.dim() - 2))
    return output


def conv_backward(
    backend: Backend,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    geometry: Geometry,
    mask: Sequence[bool],
) -> Gradients:
    """grad_input, grad_weight and grad_bias of a convolution; None for what ``mask`` leaves out."""
    last = is_channels_last(input, weight)
    tensors = {"grad_output": grad_output, "input": input, "weight": weight}
    wanted = tuple(name for name, asked in zip(_GRADIENTS, mask, strict=True) if asked)
    found: dict[str, torch.Tensor] = {}
    for operation in convolution_backward(
        geometry, wanted, tuple(input.shape[2:]), tuple(weight.shape[2:])
    ):
        named = with_precision(operation, input)
        own = {ours: dense(tensors[ours], last) for ours in named.inputs.values()}
        results, kernel = backend.run(named, own, channels_last=last)
        record(named.name, _layer(input, weight, geometry), backend.name, kernel)
        found |= results
    if mask[2] and "grad_bias" not in found:
        found["grad_bias"] = grad_output.sum((0, *range(2, grad_output.dim())))
    return found.get("grad_input"), found.get("grad_weight"), found.get("grad_bias")


def pool_forward(backend: Backend, input: torch.Tensor, geometry: PoolGeometry) -> torch.Tensor:
    """The output of max pooling."""
    last = is_channels_last(input)
    operation = max_pool(input.dim() - 2, *geometry, backward=False)
    results, kernel = backend.run(operation, {"input": dense(input, last)}, channels_last=last)
    record(operation.name, _pool(input, geometry), backend.name, kernel)
    return results["output"]


def pool_backward(
    backend: Backend, grad_output: torch.Tensor, input: torch.Tensor, geometry: PoolGeometry
) -> torch.Tensor:
    """The gradient of max pooling's input; the maxima are found again in the input."""
    last = is_channels_last(input)
    operation = max_pool(input.dim() - 2, *geometry, backward=True)
    tensors = {"grad_output": dense(grad_output, last), "input": dense(input, last)}
    results, kernel = backend.run(operation, tensors, channels_last=last)
    record(operation.name, _pool(input, geometry), backend.name, kernel)
    return results["grad_input"]


def transposed_output_size(
    input_size: Sequence[int], kernel_size: Sequence[int], geometry: Geometry
) -> tuple[int, ...]:
    """The spatial size that a transposed convolution makes of its input's."""
    return tuple(
        (size - 1) * stride - 2 * pad + dilation * (kernel - 1) + extra + 1
        for size, kernel, stride, pad, dilation, extra in zip(
            input_size,
            kernel_size,
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            geometry.output_padding,
            strict=True,
        )
    )


def _layer(input: torch.Tensor, weight: torch.Tensor, geometry: Geometry) -> str:
    """E.g. ``8x64x56x56 * 128x64x3x3 s2 p1 g1 bfloat16``."""
    text = f"{_by(input.shape)} * {_by(weight.shape)} s{_by(geometry.stride)}"
    text += f" p{_by(geometry.padding)} d{_by(geometry.dilation)} g{geometry.groups}"
    return f"{text}{' transposed' if geometry.transposed else ''} {DTYPES[input.dtype]}"


def _pool(input: torch.Tensor, geometry: PoolGeometry) -> str:
    kernel, stride, padding, _, _ = geometry
    return f"{_by(input.shape)} k{_by(kernel)} s{_by(stride)} p{_by(padding)} {DTYPES[input.dtype]}"


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
