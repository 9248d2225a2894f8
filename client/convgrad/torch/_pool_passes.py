"""Passes of average, adaptive and max un-pooling on a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from convgrad.torch._backends import Backend
from convgrad.torch._passes import (
    PoolGeometry,
    compute,
    pool_backward,
    pool_forward,
    pool_forward_with_indices,
)
from convgrad.torch._tensors import dtype_name, is_channels_last

__all__ = [
    "POOL_BACKWARDS",
    "POOL_FORWARDS",
    "adaptive_avg_backward",
    "adaptive_avg_forward",
    "adaptive_max_backward",
    "adaptive_max_forward",
    "avg_backward",
    "avg_forward",
    "unpool_backward",
    "unpool_forward",
]

Tensor: TypeAlias = torch.Tensor


def avg_forward(backend: Backend, input: Tensor, window: tuple[Any, ...]) -> Tensor:
    """Compute average pooling.

    ``window`` holds kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override.
    """
    (output,) = _run(backend, "avg_pool_fwd", {"input": input}, ("output",), _average(window))
    return output


def avg_backward(
    backend: Backend, grad_output: Tensor, size: Sequence[int], window: tuple[Any, ...], last: bool
) -> Tensor:
    """Compute the gradient of an input of spatial size ``size``, channels last if ``last``."""
    parameters = {**_average(window), "input_size": tuple(size)}
    given = {"grad_output": grad_output}
    (grad,) = _run(backend, "avg_pool_bwd", given, ("grad_input",), parameters, last)
    return grad


def adaptive_avg_forward(backend: Backend, input: Tensor, size: Sequence[int]) -> Tensor:
    """Compute the output of adaptive average pooling."""
    parameters = {"output_size": tuple(size)}
    (output,) = _run(backend, "adaptive_avg_pool_fwd", {"input": input}, ("output",), parameters)
    return output


def adaptive_avg_backward(
    backend: Backend, grad_output: Tensor, size: Sequence[int], last: bool
) -> Tensor:
    """Compute the gradient of an input of spatial size ``size``, channels last if ``last``."""
    given, parameters = {"grad_output": grad_output}, {"input_size": tuple(size)}
    (grad,) = _run(backend, "adaptive_avg_pool_bwd", given, ("grad_input",), parameters, last)
    return grad


def adaptive_max_forward(
    backend: Backend, input: Tensor, size: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute the maxima and their indices."""
    parameters = {"output_size": tuple(size), "return_indices": True}
    results = ("output", "indices")
    output, indices = _run(backend, "adaptive_max_pool_fwd", {"input": input}, results, parameters)
    return output, indices


def adaptive_max_backward(
    backend: Backend, grad_output: Tensor, indices: Tensor, size: Sequence[int], last: bool
) -> Tensor:
    """Compute the gradient of an input of spatial size ``size``, channels last if ``last``."""
    given = {"grad_output": grad_output, "indices": indices}
    parameters = {"input_size": tuple(size)}
    (grad,) = _run(backend, "adaptive_max_pool_bwd", given, ("grad_input",), parameters, last)
    return grad


def unpool_forward(
    backend: Backend, input: Tensor, indices: Tensor, window: tuple[Any, ...], size: Sequence[int]
) -> Tensor:
    """Compute max unpooling; ``window`` holds the max pooling's kernel_size, stride, padding."""
    parameters = dict(zip(("kernel_size", "stride", "padding"), window, strict=True))
    parameters["output_size"] = tuple(size)
    given = {"input": input, "indices": indices}
    (output,) = _run(backend, "max_unpool_fwd", given, ("output",), parameters)
    return output


def unpool_backward(backend: Backend, grad_output: Tensor, indices: Tensor) -> Tensor:
    """Compute the gradient of a max unpooling's input."""
    given = {"grad_output": grad_output, "indices": indices}
    (grad,) = _run(backend, "max_unpool_bwd", given, ("grad_input",), {})
    return grad


def _average(window: tuple[Any, ...]) -> dict[str, Any]:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    *values, divisor = window
    parameters = dict(zip(names, values, strict=True))
    return parameters if divisor is None else {**parameters, "divisor_override": divisor}


def _run(
    backend: Backend,
    name: str,
    tensors: dict[str, Tensor],
    results: tuple[str, ...],
    parameters: dict[str, Any],
    last: bool | None = None,
) -> list[Tensor]:
    last = is_channels_last(*tensors.values()) if last is None else last
    return compute(backend, name, tensors, results, parameters, _described, last)


def _described(tensor: Tensor, parameters: Mapping[str, Any]) -> str:
    """Describe a layer, e.g. ``8x64x56x56 kernel_size 2x2 stride 2x2 … bfloat16``."""

    def by(value: Any) -> str:
        return "x".join(map(str, value)) if isinstance(value, Sequence) else str(value)

    rest = (f"{name} {by(value)}" for name, value in parameters.items())
    return f"{by(tensor.shape)} {' '.join(rest)} {dtype_name(tensor.dtype)}"


# --- ATen's operators; these return None to leave the call to PyTorch ---


