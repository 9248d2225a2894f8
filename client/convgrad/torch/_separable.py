"""Depthwise-separable convolutions, whose two convolutions run as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from convgrad.torch._backends import Backend, Operation, named
from convgrad.torch._drop_in import drop_in
from convgrad.torch._functional import (
    Sizes,
    autocast,
    batched,
    numeric_padding,
    per_dimension,
)
from convgrad.torch._ops import OPS, default_backend
from convgrad.torch._prepared import Pass, key_of, prepared, why_not
from convgrad.torch._tensors import is_channels_last

__all__ = ["separable_conv1d", "separable_conv2d", "separable_conv3d"]

Tensor: TypeAlias = torch.Tensor
_ATEN = torch.ops.aten
_LIBRARY = torch.library.Library("convgrad", "FRAGMENT")
_LIBRARY.define(
    "separable_convolution(Tensor input, Tensor depthwise, Tensor pointwise, Tensor? bias, "
    "int[] stride, int[] padding, int[] dilation) -> Tensor"
)


def _prepare(
    backend: Backend, tensors: Sequence[Tensor], steps: tuple[tuple[int, ...], ...]
) -> Pass:
    input, depthwise, pointwise, *bias = tensors
    stride, padding, dilation = steps
    first = {"stride": stride, "padding": padding, "dilation": dilation, "groups": input.shape[1]}
    names = ("input", "weight0", "weight1", "bias1")[: 3 + len(bias)]
    layer = " * ".join("x".join(map(str, each.shape)) for each in tensors[:3])
    return Pass(
        backend,
        Operation("grouped_conv_conv_fwd", named(names), named(("output",)), {"conv0": first}),
        names,
        tensors,
        ["output"],
        layer,
        is_channels_last(input, depthwise, pointwise),
    )


def _compute(
    input: Tensor, depthwise: Tensor, pointwise: Tensor, bias: Tensor | None, *rest: Sequence[int]
) -> Tensor:
    if why_not(input, depthwise, pointwise) is not None:
        return _composed(_ATEN.convolution, input, depthwise, pointwise, bias, *rest)
    tensors = (input, depthwise, pointwise) if bias is None else (input, depthwise, pointwise, bias)
    steps = tuple(map(tuple, rest))
    backend = default_backend()
    key = key_of(backend, tensors, "separable", steps)
    (output,) = prepared(key, _prepare, backend, tensors, steps)(tensors)
    assert output is not None  # noqa: S101 - the operation's one output
    return output


def _composed(
    convolution: Callable[..., Tensor],
    input: Tensor,
    depthwise: Tensor,
    pointwise: Tensor,
    bias: Tensor | None,
    *rest: Sequence[int],
) -> Tensor:
    between = convolution(input, depthwise, None, *rest, *_rest_of(input.dim() - 2, input.shape[1]))
    return convolution(between, pointwise, bias, *_plain(input.dim() - 2))


def _plain(ndim: int) -> tuple[Any, ...]:
    """Return the arguments of a convolution without stride or padding, from stride on."""
    return [1] * ndim, [0] * ndim, [1] * ndim, *_rest_of(ndim, 1)


def _rest_of(ndim: int, groups: int) -> tuple[Any, ...]:
    """Return the arguments of a convolution from ``transposed`` on."""
    return False, [0] * ndim, groups


def _fake(*given: Any) -> Tensor:
    return _composed(_ATEN.convolution, *given)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    input, depthwise, pointwise, bias, *ctx.rest = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(input, depthwise, pointwise)


def _derivative(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    """Compute what is between the convolutions again, which the forward pass did not store."""
    input, depthwise, pointwise = ctx.saved_tensors
    needs = ctx.needs_input_grad
    ndim = input.dim() - 2
    first = *ctx.rest, *_rest_of(ndim, input.shape[1])
    between = OPS.convolution(input, depthwise, None, *first)
    mask = [needs[0] or needs[1], needs[2], ctx.has_bias and needs[3]]
    grads = OPS.convolution_backward(grad_output, between, pointwise, *_plain(ndim), mask)
    grad_between, grad_pointwise, grad_bias = _asked(grads, mask)
    grad_input = grad_depthwise = None
    if grad_between is not None:
        mask = [needs[0], needs[1], False]
        grads = OPS.convolution_backward(grad_between, input, depthwise, *first, mask)
        grad_input, grad_depthwise, _ = _asked(grads, mask)
    return grad_input, grad_depthwise, grad_pointwise, grad_bias, None, None, None


def _asked(found: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor | None]:
    return [each if asked else None for each, asked in zip(found, mask, strict=True)]


_LIBRARY.impl("separable_convolution", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("convgrad::separable_convolution", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "convgrad::separable_convolution", _derivative, setup_context=_save, lib=_LIBRARY
)


def _make(ndim: int) -> Callable[..., Tensor]:
    def separable_conv(
        input: Tensor,
        depthwise: Tensor,
        pointwise: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
    ) -> Tensor:
        input, depthwise, pointwise, bias = autocast(input, depthwise, pointwise, bias)
        steps, gaps = per_dimension(stride, ndim), per_dimension(dilation, ndim)
        whole, unbatched = batched(input, ndim)
        whole, pads = numeric_padding(whole, padding, depthwise, steps, gaps)
        output = OPS.separable_convolution(whole, depthwise, pointwise, bias, steps, pads, gaps)
        return output.squeeze(0) if unbatched else output

    def composed(
        input: Tensor,
        depthwise: Tensor,
        pointwise: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
    ) -> Any:
        convolution = getattr(torch.nn.functional, f"conv{ndim}d")
        groups = input.shape[-ndim - 1]
        between = convolution(input, depthwise, None, stride, padding, dilation, groups)
        return convolution(between, pointwise, bias)

    return drop_in(
        separable_conv,
        composed,
        f"separable_conv{ndim}d",
        f"""Depthwise-separable convolution in {ndim}D, forward and backward on the backend.

    A depthwise convolution and a pointwise one of its output, in one kernel that stores nothing in
    between where there is such a kernel; the backward pass computes it again.

    Parameters
    ----------
    input : Tensor
        (N, C, *in), or (C, *in); float16, bfloat16, float32 or float64.
    depthwise : Tensor
        (C * m, 1, *kernel), of the same dtype.
    pointwise : Tensor
        (K, C * m, *ones), of the same dtype.
    bias : Tensor, optional
        (K,), added to the output.
    stride, dilation : int or sequence of int
        Of the depthwise convolution: one value, or one per spatial dimension.
    padding : int, sequence of int, "valid" or "same"
        Zeros on both sides of the input; "same" needs stride 1.

    Returns
    -------
    Tensor
        (N, K, *out), in a channels-last memory format if a tensor given is.

    Raises
    ------
    RuntimeError
        As PyTorch, where the sizes contradict each other.
    convgrad.ConvgradError
        The backend failed or, with ``use(..., fallback=False)``, refused.
    """,
    )


separable_conv1d, separable_conv2d, separable_conv3d = map(_make, (1, 2, 3))
