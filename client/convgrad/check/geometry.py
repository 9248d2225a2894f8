"""The geometry of a convolution or pooling: which coordinates meet at which tap.

Input coordinate i and output coordinate o meet at tap r if and only if
i = o*stride + r*dilation - pad_before and both are within their extents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Geometry", "Sizes", "pairs", "per_dimension"]

Sizes = tuple[int, ...]


def per_dimension(value: Any, ndim: int) -> Sizes:
    """Expand one int to all dimensions, or return the given sequence."""
    return (value,) * ndim if isinstance(value, int) else tuple(int(each) for each in value)


def pairs(padding: Any, ndim: int) -> tuple[tuple[int, int], ...]:
    """Return (before, after) for each dimension."""
    each = (padding,) * ndim if isinstance(padding, int) else tuple(padding)
    return tuple((pad, pad) if isinstance(pad, int) else (int(pad[0]), int(pad[1])) for pad in each)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes, stride, padding before, and dilation of each spatial dimension."""

    input_size: Sizes
    output_size: Sizes
    kernel_size: Sizes
    stride: Sizes
    before: Sizes
    dilation: Sizes

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Any],
        kernel: Sequence[int],
        *,
        input_size: Sequence[int] | None = None,
        output_size: Sequence[int] | None = None,
    ) -> Geometry:
        """Make a geometry from a request's parameters and at least one of the sizes.

        The default input size is the smallest that gives the output, plus ``output_padding``.
        """
        ndim = len(kernel)
        stride = per_dimension(parameters.get("stride", 1), ndim)
        padding = pairs(parameters.get("padding", 0), ndim)
        dilation = per_dimension(parameters.get("dilation", 1), ndim)
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        if input_size is None:
            assert output_size is not None  # noqa: S101
            more = per_dimension(parameters.get("output_padding", 0), ndim)
            input_size = [
                (out - 1) * s - sum(pad) + span + extra
                for out, s, pad, span, extra in zip(
                    output_size, stride, padding, reach, more, strict=True
                )
            ]
        if output_size is None:
            output_size = [
                (size + sum(pad) - span) // s + 1
                for size, s, pad, span in zip(input_size, stride, padding, reach, strict=True)
            ]
        before = tuple(pad[0] for pad in padding)
        return cls(tuple(input_size), tuple(output_size), tuple(kernel), stride, before, dilation)

    def taps(self) -> Iterator[Sizes]:
        """Yield all taps in row-major order."""
        return product(*(range(extent) for extent in self.kernel_size))

    def meeting(self, tap: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return the slices of inputs and outputs that meet at a tap, or None."""
        inputs, outputs = [], []
        for axis, r in enumerate(tap):
            first, last = self._span(axis, r)
            if first > last:
                return None
            s = self.stride[axis]
            start = first * s + r * self.dilation[axis] - self.before[axis]
            inputs.append(slice(start, start + (last - first) * s + 1, s))
            outputs.append(slice(first, last + 1))
        return tuple(inputs), tuple(outputs)

    def taps_of_outputs(self) -> NDArray[np.int64]:
        """Count, for each output position, the taps that meet an input."""
        return _outer([self._counts(axis)[0] for axis in range(len(self.kernel_size))])

    def taps_of_inputs(self) -> NDArray[np.int64]:
        """Count, for each input position, the taps that meet an output."""
        return _outer([self._counts(axis)[1] for axis in range(len(self.kernel_size))])

    def outputs_of_taps(self) -> NDArray[np.int64]:
        """Count, for each tap, the outputs that meet an input."""
        return _outer([self._counts(axis)[2] for axis in range(len(self.kernel_size))])

    @property
    def valid_pairs(self) -> int:
        """Count the pairs of tap and output that meet an input."""
        return int(self.outputs_of_taps().sum())

    def _span(self, axis: int, r: int) -> tuple[int, int]:
        """Return the first and last output that meet an input at tap ``r`` of a dimension."""
        s, offset = self.stride[axis], r * self.dilation[axis] - self.before[axis]
        first = max(0, -(offset // s))
        last = min(self.output_size[axis] - 1, (self.input_size[axis] - 1 - offset) // s)
        return first, last

    def _counts(self, axis: int) -> tuple[NDArray[np.int64], ...]:
        of_outputs = np.zeros(self.output_size[axis], np.int64)
        of_inputs = np.zeros(self.input_size[axis], np.int64)
        of_taps = np.zeros(self.kernel_size[axis], np.int64)
        s = self.stride[axis]
        for r in range(self.kernel_size[axis]):
            first, last = self._span(axis, r)
            if first > last:
                continue
            start = first * s + r * self.dilation[axis] - self.before[axis]
            of_outputs[first : last + 1] += 1
            of_inputs[start : start + (last - first) * s + 1 : s] += 1
            of_taps[r] = last - first + 1
        return of_outputs, of_inputs, of_taps


def _outer(vectors: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return reduce(np.multiply.outer, vectors)
