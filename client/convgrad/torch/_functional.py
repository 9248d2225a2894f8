"""Convolution and max pooling with the signatures of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from convgrad.torch._drop_in import drop_in
from convgrad.torch._ops import OPS

__all__ = [
    "Sizes",
    "autocast",
    "batched",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "numeric_padding",
    "per_dimension",
    "window",
]

Sizes = int | Sequence[int]
Tensor: TypeAlias = torch.Tensor


def _make_conv(ndim: int) -> Callable[..., Tensor]:
    def conv(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
    ) -> Tensor:
        input, weight, bias = autocast(input, weight, bias)
        steps, gaps = per_dimension(stride, ndim), per_dimension(dilation, ndim)
        whole, unbatched = batched(input, ndim)
        whole, pads = numeric_padding(whole, padding, weight, steps, gaps)
        output = OPS.convolution(whole, weight, bias, steps, pads, gaps, False, [0] * ndim, groups)
        return output.squeeze(0) if unbatched else output

    return drop_in(
        conv,
        getattr(torch.nn.functional, f"conv{ndim}d"),
        f"conv{ndim}d",
        f"""Convolution in {ndim}D, forward and backward on the backend.

    As ``torch.nn.functional.conv{ndim}d``.

    Parameters
    ----------
    input : Tensor
        (N, C, *in), or (C, *in); float16, bfloat16, float32 or float64.
    weight : Tensor
        (K, C/groups, *kernel), of the same dtype.
    bias : Tensor, optional
        (K,).
    stride, dilation : int or sequence of int
        One value, or one per spatial dimension.
    padding : int, sequence of int, "valid" or "same"
        Zeros on both sides; "same" needs stride 1.
    groups : int
        Number of groups of channels.

    Returns
    -------
    Tensor
        (N, K, *out), in a channels-last memory format if ``input`` or ``weight`` is.

    Raises
    ------
    RuntimeError
        As PyTorch, where the sizes contradict each other.
    convgrad.ConvgradError
        The backend failed or, with ``use(..., fallback=False)``, refused.
    """,
    )


def _make_conv_transpose(ndim: int) -> Callable[..., Tensor]:
    def conv_transpose(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        dilation: Sizes = 1,
    ) -> Tensor:
        input, weight, bias = autocast(input, weight, bias)
        whole, unbatched = batched(input, ndim)
        output = OPS.convolution(
            whole,
            weight,
            bias,
            per_dimension(stride, ndim),
            per_dimension(padding, ndim),
            per_dimension(dilation, ndim),
            True,
            per_dimension(output_padding, ndim),
            groups,
        )
        return output.squeeze(0) if unbatched else output

    return drop_in(
        conv_transpose,
        getattr(torch.nn.functional, f"conv_transpose{ndim}d"),
        f"conv_transpose{ndim}d",
        f"""Transposed convolution in {ndim}D, forward and backward on the backend.

    As ``torch.nn.functional.conv_transpose{ndim}d``.

    Parameters
    ----------
    input : Tensor
        (N, C, *in), or (C, *in); float16, bfloat16, float32 or float64.
    weight : Tensor
        (C, K/groups, *kernel), of the same dtype.
    bias : Tensor, optional
        (K,).
    stride, padding, output_padding, dilation : int or sequence of int
        One value, or one per spatial dimension.
    groups : int
        Number of groups of channels.

    Returns
    -------
    Tensor
        (N, K, *out).

    Raises
    ------
    RuntimeError
        As PyTorch, where the sizes contradict each other.
    convgrad.ConvgradError
        The backend failed or, with ``use(..., fallback=False)``, refused.
    """,
    )


def _make_max_pool(ndim: int) -> Callable[..., Any]:
    theirs = getattr(torch.nn.functional, f"max_pool{ndim}d")

    def max_pool(
        input: Tensor,
        kernel_size: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        if return_indices:
            return theirs(input, kernel_size, stride, padding, dilation, ceil_mode, True)
        kernel, steps = window(kernel_size, stride, ndim)
        whole, unbatched = batched(input, ndim)
        output = OPS.max_pool(
            whole,
            kernel,
            steps,
            per_dimension(padding, ndim),
            per_dimension(dilation, ndim),
            ceil_mode,
        )
        return output.squeeze(0) if unbatched else output

    return drop_in(
        max_pool,
        theirs,
        f"max_pool{ndim}d",
        f"""Max pooling in {ndim}D, forward and backward on the backend, deterministic.

    As ``torch.nn.functional.max_pool{ndim}d``.

    Parameters
    ----------
    input : Tensor
        (N, C, *in), or (C, *in); float16, bfloat16, float32 or float64.
    kernel_size, stride, padding, dilation : int or sequence of int
        One value, or one per spatial dimension; ``stride`` defaults to ``kernel_size``.
    ceil_mode : bool
        Round the output's size up.
    return_indices : bool
        Also return the flat index of each maximum in its plane; PyTorch computes the forward pass.

    Returns
    -------
    Tensor, or tuple of Tensor
        (N, C, *out); with ``return_indices`` the indices too.

    Raises
    ------
    RuntimeError
        As PyTorch, where the sizes contradict each other.
    convgrad.ConvgradError
        The backend failed or, with ``use(..., fallback=False)``, refused.
    """,
    )


def per_dimension(value: Sizes, ndim: int) -> list[int]:
    """Return one value for each of ``ndim`` dimensions.

    Raises
    ------
    ValueError
        There are neither one nor ``ndim`` values.
    """
    given: list[Any] = list(value) if isinstance(value, Sequence) else [value]
    values: list[int] = [int(each) if isinstance(each, np.integer) else each for each in given]
    if len(values) not in (1, ndim):
        raise ValueError(f"got {len(values)} values, {values}; expected one, or {ndim}")
    return values * ndim if len(values) == 1 else values


def window(kernel_size: Sizes, stride: Sizes | None, ndim: int) -> tuple[list[int], list[int]]:
    """Return a pooling's kernel size and stride, which is the kernel size if None or empty."""
    kernel = per_dimension(kernel_size, ndim)
    if stride is None or (isinstance(stride, Sequence) and not stride):
        return kernel, kernel
    return kernel, per_dimension(stride, ndim)


