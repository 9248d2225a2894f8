"""Max and average pooling with the signatures of ``flax.linen``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from convgrad.jax._backends import Backend, chosen_backend
from convgrad.jax._conv import check_dtype, layout_name
from convgrad.jax._operation import Operation

__all__ = ["avg_pool", "max_pool"]

Array: TypeAlias = jax.Array
Shape = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]


def max_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    *,
    channels_last: bool = True,
    backend: Backend | None = None,
) -> Array:
    """Max pooling in 1D to 3D, as ``flax.linen.max_pool``.

    Of equal maxima the first one in the window gets the gradient.

    Parameters
    ----------
    inputs : Array
        (*batch, *spatial, C), or (*batch, C, *spatial), with any number of batch dimensions;
        float16, bfloat16, float32 or float64.
    window_shape, strides : sequence of int
        One value per spatial dimension; strides are 1 by default.
    padding : "SAME", "VALID" or a sequence of (before, after)
        The padding, of minus infinity.
    channels_last : bool
        Whether ``inputs`` is (*batch, *spatial, C).
    backend : Backend, optional
        What computes; by default this process's `Local`. ``jit`` treats it as a constant.

    Returns
    -------
    Array
        In the order of ``inputs``.

    Raises
    ------
    TypeError, ValueError
        The arguments contradict each other.
    jax.errors.JaxRuntimeError
        The backend failed; the message holds its error.
    """
    images, batch = _images(inputs, window_shape)
    pool = _pooling(images, window_shape, strides, padding, channels_last, backend)
    empty = 0 in (*pool.input_shape, *pool.output_shape)
    maxima: Array = pool.maxima(images) if empty else _max_pool(pool, images)
    return maxima.reshape(*batch, *maxima.shape[1:])


def avg_pool(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    count_include_pad: bool = True,
    *,
    channels_last: bool = True,
    backend: Backend | None = None,
) -> Array:
    """Average pooling in 1D to 3D, as ``flax.linen.avg_pool``.

    Parameters
    ----------
    inputs : Array
        (*batch, *spatial, C), or (*batch, C, *spatial), with any number of batch dimensions;
        float16, bfloat16, float32 or float64.
    window_shape, strides : sequence of int
        One value per spatial dimension; strides are 1 by default.
    padding : "SAME", "VALID" or a sequence of (before, after)
        The padding, of zeros.
    count_include_pad : bool
        Whether the padding counts in a window's divisor.
    channels_last : bool
        Whether ``inputs`` is (*batch, *spatial, C).
    backend : Backend, optional
        What computes; by default this process's `Local`. ``jit`` treats it as a constant.

    Returns
    -------
    Array
        In the order of ``inputs``.

    Raises
    ------
    TypeError, ValueError
        The arguments contradict each other.
    jax.errors.JaxRuntimeError
        The backend failed; the message holds its error.
    """
    images, batch = _images(inputs, window_shape)
    pool = _pooling(
        images,
        window_shape,
        strides,
        padding,
        channels_last,
        backend,
        count_include_pad=count_include_pad,
    )
    empty = 0 in (*pool.input_shape, *pool.output_shape)
    means: Array = jnp.zeros(pool.output_shape, inputs.dtype) if empty else _avg_pool(pool, images)
    return means.reshape(*batch, *means.shape[1:])


def _images(inputs: Array, window_shape: Sequence[int]) -> tuple[Array, Shape]:
    """Return the inputs with one batch dimension, and the batch dimensions that they have."""
    count = max(inputs.ndim - len(window_shape) - 1, 0)
    batch, image = inputs.shape[:count], inputs.shape[count:]
    return inputs.reshape(math.prod(batch), *image), batch


@dataclass(frozen=True, slots=True)
class _Pooling:
    """What is static in a pooling; the shapes are those without ``vmap``'s dimensions.

    ``more`` holds the fields of a request that only one kind of pooling has.
    """

    backend: Backend
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Pads
    layout: str
    input_shape: Shape
    output_shape: Shape
    more: tuple[tuple[str, Any], ...]

    @property
    def channels_last(self) -> bool:
        return self.layout.endswith("C")

    def compute(self, name: str, inputs: dict[str, Array], output: str, shape: Shape) -> Array:
        """Compute one operation of the contract on this pooling's tensors."""
        fields = ("kernel_size", "stride", "padding", "layout")
        operation = Operation(
            self.backend,
            name,
            tuple((each, "activation") for each in inputs),
            ((output, "activation", shape),),
            (*((field, getattr(self, field)) for field in fields), *self.more),
            self.channels_last,
        )
        (found,) = operation(*inputs.values())
        return found

    def maxima(self, x: Array) -> Array:
        """Max pooling by JAX itself."""
        return _window_maxima(x, self.kernel_size, self.stride, self.padding, self.channels_last)