def _aten_max(
    backend: Backend,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor | None:
    geometry = _max_geometry(input, kernel_size, stride, padding, dilation, ceil_mode)
    return None if geometry is None else pool_forward(backend, input, geometry)


def _aten_max_with_indices(
    backend: Backend,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor] | None:
    geometry = _max_geometry(input, kernel_size, stride, padding, dilation, ceil_mode)
    return None if geometry is None else pool_forward_with_indices(backend, input, geometry)


def _aten_max_backward(
    backend: Backend,
    grad_output: Tensor,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor | None:
    geometry = _max_geometry(input, kernel_size, stride, padding, dilation, ceil_mode)
    return None if geometry is None else pool_backward(backend, grad_output, input, geometry)


def _aten_max_backward_from_indices(
    backend: Backend, grad_output: Tensor, input: Tensor, *given: Any
) -> Tensor | None:
    """Read only the shape and the memory format of the input, as ATen's kernels do.

    Forward-mode differentiation calls the operator with the input's tangent instead of the input.
    """
    *window, indices = given
    geometry = _max_geometry(input, *window)
    if geometry is None:
        return None
    size = tuple(input.shape[2:])
    parameters = {**dict(zip(_WINDOW, geometry, strict=True)), "input_size": size}
    tensors = {"grad_output": grad_output, "indices": indices}
    name, last = f"maxpool{len(size)}d_bwd", is_channels_last(input)
    (grad,) = _run(backend, name, tensors, ("grad_input",), parameters, last)
    return grad


_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


def _max_geometry(
    input: Tensor, kernel_size: Sequence[int], stride: Sequence[int], *rest: Any
) -> PoolGeometry | None:
    ndim = input.dim() - 2
    # The rank of an unbatched input is that of a batched one with a dimension less.
    if len(kernel_size) != ndim:
        return None
    padding, dilation, ceil_mode = rest
    kernel = tuple(kernel_size)
    steps = _each(stride, ndim) if len(stride) else kernel
    return kernel, steps, _each(padding, ndim), _each(dilation, ndim), ceil_mode


def _aten_avg(
    backend: Backend,
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    rest = ceil_mode, count_include_pad, divisor_override
    window = _avg_window(input, kernel_size, stride, padding, *rest)
    return None if window is None else avg_forward(backend, input, window)


def _aten_avg_backward(
    backend: Backend, grad_output: Tensor, input: Tensor, *given: Any
) -> Tensor | None:
    window = _avg_window(input, *given)
    if window is None:
        return None
    return avg_backward(backend, grad_output, input.shape[2:], window, is_channels_last(input))


def _avg_window(
    input: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *rest: Any,
) -> tuple[Any, ...] | None:
    ndim = input.dim() - 2
    if len(kernel_size) not in (1, ndim) or ndim < 2:
        return None
    kernel = _each(kernel_size, ndim)
    steps = _each(stride, ndim) if len(stride) else kernel
    return (kernel, steps, _each(padding, ndim), *rest)


def _aten_adaptive(
    ndim: int, run: Callable[[Backend, Tensor, Sequence[int]], Any]
) -> Callable[..., Any]:
    def forward(backend: Backend, input: Tensor, output_size: Sequence[int]) -> Any:
        if input.dim() != ndim + 2:
            return None
        return run(backend, input, _each(output_size, ndim))

    return forward


def _aten_adaptive_avg_backward(ndim: int) -> Callable[..., Tensor | None]:
    def backward(backend: Backend, grad_output: Tensor, input: Tensor) -> Tensor | None:
        if input.dim() != ndim + 2:
            return None
        last = is_channels_last(input)
        return adaptive_avg_backward(backend, grad_output, input.shape[2:], last)

    return backward


def _aten_adaptive_max_backward(ndim: int) -> Callable[..., Tensor | None]:
    def backward(
        backend: Backend, grad_output: Tensor, input: Tensor, indices: Tensor
    ) -> Tensor | None:
        if input.dim() != ndim + 2:
            return None
        last = is_channels_last(input)
        return adaptive_max_backward(backend, grad_output, indices, input.shape[2:], last)

    return backward


def _each(values: Sequence[int], ndim: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == ndim else (values[0],) * ndim


POOL_FORWARDS: dict[str, Callable[..., Any]] = {
    "max_pool2d": _aten_max,
    **{f"max_pool{ndim}d_with_indices": _aten_max_with_indices for ndim in (2, 3)},
    **{f"avg_pool{ndim}d": _aten_avg for ndim in (2, 3)},
    **{f"_adaptive_avg_pool{n}d": _aten_adaptive(n, adaptive_avg_forward) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d": _aten_adaptive(n, adaptive_max_forward) for n in (2, 3)},
}
"""Functions (backend, input, …) -> output, or (output, indices), by ATen's names."""

POOL_BACKWARDS: dict[str, Callable[..., Tensor | None]] = {
    "max_pool2d_backward": _aten_max_backward,
    **{
        f"max_pool{ndim}d_with_indices_backward": _aten_max_backward_from_indices for ndim in (2, 3)
    },
    **{f"avg_pool{ndim}d_backward": _aten_avg_backward for ndim in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": _aten_adaptive_avg_backward(n) for n in (2, 3)},
    **{f"adaptive_max_pool{n}d_backward": _aten_adaptive_max_backward(n) for n in (2, 3)},
}
"""Functions (backend, grad_output, input, …) -> grad_input, by ATen's names."""
