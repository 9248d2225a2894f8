"""Convolutions with the signatures of ``jax.lax``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from convgrad.dtypes import FLOATING
from convgrad.jax._backends import Backend, chosen_backend
from convgrad.jax._conv_passes import Convolution, forward, gradient_of_input

__all__ = ["check_dtype", "conv_general_dilated", "layout_name"]

Array: TypeAlias = jax.Array
Pads = tuple[tuple[int, int], ...]
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
    *,
    backend: Backend | None = None,
) -> Array:
    """Convolution in 1D to 3D, as ``jax.lax.conv_general_dilated``.

    Channels-last operands (NHWC) are computed in that layout, others in NCHW.

    Parameters
    ----------
    lhs, rhs : Array
        The input and the weight, in the order of ``dimension_numbers``: float16, bfloat16, float32
        or float64, both the same.
    window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count, \
batch_group_count
        As ``jax.lax.conv_general_dilated`` takes them.
    precision : lax.PrecisionLike
        ``HIGH``, ``DEFAULT`` and algorithms of TF32 or bfloat16 let a GPU use TF32 for float32;
        others and None do not.
    preferred_element_type : dtype, optional
        The result's dtype, by default the operands'. The operands are
        converted to it first. Sums are in float32 or wider in any case.
    out_sharding : None
        Must be None.
    backend : Backend, optional
        What computes; by default this process's `Local`. ``jit`` treats it as a constant.

    Returns
    -------
    Array
        In the order of ``dimension_numbers``.

    Raises
    ------
    TypeError, ValueError
        The operands contradict each other, as ``jax.lax.conv_general_dilated`` reports it, or an
        argument has a value that convgrad does not compute.
    jax.errors.JaxRuntimeError
        The backend failed; the message holds its error.
    """
    check_dtype(lhs)
    if out_sharding is not None:
        raise ValueError(f"out_sharding is {out_sharding}; expected None")
    ndim = lhs.ndim - 2
    if ndim not in _SPATIAL:
        raise ValueError(f"lhs has {lhs.ndim} dimensions; expected 3, 4 or 5")
    as_laxs = partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        preferred_element_type=preferred_element_type,
    )
    expected = jax.eval_shape(as_laxs, lhs, rhs)
    if 0 in (lhs.size, rhs.size, expected.size):
        return as_laxs(lhs, rhs)
    check_dtype(expected)
    fast = _precision(precision)
    if expected.dtype != lhs.dtype:
        if lhs.dtype.itemsize == 2:
            fast = "high"  # TF32 has all bits of a 16-bit operand
        lhs, rhs = lhs.astype(expected.dtype), rhs.astype(expected.dtype)

    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if batch_group_count != 1:
        lhs = _with_channel_groups(lhs, numbers.lhs_spec, batch_group_count)
        feature_group_count = batch_group_count
    last = numbers.lhs_spec[0] == 0 and numbers.lhs_spec[1] == ndim + 1
    orders = [_dimension_order(spec, last) for spec in numbers]
    x, weight = jnp.transpose(lhs, orders[0]), jnp.transpose(rhs, orders[1])
    lhs_dilation = tuple(lhs_dilation or (1,) * ndim)
    dilation = tuple(rhs_dilation or (1,) * ndim)
    spatial = slice(1, -1) if last else slice(2, None)
    kernel = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[spatial], strict=True)]
    pads = (
        lax.padtype_to_pads(x.shape[spatial], kernel, window_strides, padding)
        if isinstance(padding, str)
        else padding
    )
    conv = Convolution(
        chosen_backend(backend),
        tuple(window_strides),
        tuple((before, after) for before, after in pads),
        dilation,
        feature_group_count,
        fast,
        layout_name(ndim, last),
        x.shape,
        weight.shape,
        tuple(expected.shape[axis] for axis in orders[2]),
    )
    dilated = max(lhs_dilation) > 1
    transposed = _transposed_padding(conv, lhs_dilation, kernel) if dilated else None
    if transposed is not None:
        # The input's gradient of a convolution with that stride, which reads no zeros in between.
        weight = _transposed_weight(weight, conv)
        conv = replace(
            conv,
            stride=lhs_dilation,
            padding=transposed,
            input_shape=conv.output_shape,
            weight_shape=weight.shape,
            output_shape=x.shape,
        )
        y = gradient_of_input(conv, x, weight)
    else:
        if dilated or min(map(min, conv.padding)) < 0:
            x = _padded(x, conv, lhs_dilation)
            conv = replace(conv, padding=((0, 0),) * ndim, input_shape=x.shape)
        y = forward(conv, x, weight)
    return jnp.transpose(y, np.argsort(orders[2]))


def layout_name(ndim: int, channels_last: bool) -> str:
    """Return the contract's name for a layout, e.g. ``NHWC``."""
    return f"N{_SPATIAL[ndim]}C" if channels_last else f"NC{_SPATIAL[ndim]}"


