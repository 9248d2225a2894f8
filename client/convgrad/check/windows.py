"""Average pooling, adaptive pooling and max unpooling in float64.

A window is a product of ranges, one per spatial dimension, so sums over windows and their adjoints
are computed one dimension at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import lcm, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import convgrad.check.layouts as layouts
from convgrad.check.bounds import Float, Reference
from convgrad.check.convolve import Convolver
from convgrad.check.geometry import pairs, per_dimension
from convgrad.check.layouts import Seen
from convgrad.check.pooling import pool_geometry, routed
from convgrad.check.references import Parameters, Span, Target, Tensors, spans_of, spatial

__all__ = ["WINDOW_TARGETS", "routed_target"]

Array = NDArray[Any]
Ints = NDArray[np.int64]

_DIVIDES = "the sums are divided, and quotients are rounded"
_MAXIMUM = "a maximum is not linear"
_COPIES = "elements are copied, each of which must be equal"
# Roundings besides additions: one division forward; reciprocals and their products backward.
_FORWARD_TERMS, _BACKWARD_TERMS = 1, 6


@dataclass(frozen=True)
class _Ranges:
    """The windows along one dimension: output o reads input positions start[o] to stop[o] - 1.

    ``counts`` is the contribution of each window to the divisor of an average.
    """

    start: Ints
    stop: Ints
    counts: Ints

    @property
    def sizes(self) -> Ints:
        return self.stop - self.start

    def offsets(self) -> Any:
        """Yield, per window offset, the outputs whose window contains it and their inputs."""
        for offset in range(int(self.sizes.max(initial=0))):
            outputs = np.flatnonzero(self.sizes > offset)
            yield outputs, self.start[outputs] + offset


def _sliding(parameters: Parameters, input_size: Sequence[int]) -> list[_Ranges]:
    geometry = pool_geometry(parameters, input_size)
    padding = pairs(parameters.get("padding", 0), len(input_size))
    found = []
    for size, out, k, s, (before, after) in zip(
        input_size,
        geometry.output_size,
        geometry.kernel_size,
        geometry.stride,
        padding,
        strict=True,
    ):
        start = np.arange(out) * s - before
        # With ceil_mode a window may extend past the padding; positions there never count.
        stop = np.minimum(start + k, size + after)
        inside = _Ranges(np.maximum(start, 0), np.minimum(stop, size), stop - start)
        if not parameters.get("count_include_pad", True):
            inside = _Ranges(inside.start, inside.stop, inside.sizes)
        found.append(inside)
    return found


def _adaptive(output_size: Any, input_size: Sequence[int]) -> list[_Ranges]:
    ndim = len(input_size)
    wanted = (output_size,) * ndim if isinstance(output_size, int) else tuple(output_size)
    found = []
    for size, asked in zip(input_size, wanted, strict=True):
        out = size if asked is None else int(asked)
        o = np.arange(out)
        start, stop = o * size // out, -(-(o + 1) * size // out)
        found.append(_Ranges(start, stop, stop - start))
    return found


def _along(axis: int, ndim: int, index: Any) -> tuple[Any, ...]:
    """Return an index that selects along one of the last ``ndim`` axes."""
    return (..., index, *(slice(None),) * (ndim - 1 - axis))


def _window_sums(x: Float, windows: Sequence[_Ranges]) -> Float:
    for axis, ranges in enumerate(windows):
        shape = list(x.shape)
        shape[axis - len(windows)] = len(ranges.start)
        summed = np.zeros(shape)
        for outputs, inputs in ranges.offsets():
            summed[_along(axis, len(windows), outputs)] += x[_along(axis, len(windows), inputs)]
        x = summed
    return x


def _window_sums_adjoint(y: Float, windows: Sequence[_Ranges], size: Sequence[int]) -> Float:
    for axis, ranges in enumerate(windows):
        shape = list(y.shape)
        shape[axis - len(windows)] = size[axis]
        spread = np.zeros(shape)
        for outputs, inputs in ranges.offsets():
            # Adaptive windows may overlap, so indices can repeat.
            np.add.at(
                spread, _along(axis, len(windows), inputs), y[_along(axis, len(windows), outputs)]
            )
        y = spread
    return y


def _outer(vectors: Sequence[Ints]) -> Ints:
    return reduce(np.multiply.outer, vectors)


def _divisors(windows: Sequence[_Ranges], parameters: Parameters) -> Ints:
    override = parameters.get("divisor_override")
    counts = _outer([ranges.counts for ranges in windows])
    return counts if override is None else np.full_like(counts, int(override))


def _see(layout: str | None) -> Any:
    def see(array: Array) -> Seen:
        return layouts.activation(array, layout, 1)

    return see


def _average(x: Array, windows: list[_Ranges], p: Parameters, see: Any) -> list[Target]:
    divisors = _divisors(windows, p)
    shape = (*x.shape[:3], *divisors.shape)
    terms = _outer([ranges.sizes for ranges in windows]) + _FORWARD_TERMS

    @np.errstate(all="ignore")
    def part(span: Span) -> Reference:
        some = x[slice(*span)].astype(np.float64)
        value = _window_sums(some, windows) / divisors
        magnitude = _window_sums(np.abs(some), windows) / np.abs(divisors)
        return Reference(value, magnitude, np.broadcast_to(terms, value.shape))

    spans = spans_of(shape[0], prod(x.shape[1:]))

    def adjoint(z: Float) -> float:
        total = 0.0
        for cut in (slice(*span) for span in spans):
            back = _window_sums_adjoint(z[cut] / divisors, windows, x.shape[3:])
            total += float((x[cut].astype(np.float64) * back).sum())
        return total

    return [Target("output", see, spans, part, None, adjoint, why_not_exact=_DIVIDES, shape=shape)]


def _average_gradient(
    y: Array, windows: list[_Ranges], size: Sequence[int], p: Parameters, see: Any
) -> list[Target]:
    divisors = _divisors(windows, p)
    # Use a common divisor, so that sums of integers are exact and divided only once, at the end.
    common = lcm(*(int(each) for each in np.unique(divisors)))
    shape = (*y.shape[:3], *size)
    ones = np.ones(divisors.shape)
    terms = _window_sums_adjoint(ones, windows, size).astype(np.int64) + _BACKWARD_TERMS

    @np.errstate(all="ignore")
    def part(span: Span) -> Reference:
        some = y[slice(*span)].astype(np.float64) * (common // divisors)
        value = _window_sums_adjoint(some, windows, size) / common
        magnitude = _window_sums_adjoint(np.abs(some), windows, size) / abs(common)
        return Reference(value, magnitude, np.broadcast_to(terms, value.shape))

    spans = spans_of(shape[0], prod(shape[1:]))

    def adjoint(z: Float) -> float:
        total = 0.0
        for cut in (slice(*span) for span in spans):
            averages = _window_sums(z[cut], windows) / divisors
            total += float((y[cut].astype(np.float64) * averages).sum())
        return total

    return [
        Target("grad_input", see, spans, part, None, adjoint, why_not_exact=_DIVIDES, shape=shape)
    ]


def _avg_pool_fwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    x = see(t["input"]).array
    return _average(x, _sliding(p, x.shape[3:]), p, see)


def _adaptive_avg_pool_fwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    x = see(t["input"]).array
    return _average(x, _adaptive(p["output_size"], x.shape[3:]), p, see)


def _avg_pool_bwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    y = see(t["grad_output"]).array
    size = spatial(p["input_size"], y.ndim - 3, p.get("layout"))
    return _average_gradient(y, _sliding(p, size), size, p, see)


def _adaptive_avg_pool_bwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    y = see(t["grad_output"]).array
    size = spatial(p["input_size"], y.ndim - 3, p.get("layout"))
    return _average_gradient(y, _adaptive(y.shape[3:], size), size, p, see)


def _maxima(x: Array, windows: Sequence[_Ranges]) -> tuple[Float, Ints]:
    """Return the maximum of each window and its flat index: the first maximum, or the last NaN."""
    size = x.shape[3:]
    shape = (*x.shape[:3], *(len(ranges.start) for ranges in windows))
    best, index = np.zeros(shape), np.zeros(shape, np.int64)
    plane = np.arange(prod(size)).reshape(size)
    for o in np.ndindex(shape[3:]):
        part: tuple[Any, ...] = tuple(
            slice(int(ranges.start[at]), int(ranges.stop[at]))
            for ranges, at in zip(windows, o, strict=True)
        )
        values = x[(slice(None),) * 3 + part].astype(np.float64).reshape(*shape[:3], -1)
        nans = np.isnan(values)
        last_nan = values.shape[-1] - 1 - nans[..., ::-1].argmax(axis=-1)
        chosen = np.where(nans.any(axis=-1), last_nan, values.argmax(axis=-1))
        best[(..., *o)] = np.take_along_axis(values, chosen[..., None], axis=-1)[..., 0]
        index[(..., *o)] = plane[part].reshape(-1)[chosen]
    return best, index


def _selected(value: Float) -> Reference:
    """Make the reference of copied elements, which are not rounded."""
    return Reference(value, np.zeros_like(value), np.zeros(value.shape, np.int64))


def _adaptive_max_pool_fwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    x = see(t["input"]).array
    windows = _adaptive(p["output_size"], x.shape[3:])
    shape = (*x.shape[:3], *(len(ranges.start) for ranges in windows))
    spans = spans_of(shape[0], prod(x.shape[1:]))

    def values(span: Span) -> Reference:
        return _selected(_maxima(x[slice(*span)], windows)[0])

    def indices(span: Span) -> Reference:
        return _selected(_maxima(x[slice(*span)], windows)[1].astype(np.float64))

    found = [Target("output", see, spans, values, why_no_adjoint=_MAXIMUM, shape=shape)]
    if p.get("return_indices"):
        found.append(replace(found[0], name="indices", part=indices, is_integer=True))
    return found


def routed_target(
    see: Any, y: Array, routes: Callable[[slice], Ints], size: Sequence[int]
) -> Target:
    """Make the target of a max pooling's gradient; ``routes`` returns the maxima of some samples.

    ``y`` is the output's gradient and ``size`` the spatial size of the input.
    """
    shape = (*y.shape[:3], *size)
    spans = spans_of(shape[0], prod(shape[1:]))

    def part(span: Span) -> Reference:
        cut = slice(*span)
        return routed(y[cut], routes(cut), size)

    def adjoint(z: Float) -> float:
        total = 0.0
        for cut in (slice(*span) for span in spans):
            where = routes(cut)
            planes = prod(where.shape[:3])
            taken = np.take_along_axis(
                z[cut].reshape(planes, -1), where.reshape(planes, -1), axis=1
            )
            total += float((y[cut].astype(np.float64) * taken.reshape(where.shape)).sum())
        return total

    return Target("grad_input", see, spans, part, None, adjoint, shape=shape)


def _adaptive_max_pool_bwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    y = see(t["grad_output"]).array
    given = t.get("indices")
    if given is not None:
        index = see(given).array
        size = spatial(p["input_size"], y.ndim - 3, p.get("layout"))
    else:
        x = see(t["input"]).array
        size = x.shape[3:]
        windows = _adaptive(y.shape[3:], size)

    def routes(cut: slice) -> Ints:
        return _maxima(x[cut], windows)[1] if given is None else index[cut].astype(np.int64)

    return [routed_target(see, y, routes, size)]


def _unpooled_size(p: Parameters, input_size: Sequence[int]) -> tuple[int, ...]:
    ndim = len(input_size)
    if p.get("output_size") is not None:
        return spatial(p["output_size"], ndim, p.get("layout"))
    kernel = per_dimension(p["kernel_size"], ndim)
    stated = p.get("stride")
    stride = kernel if stated is None else per_dimension(stated, ndim)
    padding = per_dimension(p.get("padding", 0), ndim)
    return tuple(
        (size - 1) * s + k - 2 * pad
        for size, k, s, pad in zip(input_size, kernel, stride, padding, strict=True)
    )


def _max_unpool_fwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    x, index = see(t["input"]).array, see(t["indices"]).array
    size = _unpooled_size(p, x.shape[3:])
    shape = (*x.shape[:3], *size)

    def part(span: Span) -> Reference:
        some, where = x[slice(*span)], index[slice(*span)].astype(np.int64)
        planes, each = prod(some.shape[:3]), prod(size)
        flat = (where.reshape(planes, -1) + np.arange(planes)[:, None] * each).reshape(-1)
        value = np.zeros(planes * each)
        value[flat] = some.astype(np.float64).reshape(-1)  # the last of equal indices wins
        return _selected(value.reshape(*some.shape[:3], *size))

    spans = spans_of(shape[0], prod(shape[1:]))
    return [Target("output", see, spans, part, why_no_adjoint=_COPIES, shape=shape)]


def _max_unpool_bwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    see = _see(p.get("layout"))
    y, index = see(t["grad_output"]).array, see(t["indices"]).array
    shape = index.shape

    def part(span: Span) -> Reference:
        some, where = y[slice(*span)], index[slice(*span)].astype(np.int64)
        planes = prod(some.shape[:3])
        value = np.take_along_axis(some.reshape(planes, -1), where.reshape(planes, -1), axis=1)
        return _selected(value.astype(np.float64).reshape(where.shape))

    spans = spans_of(shape[0], prod(y.shape[1:]))
    return [Target("grad_input", see, spans, part, why_no_adjoint=_COPIES, shape=shape)]


WINDOW_TARGETS: Mapping[str, Any] = {
    "avg_pool_fwd": _avg_pool_fwd,
    "avg_pool_bwd": _avg_pool_bwd,
    "adaptive_avg_pool_fwd": _adaptive_avg_pool_fwd,
    "adaptive_avg_pool_bwd": _adaptive_avg_pool_bwd,
    "adaptive_max_pool_fwd": _adaptive_max_pool_fwd,
    "adaptive_max_pool_bwd": _adaptive_max_pool_bwd,
    "max_unpool_fwd": _max_unpool_fwd,
    "max_unpool_bwd": _max_unpool_bwd,
}
"""Functions that make the targets of an operation, as in `convgrad.check.operations.TARGETS`."""