def _pooling(
    inputs: Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
    channels_last: bool,
    backend: Backend | None,
    **more: Any,
) -> _Pooling:
    check_dtype(inputs)
    ndim = inputs.ndim - 2
    strides = strides or (1,) * ndim
    if not (1 <= ndim <= 3 and len(window_shape) == len(strides) == ndim):
        raise ValueError(
            f"an image has {inputs.ndim - 1} dimensions with its channels, the window "
            f"{len(window_shape)} and the strides {len(strides)}; expected 2 to 4, and 1 less for "
            "the window and the strides"
        )
    spatial = inputs.shape[1:-1] if channels_last else inputs.shape[2:]
    pairs = (
        lax.padtype_to_pads(spatial, window_shape, strides, padding)
        if isinstance(padding, str)
        else padding
    )
    pads = tuple((before, after) for before, after in pairs)
    for size, pair in zip(window_shape, pads, strict=True):
        if not (min(pair) >= 0 and max(pair) < size):
            raise ValueError(f"padding is {pads}; expected 0 to {size - 1} for a window of {size}")
    maxima = partial(
        _window_maxima,
        window=tuple(window_shape),
        strides=tuple(strides),
        pads=pads,
        channels_last=channels_last,
    )
    return _Pooling(
        chosen_backend(backend),
        tuple(window_shape),
        tuple(strides),
        pads,
        layout_name(ndim, channels_last),
        inputs.shape,
        jax.eval_shape(maxima, inputs).shape,
        tuple(more.items()),
    )


def _window_maxima(
    x: Array, window: Shape, strides: Shape, pads: Pads, channels_last: bool
) -> Array:
    def by_rank(spatial: Any, other: Any) -> tuple[Any, ...]:
        return (other, *spatial, other) if channels_last else (other, other, *spatial)

    lowest = np.array(-np.inf, x.dtype)
    found: Array = lax.reduce_window(
        x, lowest, lax.max, by_rank(window, 1), by_rank(strides, 1), by_rank(pads, (0, 0))
    )
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_pool(pool: _Pooling, x: Array) -> Array:
    ndim = len(pool.stride)
    return pool.compute(f"maxpool{ndim}d_fwd", {"input": x}, "output", pool.output_shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _max_pool_gradient(pool: _Pooling, grad_output: Array, x: Array) -> Array:
    inputs, ndim = {"grad_output": grad_output, "input": x}, len(pool.stride)
    return pool.compute(f"maxpool{ndim}d_bwd", inputs, "grad_input", pool.input_shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _avg_pool(pool: _Pooling, x: Array) -> Array:
    return pool.compute("avg_pool_fwd", {"input": x}, "output", pool.output_shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _avg_pool_gradient(pool: _Pooling, grad_output: Array) -> Array:
    size = ("input_size", pool.input_shape[1:-1] if pool.channels_last else pool.input_shape[2:])
    inputs = {"grad_output": grad_output}
    pool = replace(pool, more=(*pool.more, size))
    return pool.compute("avg_pool_bwd", inputs, "grad_input", pool.input_shape)


_max_pool.defvjp(
    lambda pool, x: (_max_pool(pool, x), x),
    lambda pool, x, g: (_max_pool_gradient(pool, g, x),),
)
_max_pool_gradient.defvjp(
    lambda pool, g, x: (_max_pool_gradient(pool, g, x), x),
    lambda pool, x, c: (jax.jvp(pool.maxima, (x,), (c,))[1], None),
)
_avg_pool.defvjp(
    lambda pool, x: (_avg_pool(pool, x), None),
    lambda pool, _, g: (_avg_pool_gradient(pool, g),),
)
_avg_pool_gradient.defvjp(
    lambda pool, g: (_avg_pool_gradient(pool, g), None),
    lambda pool, _, c: (_avg_pool(pool, c),),
)
