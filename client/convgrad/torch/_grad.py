"""Gradients with the signatures of ``torch.nn.grad`` and ``aten::convolution_backward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from convgrad.torch._drop_in import drop_in, foreign
from convgrad.torch._functional import Sizes, per_dimension
from convgrad.torch._ops import OPS

__all__ = [
    "conv1d_input",
    "conv1d_weight",
    "conv2d_input",
    "conv2d_weight",
    "conv3d_input",
    "conv3d_weight",
    "convolution_backward",
]

Tensor: TypeAlias = torch.Tensor


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of a convolution that ``output_mask`` selects, in one call.

    As ``torch.ops.aten.convolution_backward``; ``bias_sizes`` is ignored.

    Parameters
    ----------
    grad_output, input, weight : Tensor
        (N, K, *out), (N, C, *in), (K, C/groups, *kernel); for a transposed convolution the weight
        is (C, K/groups, *kernel).
    stride, padding, dilation, output_padding : sequence of int
        One value per spatial dimension.
    output_mask : three bools
        Whether to compute grad_input, grad_weight and grad_bias.

    Returns
    -------
    (grad_input, grad_weight, grad_bias)
        None for those not computed.

    Raises
    ------
    convgrad.ConvgradError
        The sizes contradict each other, or the backend failed.
    """
    ndim = input.dim() - 2
    if foreign((grad_output, input, weight)) is not None:
        theirs: Any = torch.ops.aten.convolution_backward
        rest = stride, padding, dilation, transposed, output_padding, groups, output_mask
        return theirs(grad_output, input, weight, bias_sizes, *rest)  # type: ignore[no-any-return]
    found = OPS.convolution_backward(
        grad_output,
        input,
        weight,
        per_dimension(stride, ndim),
        per_dimension(padding, ndim),
        per_dimension(dilation, ndim),
        transposed,
        per_dimension(output_padding, ndim),
        groups,
        list(output_mask),
    )
    grad_input, grad_weight, grad_bias = (
        each if asked else None for each, asked in zip(found, output_mask, strict=True)
    )
    return grad_input, grad_weight, grad_bias


def _make_input(ndim: int) -> Callable[..., Tensor]:
    def conv_input(
        input_size: Sequence[int],
        weight: Tensor,
        grad_output: Tensor,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        blank = grad_output.new_empty(1).expand(tuple(input_size))
        rest = _steps(ndim, stride, padding, dilation)
        found = OPS.convolution_backward(
            grad_output, blank, weight, *rest, False, [0] * ndim, groups, [True, False, False]
        )
        return found[0]

    return _named(conv_input, f"conv{ndim}d_input", "input")


def _make_weight(ndim: int) -> Callable[..., Tensor]:
    def conv_weight(
        input: Tensor,
        weight_size: Sequence[int],
        grad_output: Tensor,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        blank = grad_output.new_empty(1).expand(tuple(weight_size))
        rest = _steps(ndim, stride, padding, dilation)
        found = OPS.convolution_backward(
            grad_output, input, blank, *rest, False, [0] * ndim, groups, [False, True, False]
        )
        return found[1]

    return _named(conv_weight, f"conv{ndim}d_weight", "weight")


def _steps(ndim: int, *values: Sizes) -> list[list[int]]:
    return [per_dimension(value, ndim) for value in values]


def _named(function: Any, name: str, what: str) -> Callable[..., Tensor]:
    document = (
        f"Compute the gradient of a convolution with respect to its {what}, as "
        f"``torch.nn.grad.{name}``. ``{what}_size`` is its full shape."
    )
    return drop_in(function, getattr(torch.nn.grad, name), name, document)


conv1d_input, conv2d_input, conv3d_input = map(_make_input, (1, 2, 3))
conv1d_weight, conv2d_weight, conv3d_weight = map(_make_weight, (1, 2, 3))
