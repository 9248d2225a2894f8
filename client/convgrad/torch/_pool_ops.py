"""The operators of average, adaptive and max un-pooling, defined as in `_ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from convgrad.torch._ops import OPS, default_backend
from convgrad.torch._pool_passes import (
    adaptive_avg_backward,
    adaptive_avg_forward,
    adaptive_max_backward,
    adaptive_max_forward,
    avg_backward,
    avg_forward,
    unpool_backward,
    unpool_forward,
)
from convgrad.torch._prepared import why_not
from convgrad.torch._tensors import dense, is_channels_last, scatter_maxima

__all__ = ["OPS"]

Tensor: TypeAlias = torch.Tensor
_LIBRARY = torch.library.Library("convgrad", "FRAGMENT")
_AVERAGE = (
    "int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, "
    "int? divisor_override"
)
_WINDOW = "int[] kernel_size, int[] stride, int[] padding"
for _schema in (
    f"avg_pool(Tensor input, {_AVERAGE}) -> Tensor",
    f"avg_pool_backward(Tensor grad_output, int[] size, {_AVERAGE}, bool last) -> Tensor",
    "adaptive_avg_pool(Tensor input, int[] size) -> Tensor",
    "adaptive_avg_pool_backward(Tensor grad_output, int[] size, bool last) -> Tensor",
    "adaptive_max_pool(Tensor input, int[] size) -> (Tensor, Tensor)",
    "adaptive_max_pool_backward(Tensor grad_output, Tensor indices, int[] size, bool last)"
    " -> Tensor",
    f"max_unpool(Tensor input, Tensor indices, {_WINDOW}, int[] size) -> Tensor",
    "max_unpool_backward(Tensor grad_output, Tensor indices) -> Tensor",
):
    _LIBRARY.define(_schema)


def _window(rest: Sequence[Any]) -> tuple[Any, ...]:
    """Make lists tuples, which are hashable."""
    return tuple(tuple(each) if isinstance(each, list) else each for each in rest)


def _functional(name: str, input: Tensor) -> Any:
    """Return PyTorch's function, which computes what no backend does, such as empty batches."""
    return getattr(functional, f"{name}{input.dim() - 2}d")


def _blank(like: Tensor, size: Sequence[int], last: bool) -> Tensor:
    """Return an empty tensor with the same N and C and another spatial size."""
    return dense(like.new_empty((*like.shape[:2], *size)), last)


def _avg_pool(input: Tensor, *rest: Any) -> Tensor:
    if why_not(input) is None:
        return avg_forward(default_backend(), input, _window(rest))
    return _avg_pool_fake(input, *rest)


def _avg_pool_fake(input: Tensor, *rest: Any) -> Tensor:
    arguments = rest[:-1] if input.dim() == 3 else rest  # in 1D there is no divisor_override
    pooled: Tensor = _functional("avg_pool", input)(input, *arguments)
    return pooled


def _avg_pool_backward(grad_output: Tensor, size: Sequence[int], *rest: Any) -> Tensor:
    *window, last = rest
    if why_not(grad_output) is None:
        return avg_backward(default_backend(), grad_output, size, _window(window), last)
    return _blank(grad_output, size, last).zero_()


def _avg_pool_backward_fake(grad_output: Tensor, size: Sequence[int], *rest: Any) -> Tensor:
    return _blank(grad_output, size, rest[-1])


def _adaptive_avg_pool(input: Tensor, size: Sequence[int]) -> Tensor:
    if why_not(input) is None:
        return adaptive_avg_forward(default_backend(), input, size)
    return _functional("adaptive_avg_pool", input)(input, size)


def _adaptive_fake(input: Tensor, size: Sequence[int]) -> Tensor:
    return _blank(input, size, is_channels_last(input))


def _adaptive_avg_pool_backward(grad_output: Tensor, size: Sequence[int], last: bool) -> Tensor:
    if why_not(grad_output) is None:
        return adaptive_avg_backward(default_backend(), grad_output, size, last)
    return _blank(grad_output, size, last).zero_()


