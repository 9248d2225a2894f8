"""The outputs of the poolings and unpoolings as `Target`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import convgrad.check.layouts as layouts
from convgrad.check.bounds import Float, Reference
from convgrad.check.convolve import Convolver
from convgrad.check.geometry import per_dimension
from convgrad.check.pooling import (
    Windows,
    adaptive_windows,
    divisors,
    maxima,
    means,
    routed,
    windows_of,
)
from convgrad.check.references import Maker, Parameters, Target, Tensors, spans_of, spatial
from convgrad.errors import InvalidProblem

__all__ = ["POOLINGS"]

Array = NDArray[Any]


class _Pool:
    """What the outputs of a pooling have in common: tensors seen as (N, 1, C, *spatial)."""

    def __init__(self, t: Tensors, p: Parameters, *, adaptive: bool = False) -> None:
        self.tensors, self.parameters, self._adaptive = t, p, adaptive
        self.layout: str | None = p.get("layout")

    def activation(self, name: str) -> Array:
        return layouts.activation(self.tensors[name], self.layout, 1).array

    def size(self, name: str, ndim: int) -> tuple[int, ...]:
        return spatial(self.parameters[name], ndim, self.layout)

    def windows(self, input_size: Sequence[int], output_size: Any = None) -> Windows:
        if not self._adaptive:
            return windows_of(self.parameters, input_size)
        return adaptive_windows(
            input_size, self.parameters["output_size"] if output_size is None else output_size
        )

    def divisors(self, input_size: Sequence[int], windows: Windows) -> Float:
        if not self._adaptive:
            return divisors(self.parameters, input_size)
        counts = [(table >= 0).sum(axis=1) for table in windows]
        found: Float = reduce(np.multiply.outer, counts).astype(np.float64)
        return found

    def target(
        self,
        name: str,
        shape: tuple[int, ...],
        each: int,
        part: Callable[[slice], Reference],
        *,
        why_not_linear: str,
        why_not_exact: str | None = None,
        is_integer: bool = False,
    ) -> Target:
        """``each`` is how many elements a sample's largest array has."""
        return Target(
            name,
            lambda array: layouts.activation(array, self.layout, 1),
            spans_of(shape[0], max(each, prod(shape[1:]))),
            lambda span: part(slice(*span)),
            why_not_linear=why_not_linear,
            why_not_exact=why_not_exact,
            is_integer=is_integer,
            shape=shape,
        )


def _copied(value: Array) -> Reference:
    """A reference of elements that are copies of inputs: nothing may round."""
    zeros = np.zeros(value.shape)
    return Reference(value.astype(np.float64), zeros, zeros.astype(np.int64))


def _max_fwd(
    t: Tensors, p: Parameters, _: Convolver, __: float, *, adaptive: bool = False
) -> list[Target]:
    pool = _Pool(t, p, adaptive=adaptive)
    x = pool.activation("input")
    windows = pool.windows(x.shape[3:])
    shape = (*x.shape[:3], *map(len, windows))

    def outputs(which: int) -> Callable[[slice], Reference]:
        return lambda cut: _copied(maxima(x[cut], windows)[which])

    each, why = prod(x.shape[1:]), "a maximum is not linear"
    found = [pool.target("output", shape, each, outputs(0), why_not_linear=why)]
    if p.get("return_indices"):
        found.append(
            pool.target("indices", shape, each, outputs(1), why_not_linear=why, is_integer=True)
        )
    return found


def _max_bwd(
    t: Tensors, p: Parameters, _: Convolver, __: float, *, adaptive: bool = False
) -> list[Target]:
    pool = _Pool(t, p, adaptive=adaptive)
    y = pool.activation("grad_output")
    given = t.get("indices") is not None
    source = pool.activation("indices" if given else "input")
    size = pool.size("input_size", y.ndim - 3) if given else source.shape[3:]
    if given:
        _check_indices(source, size)
    windows = pool.windows(size, y.shape[3:])

    def part(cut: slice) -> Reference:
        index = np.ascontiguousarray(source[cut]) if given else maxima(source[cut], windows)[1]
        return routed(y[cut], index, size)

    shape = (*y.shape[:3], *size)
    why = "its adjoint picks elements, and sums nothing"
    return [pool.target("grad_input", shape, prod(y.shape[1:]), part, why_not_linear=why)]


_MEAN = "a mean divides its sum, which rounds"
_NO_CONVOLUTION = "it is no convolution"


