"""The operators ``convgrad::…``: implementations, fake implementations and derivatives.

They look up `default_backend` when they run, so that the graphs of ``torch.compile`` do not depend
on the backend in use when they were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import lru_cache
from typing import Any

import torch

from convgrad.torch._backends import Backend, Geometry
from convgrad.torch._choice import backend_in_use
from convgrad.torch._local import Local
from convgrad.torch._passes import (
    conv_backward,
    conv_double_backward,
    conv_forward,
    pool_backward,
    pool_forward,
)
from convgrad.torch._prepared import why_not
from convgrad.torch._tensors import gather_maxima

__all__ = ["OPS", "default_backend"]

_LIBRARY = torch.library.Library("convgrad", "DEF")
_CONV = (
    "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
)
_POOL = "int[] kernel_size, int[] stride, int[] padding, int[] dilation, bool ceil_mode"
_LIBRARY.define(f"convolution(Tensor input, Tensor weight, Tensor? bias, {_CONV}) -> Tensor")
_LIBRARY.define(
    f"convolution_backward(Tensor grad_output, Tensor input, Tensor weight, {_CONV}, "
    "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "convolution_double_backward(Tensor? grad_grad_input, Tensor? grad_grad_weight, "
    f"Tensor? grad_grad_bias, Tensor grad_output, Tensor input, Tensor weight, {_CONV}, "
    "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(f"max_pool(Tensor input, {_POOL}) -> Tensor")
_LIBRARY.define(f"max_pool_backward(Tensor grad_output, Tensor input, {_POOL}) -> Tensor")

OPS = torch.ops.convgrad
_ATEN = torch.ops.aten


def default_backend() -> Backend:
    """Return the backend that `use` was given, or else a `Local`.

    Raises
    ------
    convgrad.DeviceUnavailable
        `use` was given none, and the service is not installed.
    """
    return backend_in_use() or _local()


@lru_cache(maxsize=1)
def _local() -> Backend:
    return Local()


def _geometry(values: Sequence[Any]) -> Geometry:
    stride, padding, dilation, transposed, output_padding, groups = values
    return Geometry(
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        groups,
        transposed,
        tuple(output_padding),
    )


def _pool_geometry(values: Sequence[Any]) -> Any:
    *sizes, ceil_mode = values
    return (*map(tuple, sizes), ceil_mode)


def _convolution(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    if why_not(input, weight) is None:
        return conv_forward(default_backend(), input, weight, bias, _geometry(rest))
    return _ATEN.convolution(input, weight, bias, *rest)


def _convolution_fake(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    return _ATEN.convolution(input, weight, bias, *rest)


def _convolution_backward(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    *geometry, mask = rest
    if why_not(grad_output, input, weight) is None:
        backend = default_backend()
        found = conv_backward(
            backend, grad_output, input, weight, astuple(_geometry(geometry)), tuple(mask)
        )
    else:
        channels = [grad_output.shape[1]]
        found = _ATEN.convolution_backward(grad_output, input, weight, channels, *geometry, mask)
    return _as_tensors(found, grad_output)


def _as_tensors(
    found: Sequence[torch.Tensor | None], like: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Replace None by an empty tensor, since an operator must return tensors."""
    return tuple(like.new_empty(0) if each is None else each for each in found)