def _adaptive_max_pool(input: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    if why_not(input) is None:
        return adaptive_max_forward(default_backend(), input, size)
    both: tuple[Tensor, Tensor] = _functional("adaptive_max_pool", input)(input, size, True)
    return both


def _adaptive_max_pool_fake(input: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    output = _adaptive_fake(input, size)
    return output, torch.empty_like(output, dtype=torch.int64)


def _adaptive_max_pool_backward(
    grad_output: Tensor, indices: Tensor, size: Sequence[int], last: bool
) -> Tensor:
    if why_not(grad_output) is None:
        return adaptive_max_backward(default_backend(), grad_output, indices, size, last)
    return _blank(grad_output, size, last).zero_()


def _max_unpool(input: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    *window, size = rest
    if why_not(input) is None:
        return unpool_forward(default_backend(), input, indices, _window(window), size)
    return _functional("max_unpool", input)(input, indices, *window, size)


def _max_unpool_fake(input: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    return _blank(input, rest[-1], is_channels_last(input, indices))


def _max_unpool_backward(grad_output: Tensor, indices: Tensor) -> Tensor:
    if why_not(grad_output) is None:
        return unpool_backward(default_backend(), grad_output, indices)
    return _max_unpool_backward_fake(grad_output, indices)


def _max_unpool_backward_fake(grad_output: Tensor, indices: Tensor) -> Tensor:
    return _blank(grad_output, indices.shape[2:], is_channels_last(grad_output, indices))


# --- derivatives ---


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, *ctx.rest = inputs
    ctx.size, ctx.last = input.shape[2:], is_channels_last(input)


def _avg_pool_derivative(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    found = OPS.avg_pool_backward(grad_output, ctx.size, *ctx.rest, ctx.last)
    return (found, *(None,) * len(ctx.rest))


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad_output, *ctx.rest = inputs
    ctx.size = grad_output.shape[2:]


def _avg_pool_backward_derivative(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    _, *window, _ = ctx.rest
    return (OPS.avg_pool(gradient, *window), *(None,) * len(ctx.rest))


def _adaptive_avg_pool_derivative(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    return OPS.adaptive_avg_pool_backward(grad_output, ctx.size, ctx.last), None


def _adaptive_avg_pool_backward_derivative(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return OPS.adaptive_avg_pool(gradient, ctx.size), None, None


def _save_maxima(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.size, ctx.last = inputs[0].shape[2:], is_channels_last(inputs[0])
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _adaptive_max_pool_derivative(ctx: Any, grad_output: Tensor, _: Any) -> tuple[Any, ...]:
    (indices,) = ctx.saved_tensors
    return OPS.adaptive_max_pool_backward(grad_output, indices, ctx.size, ctx.last), None


def _save_indices(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    first, indices, *ctx.rest = inputs
    ctx.size = first.shape[2:]
    ctx.save_for_backward(indices)


def _adaptive_max_pool_backward_derivative(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Gather the gradient at the maxima, to which the forward pass scattered it."""
    (indices,) = ctx.saved_tensors
    return OPS.max_unpool_backward(gradient, indices), None, None, None


def _max_unpool_derivative(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    (indices,) = ctx.saved_tensors
    found = OPS.max_unpool_backward(grad_output, indices)
    return (found, None, *(None,) * len(ctx.rest))


def _max_unpool_backward_derivative(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Scatter and add: indices may repeat."""
    (indices,) = ctx.saved_tensors
    return scatter_maxima(gradient, indices, ctx.size), None


for _name, _compute, _fake, _derivative, _save in (
    ("avg_pool", _avg_pool, _avg_pool_fake, _avg_pool_derivative, _save_forward),
    (
        "avg_pool_backward",
        _avg_pool_backward,
        _avg_pool_backward_fake,
        _avg_pool_backward_derivative,
        _save_backward,
    ),
    (
        "adaptive_avg_pool",
        _adaptive_avg_pool,
        _adaptive_fake,
        _adaptive_avg_pool_derivative,
        _save_forward,
    ),
    (
        "adaptive_avg_pool_backward",
        _adaptive_avg_pool_backward,
        _blank,
        _adaptive_avg_pool_backward_derivative,
        _save_backward,
    ),
    (
        "adaptive_max_pool",
        _adaptive_max_pool,
        _adaptive_max_pool_fake,
        _adaptive_max_pool_derivative,
        _save_maxima,
    ),
    (
        "adaptive_max_pool_backward",
        _adaptive_max_pool_backward,
        lambda grad_output, indices, size, last: _blank(grad_output, size, last),
        _adaptive_max_pool_backward_derivative,
        _save_indices,
    ),
    ("max_unpool", _max_unpool, _max_unpool_fake, _max_unpool_derivative, _save_indices),
    (
        "max_unpool_backward",
        _max_unpool_backward,
        _max_unpool_backward_fake,
        _max_unpool_backward_derivative,
        _save_indices,
    ),
):
    _LIBRARY.impl(_name, _compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"convgrad::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"convgrad::{_name}", _derivative, setup_context=_save, lib=_LIBRARY
    )