def _avg_fwd(
    t: Tensors, p: Parameters, _: Convolver, __: float, *, adaptive: bool = False
) -> list[Target]:
    pool = _Pool(t, p, adaptive=adaptive)
    x = pool.activation("input")
    windows = pool.windows(x.shape[3:])
    by = pool.divisors(x.shape[3:], windows)
    shape, each = (*x.shape[:3], *map(len, windows)), prod(x.shape[1:])

    def part(cut: slice) -> Reference:
        return means(x[cut], windows, by)

    return [
        pool.target(
            "output", shape, each, part, why_not_linear=_NO_CONVOLUTION, why_not_exact=_MEAN
        )
    ]


def _avg_bwd(
    t: Tensors, p: Parameters, _: Convolver, __: float, *, adaptive: bool = False
) -> list[Target]:
    pool = _Pool(t, p, adaptive=adaptive)
    y = pool.activation("grad_output")
    size = pool.size("input_size", y.ndim - 3)
    windows = pool.windows(size, y.shape[3:])
    by = pool.divisors(size, windows)

    def part(cut: slice) -> Reference:
        return means(y[cut], windows, by, size)

    shape, each = (*y.shape[:3], *size), prod(y.shape[1:])
    return [
        pool.target(
            "grad_input", shape, each, part, why_not_linear=_NO_CONVOLUTION, why_not_exact=_MEAN
        )
    ]


def _unpool_fwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    pool = _Pool(t, p)
    x, indices = pool.activation("input"), pool.activation("indices")
    ndim = x.ndim - 3
    if p.get("output_size") is not None:
        size = pool.size("output_size", ndim)
    else:
        kernel = per_dimension(p["kernel_size"], ndim)
        stride = per_dimension(kernel if p.get("stride") is None else p["stride"], ndim)
        padding = per_dimension(p.get("padding", 0), ndim)
        axes = zip(x.shape[3:], kernel, stride, padding, strict=True)
        size = tuple((extent - 1) * s + k - 2 * pad for extent, k, s, pad in axes)
    _check_indices(indices, size)

    def part(cut: slice) -> Reference:
        planes = prod(x[cut].shape[:3])
        value = np.zeros((planes, prod(size)))
        # Of equal indices the last one wins.
        rows = np.arange(planes)[:, None]
        value[rows, indices[cut].reshape(planes, -1)] = x[cut].reshape(planes, -1)
        return _copied(value.reshape(*x[cut].shape[:3], *size))

    shape, each = (*x.shape[:3], *size), prod(x.shape[1:])
    return [pool.target("output", shape, each, part, why_not_linear=_NO_CONVOLUTION)]


def _unpool_bwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    pool = _Pool(t, p)
    y, indices = pool.activation("grad_output"), pool.activation("indices")
    _check_indices(indices, y.shape[3:])

    def part(cut: slice) -> Reference:
        planes, shape = prod(y[cut].shape[:3]), indices[cut].shape
        flat = indices[cut].reshape(planes, -1).astype(np.int64)
        found = np.take_along_axis(y[cut].reshape(planes, -1), flat, axis=1)
        return _copied(found.reshape(shape))

    each = prod(y.shape[1:])
    why = _NO_CONVOLUTION
    return [pool.target("grad_input", indices.shape, each, part, why_not_linear=why)]


def _check_indices(indices: Array, size: Sequence[int]) -> None:
    if indices.size and not 0 <= indices.min() <= indices.max() < prod(size):
        raise InvalidProblem(
            f"indices holds {indices.min()} to {indices.max()}; expected 0 to {prod(size) - 1}, "
            f"positions in planes of {'x'.join(map(str, size))}"
        )


POOLINGS: Mapping[str, Maker] = {
    **{f"maxpool{ndim}d_fwd": _max_fwd for ndim in (1, 2, 3)},
    **{f"maxpool{ndim}d_bwd": _max_bwd for ndim in (1, 2, 3)},
    "adaptive_max_pool_fwd": partial(_max_fwd, adaptive=True),
    "adaptive_max_pool_bwd": partial(_max_bwd, adaptive=True),
    "avg_pool_fwd": _avg_fwd,
    "avg_pool_bwd": _avg_bwd,
    "adaptive_avg_pool_fwd": partial(_avg_fwd, adaptive=True),
    "adaptive_avg_pool_bwd": partial(_avg_bwd, adaptive=True),
    "max_unpool_fwd": _unpool_fwd,
    "max_unpool_bwd": _unpool_bwd,
}