def autocast(*tensors: Tensor | None) -> list[Any]:
    """Cast tensors to autocast's dtype as PyTorch does: float64 and integers stay as they are."""
    found: list[Any] = []
    for tensor in tensors:
        if (
            tensor is not None
            and torch.is_autocast_enabled(tensor.device.type)
            and tensor.is_floating_point()
            and tensor.dtype is not torch.float64
        ):
            tensor = tensor.to(torch.get_autocast_dtype(tensor.device.type))
        found.append(tensor)
    return found


def batched(input: Tensor, ndim: int) -> tuple[Tensor, bool]:
    """Return the input with a batch dimension, and whether that had to be added."""
    if input.dim() == ndim + 1:
        return input.unsqueeze(0), True
    if input.dim() != ndim + 2:
        raise ValueError(
            f"input has shape {tuple(input.shape)}; expected {ndim + 2} dimensions, "
            f"or {ndim + 1} without a batch"
        )
    return input, False


def numeric_padding(
    input: Tensor, padding: Sizes | str, weight: Tensor, stride: list[int], dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """Return an input and numeric padding equivalent to ``padding``, e.g. "same"."""
    if not isinstance(padding, str):
        return input, per_dimension(padding, len(stride))
    if padding == "valid":
        return input, [0] * len(stride)
    if padding != "same":
        raise ValueError(f"padding is {padding!r}; expected 'valid', 'same' or numbers")
    if any(step != 1 for step in stride):
        raise ValueError(f"padding='same' with stride {tuple(stride)}; expected stride 1")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    uneven = [0] * (2 * len(total))
    for dim, each in enumerate(total):
        # As in PyTorch, odd padding has one more zero after the input than before it.
        uneven[2 * (len(total) - 1 - dim) + 1] = each % 2
    if any(uneven):
        input = torch.nn.functional.pad(input, uneven)
    return input, [each // 2 for each in total]


conv1d, conv2d, conv3d = map(_make_conv, (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_make_conv_transpose, (1, 2, 3))
max_pool1d, max_pool2d, max_pool3d = map(_make_max_pool, (1, 2, 3))