def check_dtype(array: Array | jax.ShapeDtypeStruct) -> None:
    """Check that the contract has the array's dtype.

    Raises
    ------
    TypeError
        It has not.
    """
    if str(array.dtype) not in FLOATING:
        raise TypeError(f"dtype is {array.dtype}; expected one of {', '.join(sorted(FLOATING))}")


def _dimension_order(spec: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    """The axes of an operand, given as (batch, features, *spatial), in the layout's order.

    Of a weight they are (output features, input features, *spatial).
    """
    batch, features, *spatial = spec
    return (batch, *spatial, features) if channels_last else (batch, features, *spatial)


def _with_channel_groups(lhs: Array, spec: Sequence[int], count: int) -> Array:
    """An input whose groups of images became groups of channels; ``spec`` is its order."""
    images = jnp.moveaxis(lhs, spec[:2], (0, 1))
    batch, channels, *spatial = images.shape
    grouped = jnp.swapaxes(images.reshape(count, batch // count, channels, *spatial), 0, 1)
    merged = grouped.reshape(batch // count, count * channels, *spatial)
    return jnp.moveaxis(merged, (0, 1), spec[:2])


def _precision(precision: Any) -> str:
    operands = precision if isinstance(precision, tuple) else (precision,)
    return "high" if all(map(_allows_tf32, operands)) else "highest"


def _allows_tf32(precision: Any) -> bool:
    """Return whether this precision lets products of float32 be computed in TF32."""
    if isinstance(precision, str) and precision in lax.DotAlgorithmPreset.__members__:
        precision = lax.DotAlgorithmPreset[precision]
    if isinstance(precision, lax.DotAlgorithmPreset):
        fast = lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.BF16_BF16_F32
        return precision in (*fast, lax.DotAlgorithmPreset.DEFAULT)
    if precision is None or isinstance(precision, lax.DotAlgorithm):
        return False
    return lax.Precision(precision) in (lax.Precision.HIGH, lax.Precision.DEFAULT)


def _padded(x: Array, conv: Convolution, lhs_dilation: Sequence[int]) -> Array:
    """The input with its padding, which may be negative, and its dilation applied."""
    spatial = [(*pair, step - 1) for pair, step in zip(conv.padding, lhs_dilation, strict=True)]
    none = (0, 0, 0)
    config = [none, *spatial, none] if conv.channels_last else [none, none, *spatial]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _transposed_padding(
    conv: Convolution, lhs_dilation: Sequence[int], kernel: Sequence[int]
) -> Pads | None:
    """The padding of the convolution that has ``conv`` of a dilated input as its input's gradient.

    None if there is no such convolution. ``kernel`` holds the extents of the dilated kernel.
    """
    padding = []
    for stride, (before, after), step, extent in zip(
        conv.stride, conv.padding, lhs_dilation, kernel, strict=True
    ):
        if stride > 1 or before >= extent or after - extent >= step - 1:
            return None
        padding.append((extent - 1 - before, max(extent - 1 - after, 0)))
    return tuple(padding)


def _transposed_weight(weight: Array, conv: Convolution) -> Array:
    """The weight flipped in space, with input and output channels exchanged in each group."""
    ndim = len(conv.stride)
    first, channels = (1, -1) if conv.channels_last else (2, 2)
    flipped = jnp.flip(weight, range(first, first + ndim))
    outputs, *rest = flipped.shape
    groups = flipped.reshape((conv.groups, outputs // conv.groups, *rest))
    exchanged = jnp.swapaxes(groups, 1, channels)
    return exchanged.reshape((-1, *exchanged.shape[2:]))