def _convolution_backward_fake(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    *geometry, mask = rest
    channels = [grad_output.shape[1]]
    found = _ATEN.convolution_backward(grad_output, input, weight, channels, *geometry, mask)
    kept = [each if asked else None for each, asked in zip(found, mask, strict=True)]
    return _as_tensors(kept, grad_output)


def _convolution_double_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    *second, grad_output, input, weight = given[:6]
    *geometry, mask = given[6:]
    tensors = grad_output, input, weight
    if why_not(*tensors) is None:
        own = astuple(_geometry(geometry))
        found = conv_double_backward(default_backend(), second, tensors, own, tuple(mask))
    else:
        found = _ATEN._convolution_double_backward(
            *second, grad_output, weight, input, *geometry, mask
        )
    return _as_tensors(found, grad_output)


def _convolution_double_backward_fake(*given: Any) -> tuple[torch.Tensor, ...]:
    of_input, of_weight, _, *tensors = given[:6]
    grad_output, mask = tensors[0], given[-1]
    there = True, of_weight is not None, of_input is not None
    asked = [wanted and found for wanted, found in zip(mask, there, strict=True)]
    found = [torch.empty_like(each) for each in tensors]
    kept = [each if wanted else None for each, wanted in zip(found, asked, strict=True)]
    return _as_tensors(kept, grad_output)


def _max_pool(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    if why_not(input) is None:
        return pool_forward(default_backend(), input, _pool_geometry(rest))
    return _with_indices(input)(input, *rest)[0]


def _max_pool_fake(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _with_indices(input)(input, *rest)[0]


def _max_pool_backward(grad_output: torch.Tensor, input: torch.Tensor, *rest: Any) -> torch.Tensor:
    if why_not(grad_output, input) is None:
        return pool_backward(default_backend(), grad_output, input, _pool_geometry(rest))
    return torch.zeros_like(input)  # an empty batch


def _max_pool_backward_fake(
    grad_output: torch.Tensor, input: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return torch.empty_like(input)


def _with_indices(input: torch.Tensor) -> Any:
    return getattr(_ATEN, f"max_pool{input.dim() - 2}d_with_indices")


def _save_convolution(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, weight, bias, *ctx.rest = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(input, weight)


def _convolution_derivative(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
    input, weight = ctx.saved_tensors
    mask = [*ctx.needs_input_grad[:2], ctx.has_bias and ctx.needs_input_grad[2]]
    found = OPS.convolution_backward(grad_output, input, weight, *ctx.rest, mask)
    gradients = (each if asked else None for each, asked in zip(found, mask, strict=True))
    return (*gradients, *(None,) * len(ctx.rest))


def _save_convolution_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad_output, input, weight, *ctx.rest, ctx.mask = inputs
    ctx.save_for_backward(grad_output, input, weight)


def _convolution_backward_derivative(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    """Compute in one call, or by PyTorch's composition if a third derivative may follow."""
    grad_output, input, weight = ctx.saved_tensors
    given = [each if asked else None for each, asked in zip(gradients, ctx.mask, strict=True)]
    mask = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():
        found = _ATEN._convolution_double_backward(
            *given, grad_output, weight, input, *ctx.rest, mask
        )
    else:
        results = OPS.convolution_double_backward(
            *given, grad_output, input, weight, *ctx.rest, mask
        )
        found = tuple(each if each.numel() else None for each in results)
    return (*found, *(None,) * (len(ctx.rest) + 1))


def _save_max_pool(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, *ctx.rest = inputs
    ctx.save_for_backward(input)


def _max_pool_derivative(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
    (input,) = ctx.saved_tensors
    return (OPS.max_pool_backward(grad_output, input, *ctx.rest), *(None,) * len(ctx.rest))


def _save_max_pool_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, input, *ctx.rest = inputs
    ctx.save_for_backward(input)


def _max_pool_backward_derivative(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Gather the gradient at the maxima, to which the forward pass scattered it."""
    (input,) = ctx.saved_tensors
    _, indices = _with_indices(input)(input, *ctx.rest)
    return (gather_maxima(gradient, indices), None, *(None,) * len(ctx.rest))


_LIBRARY.impl(
    "convolution_double_backward", _convolution_double_backward, "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "convgrad::convolution_double_backward", _convolution_double_backward_fake, lib=_LIBRARY
)
for _name, _compute, _fake, _derivative, _save in (
    (
        "convolution",
        _convolution,
        _convolution_fake,
        _convolution_derivative,
        _save_convolution,
    ),
    (
        "convolution_backward",
        _convolution_backward,
        _convolution_backward_fake,
        _convolution_backward_derivative,
        _save_convolution_backward,
    ),
    ("max_pool", _max_pool, _max_pool_fake, _max_pool_derivative, _save_max_pool),
    (
        "max_pool_backward",
        _max_pool_backward,
        _max_pool_backward_fake,
        _max_pool_backward_derivative,
        _save_max_pool_backward,
    ),
):
    _LIBRARY.impl(_name, _compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"convgrad::{_name}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"convgrad::{_name}", _derivative, setup_context=_save, lib=_LIBRARY
    )
