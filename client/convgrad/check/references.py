"""float64 references of every operation's outputs, computed in parts.

A `Target` is one output. It computes its reference part by part along its first axis, so that a
large layer needs only the memory of a few samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import convgrad.check.layouts as layouts
from convgrad.check.bounds import Float, Reference
from convgrad.check.convolve import Convolver, wide
from convgrad.check.geometry import Geometry
from convgrad.check.layouts import Seen

__all__ = ["Conv", "Linear", "Target", "Targets", "kernel_of", "spans_of", "spatial"]

Array = NDArray[Any]
Tensors = Mapping[str, Array]
Parameters = Mapping[str, Any]
Span = tuple[int, int]

# Number of float64 elements in the largest array of a part.
PART_ELEMENTS = 2**19


@dataclass(frozen=True)
class Linear:
    """The operands of an output that is a sum of products, for its terms and its adjoint.

    ``kind`` is forward, backward_data or backward_weight. The operands have a separate group
    axis: an activation (or output gradient) and a weight, or for backward_weight an input and an
    output gradient.
    """

    kind: str
    first: Array
    second: Array
    geometry: Geometry
    scale: float = 1.0
    added: Array | None = None
    """An addend of the sum, already scaled and broadcastable to its shape."""


@dataclass(frozen=True)
class Target:
    """One output: how to view a result, and its reference in parts.

    ``part`` computes the reference of one of the ``spans`` of the first axis. The elements of an
    integer output must be equal to the reference.
    """

    name: str
    see: Callable[[Array], Seen]
    spans: tuple[Span, ...]
    part: Callable[[Span], Reference]
    linear: Linear | None = None
    adjoint: Callable[[Float], float] | None = None
    """Returns <output, z> as the adjoint operation computes it from z, if ``linear`` is None."""
    why_no_adjoint: str = ""
    why_not_exact: str = ""
    """Why the result is rounded even if all sums are exact; empty if it is not."""
    is_integer: bool = False
    shape: tuple[int, ...] = field(default=())
    """Shape of the `Seen` array."""


Targets = dict[str, Target]


def spans_of(extent: int, each: int) -> tuple[Span, ...]:
    """Split a first axis into parts, given the number of elements in each slice of it."""
    step = max(1, PART_ELEMENTS // max(1, each))
    return tuple((at, min(at + step, extent)) for at in range(0, extent, step))


def _ones(array: Array, ndim: int) -> Float:
    """Reshape (G, K) values for addition to (N, G, K, *spatial)."""
    return array.reshape(1, *array.shape, *(1,) * ndim)


def _counted(terms: NDArray[np.int64], times: int, shape: Sequence[int]) -> NDArray[np.int64]:
    return np.broadcast_to(terms * times, tuple(shape))


class Conv:
    """Makes the targets of a convolution, from tensors with a separate group axis."""

    def __init__(self, tensors: Tensors, parameters: Parameters, convolver: Convolver) -> None:
        self.tensors, self.parameters, self.convolver = tensors, parameters, convolver
        self.layout: str | None = parameters.get("layout")
        self.groups = _groups(tensors, parameters)

    def activation(self, name: str) -> Array:
        return layouts.activation(self.tensors[name], self.layout, self.groups).array

    def weight(self, name: str = "weight") -> Array:
        return layouts.weight(self.tensors[name], self.layout, self.groups).array

    def see_activation(self, array: Array) -> Seen:
        return layouts.activation(array, self.layout, self.groups)

    def see_weight(self, array: Array) -> Seen:
        return layouts.weight(array, self.layout, self.groups)

    def forward(
        self,
        x: Array,
        w: Array,
        name: str = "output",
        output_size: Sequence[int] | None = None,
    ) -> Target:
        """Make the output's target; ``output_size`` overrides the size that the input gives."""
        geometry = Geometry.of(
            self.parameters, w.shape[3:], input_size=x.shape[3:], output_size=output_size
        )
        shape = (*x.shape[:2], w.shape[1], *geometry.output_size)
        bias = self.tensors.get("bias")
        added = None
        if bias is not None:
            added = _ones(wide(bias).reshape(w.shape[:2]), w.ndim - 3)
        terms = geometry.taps_of_outputs() * w.shape[2] + (bias is not None)
        each = max(prod(x.shape[1:]), prod(shape[1:]))

        def part(span: Span) -> Reference:
            found = self.convolver.forward(x[slice(*span)], w, geometry)
            return _with(found, terms, added)

        linear = Linear("forward", x, w, geometry, added=added)
        spans = spans_of(shape[0], each)
        return Target(name, self.see_activation, spans, part, linear, shape=shape)

    def backward_data(
        self, y: Array, w: Array, input_size: Sequence[int] | None, name: str = "grad_input"
    ) -> Target:
        geometry = Geometry.of(
            self.parameters, w.shape[3:], input_size=input_size, output_size=y.shape[3:]
        )
        shape = (*y.shape[:2], w.shape[2], *geometry.input_size)
        alpha, added = self._epilogue(self.see_activation)
        bias = self.tensors.get("bias")
        if bias is not None:  # only for a transposed convolution
            added = _ones(wide(bias).reshape(w.shape[0], w.shape[2]), w.ndim - 3)
        terms = geometry.taps_of_inputs() * w.shape[1]
        terms = terms + (1 if bias is not None else self._epilogue_terms)
        each = max(prod(y.shape[1:]), prod(shape[1:]))

        def part(span: Span) -> Reference:
            found = self.convolver.backward_data(y[slice(*span)], w, geometry)
            own = added[slice(*span)] if added is not None and len(added) == shape[0] else added
            return _with(found, terms, own, alpha)

        linear = Linear("backward_data", y, w, geometry, alpha, added)
        spans = spans_of(shape[0], each)
        return Target(name, self.see_activation, spans, part, linear, shape=shape)

    def backward_weight(self, x: Array, y: Array, kernel: Sequence[int]) -> Target:
        geometry = Geometry.of(
            self.parameters, kernel, input_size=x.shape[3:], output_size=y.shape[3:]
        )
        shape = (x.shape[1], y.shape[2], x.shape[2], *kernel)
        alpha, added = self._epilogue(self.see_weight)
        terms = geometry.outputs_of_taps() * x.shape[0] + self._epilogue_terms

        def part(span: Span) -> Reference:
            value, magnitude = np.zeros(shape), np.zeros(shape)
            for begin, end in spans_of(len(x), max(prod(x.shape[1:]), prod(y.shape[1:]))):
                more = self.convolver.backward_weight(x[begin:end], y[begin:end], geometry)
                value += more[0]
                magnitude += more[1]
            return _with((value, magnitude), terms, added, alpha)

        linear = Linear("backward_weight", x, y, geometry, alpha, added)
        whole = ((0, shape[0]),)
        return Target("grad_weight", self.see_weight, whole, part, linear, shape=shape)

    def grad_bias(self, y: Array) -> Target:
        axes = (0, *range(3, y.ndim))

        def part(span: Span) -> Reference:
            value = np.zeros(y.shape[1] * y.shape[2])
            magnitude = np.zeros_like(value)
            with np.errstate(all="ignore"):
                for begin, end in spans_of(len(y), prod(y.shape[1:])):
                    some = wide(y[begin:end])
                    value += some.sum(axis=axes).reshape(-1)
                    magnitude += np.abs(some).sum(axis=axes).reshape(-1)
            count = prod(y.shape) // len(value)
            return Reference(value, magnitude, np.full(len(value), count, np.int64))

        def adjoint(z: Float) -> float:
            each, total = z.reshape(y.shape[1:3]), 0.0
            for begin, end in spans_of(len(y), prod(y.shape[1:])):
                total += float((wide(y[begin:end]).sum(axis=axes) * each).sum())
            return total

        shape = (y.shape[1] * y.shape[2],)
        return Target(
            "grad_bias", layouts.vector, ((0, shape[0]),), part, adjoint=adjoint, shape=shape
        )

    @property
    def _epilogue_terms(self) -> int:
        return 3 if self.tensors.get("accumulate") is not None or self._alpha_is_said else 0

    @property
    def _alpha_is_said(self) -> bool:
        return "alpha" in self.parameters

    def _epilogue(self, see: Callable[[Array], Seen]) -> tuple[float, Array | None]:
        alpha = float(self.parameters.get("alpha", 1.0))
        accumulate = self.tensors.get("accumulate")
        beta = self.parameters.get("beta")
        beta = 1.0 if beta is None else float(beta)
        if accumulate is None or beta == 0:
            return alpha, None
        with np.errstate(all="ignore"):
            return alpha, beta * wide(see(accumulate).array)


def _with(
    found: tuple[Float, Float], terms: NDArray[np.int64], added: Array | None, scale: float = 1.0
) -> Reference:
    value, magnitude = found
    with np.errstate(all="ignore"):
        if scale != 1.0:
            value, magnitude = scale * value, abs(scale) * magnitude
        if added is not None:
            value, magnitude = value + added, magnitude + np.abs(added)
    return Reference(value, magnitude, np.broadcast_to(terms, value.shape))


def _groups(tensors: Tensors, parameters: Parameters) -> int:
    """Return the number of groups: the parameter, or the G axis of a grouped layout."""
    layout = parameters.get("layout")
    if layout is not None and "G" in layout:
        for name in ("input", "grad_output"):
            if name in tensors:
                return int(tensors[name].shape[layout.index("G")])
    return int(parameters.get("groups", 1))


def spatial(size: Any, ndim: int, layout: str | None = None) -> tuple[int, ...]:
    """Return the spatial size from a spatial size or a full shape in its layout."""
    if len(size) == ndim:
        return tuple(size)
    letters = layout if layout is not None and len(layout) == len(size) else None
    if letters is None:
        return tuple(size)[-ndim:]
    return tuple(extent for letter, extent in zip(letters, size, strict=True) if letter in "DHW")


def kernel_of(size: Any, ndim: int, layout: str | None) -> tuple[int, ...]:
    """Return the kernel size from a spatial size or a weight's full shape in its layout."""
    if len(size) == ndim:
        return tuple(size)
    if layout is not None and layout.endswith("C"):
        return tuple(size)[-1 - ndim : -1]
    return tuple(size)[-ndim:]
