"""The operations in float64, directly from their definitions, with loops over every tap.

Deliberately slow and simple, because the server's answers are checked against it; it shares no
code with the server. Arrays are channels first, (N, C, ...) and (K, C/groups, ...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Convolution", "MaxPool", "Windows", "fractal_z_3d", "ndc1hwc0"]

Array = NDArray[np.float64]
Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Convolution:
    """The geometry of a convolution; padding is a (before, after) pair per dimension.

    Input coordinate i and output coordinate o meet at tap r if
    i = o * stride + r * dilation - padding_before and i is inside the input.
    """

    stride: Ints
    padding: tuple[tuple[int, int], ...]
    dilation: Ints
    groups: int = 1

    def output_size(self, input_size: Ints, kernel: Ints) -> Ints:
        return tuple(
            (extent + sum(pad) - dilation * (taps - 1) - 1) // stride + 1
            for extent, taps, stride, pad, dilation in zip(
                input_size, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    def _meetings(
        self, input_size: Ints, kernel: Ints, output_size: Ints
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Yield every (i, r, o) that meets, as indices into the trailing dimensions."""
        before = [pad[0] for pad in self.padding]
        for o in product(*map(range, output_size)):
            for r in product(*map(range, kernel)):
                place = zip(o, self.stride, r, self.dilation, before, strict=True)
                i = tuple(a * s + b * d - p for a, s, b, d, p in place)
                if all(0 <= at < extent for at, extent in zip(i, input_size, strict=True)):
                    yield (..., *i), (..., *r), (..., *o)

    def _split(self, activation: Array) -> Array:
        """(N, C, ...) → (N, G, C/G, ...)."""
        batch, channels, *size = activation.shape
        return activation.reshape(batch, self.groups, channels // self.groups, *size)

    def _split_weight(self, weight: Array) -> Array:
        """(K, C/G, ...) → (G, K/G, C/G, ...)."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, *weight.shape[1:])

    def forward(self, input: Array, weight: Array) -> Array:
        x, w = self._split(input), self._split_weight(weight)
        size, kernel = input.shape[2:], weight.shape[2:]
        out_size = self.output_size(size, kernel)
        output = np.zeros((len(x), self.groups, w.shape[1], *out_size))
        for i, r, o in self._meetings(size, kernel, out_size):
            output[o] += np.einsum("ngc,gkc->ngk", x[i], w[r])
        return output.reshape(len(x), weight.shape[0], *out_size)

    def grad_input(self, grad_output: Array, weight: Array, input_size: Ints) -> Array:
        g, w = self._split(grad_output), self._split_weight(weight)
        out_size, kernel = grad_output.shape[2:], weight.shape[2:]
        grad = np.zeros((len(g), self.groups, w.shape[2], *input_size))
        for i, r, o in self._meetings(input_size, kernel, out_size):
            grad[i] += np.einsum("ngk,gkc->ngc", g[o], w[r])
        return grad.reshape(len(g), -1, *input_size)

    def grad_weight(self, input: Array, grad_output: Array, kernel: Ints) -> Array:
        x, g = self._split(input), self._split(grad_output)
        grad = np.zeros((self.groups, g.shape[2], x.shape[2], *kernel))
        for i, r, o in self._meetings(input.shape[2:], kernel, grad_output.shape[2:]):
            grad[r] += np.einsum("ngk,ngc->gkc", g[o], x[i])
        return grad.reshape(grad_output.shape[1], x.shape[2], *kernel)


@dataclass(frozen=True, slots=True)
class MaxPool:
    """The geometry of a max pooling with symmetric padding."""

    kernel: Ints
    stride: Ints
    padding: Ints

    def forward(self, input: Array) -> tuple[Array, NDArray[np.int64]]:
        """Return the maxima and their flat indices in each (n, c) plane; the first wins a tie."""
        size = input.shape[2:]
        out_size = tuple(
            (extent + 2 * pad - taps) // stride + 1
            for extent, taps, stride, pad in zip(
                size, self.kernel, self.stride, self.padding, strict=True
            )
        )
        output = np.zeros((*input.shape[:2], *out_size))
        indices = np.zeros(output.shape, dtype=np.int64)
        places = np.arange(np.prod(size)).reshape(size)
        for o in product(*map(range, out_size)):
            window: Any = tuple(
                slice(max(0, a * s - p), a * s - p + k)
                for a, s, p, k in zip(o, self.stride, self.padding, self.kernel, strict=True)
            )
            values = input[(slice(None), slice(None), *window)].reshape(*input.shape[:2], -1)
            first = values.argmax(axis=2)
            here: Any = (..., *o)
            indices[here] = places[window].reshape(-1)[first]
            output[here] = values.max(axis=2)
        return output, indices

    def grad_input(self, grad_output: Array, indices: NDArray[np.int64], input_size: Ints) -> Array:
        """Add every gradient to the position of its maximum."""
        batch, channels = grad_output.shape[:2]
        grad = np.zeros((batch, channels, int(np.prod(input_size))))
        for n, c in product(range(batch), range(channels)):
            np.add.at(grad[n, c], indices[n, c].reshape(-1), grad_output[n, c].reshape(-1))
        return grad.reshape(batch, channels, *input_size)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a pooling: per dimension, (start, stop, divisor) of every output."""

    axes: tuple[tuple[tuple[int, int, int], ...], ...]

    @classmethod
    def sliding(cls, size: Ints, kernel: Ints, stride: Ints, padding: Ints) -> Windows:
        """Make the windows of average pooling that counts the padding."""
        axes = []
        for extent, taps, step, pad in zip(size, kernel, stride, padding, strict=True):
            starts = [o * step - pad for o in range((extent + 2 * pad - taps) // step + 1)]
            axes.append(tuple((max(0, a), min(extent, a + taps), taps) for a in starts))
        return cls(tuple(axes))

    @classmethod
    def adaptive(cls, size: Ints, output_size: Ints) -> Windows:
        axes = []
        for extent, out in zip(size, output_size, strict=True):
            bounds = [(o * extent // out, -(-(o + 1) * extent // out)) for o in range(out)]
            axes.append(tuple((start, stop, stop - start) for start, stop in bounds))
        return cls(tuple(axes))

    @property
    def output_size(self) -> Ints:
        return tuple(map(len, self.axes))

    def each(self) -> Iterator[tuple[Any, Any, int]]:
        """Yield (output index, input slices, divisor), for the trailing dimensions."""
        for o in product(*map(range, self.output_size)):
            chosen = [axis[at] for axis, at in zip(self.axes, o, strict=True)]
            part = (slice(start, stop) for start, stop, _ in chosen)
            yield (..., *o), (..., *part), int(np.prod([size for _, _, size in chosen]))

    def means(self, input: Array) -> Array:
        """Return the mean of each window."""
        output = np.zeros((*input.shape[:2], *self.output_size))
        for o, part, size in self.each():
            output[o] = input[part].reshape(*input.shape[:2], -1).sum(axis=2) / size
        return output

    def spread(self, grad_output: Array, input_size: Ints) -> Array:
        """Return the gradient of `means`: each gradient, divided, is added to its whole window."""
        grad = np.zeros((*grad_output.shape[:2], *input_size))
        for o, part, size in self.each():
            grad[part] += (grad_output[o] / size)[(...,) + (None,) * len(input_size)]
        return grad

    def maxima(self, input: Array) -> tuple[Array, NDArray[np.int64]]:
        """Return the maximum of each window and its flat index; the first wins a tie."""
        output = np.zeros((*input.shape[:2], *self.output_size))
        indices = np.zeros(output.shape, dtype=np.int64)
        places = np.arange(np.prod(input.shape[2:])).reshape(input.shape[2:])
        for o, part, _ in self.each():
            values = input[part].reshape(*input.shape[:2], -1)
            output[o] = values.max(axis=2)
            indices[o] = places[part[1:]].reshape(-1)[values.argmax(axis=2)]
        return output, indices


def ndc1hwc0(array: NDArray[Any], c0: int) -> NDArray[Any]:
    """(N, C, D, H, W) → (N, D, C1, H, W, C0), channels padded with zeros."""
    batch, channels, *size = array.shape
    c1 = -(-channels // c0)
    padded = np.zeros((batch, c1 * c0, *size), dtype=array.dtype)
    padded[:, :channels] = array
    return np.ascontiguousarray(padded.reshape(batch, c1, c0, *size).transpose(0, 3, 1, 4, 5, 2))


def fractal_z_3d(weight: NDArray[Any], c0: int) -> NDArray[Any]:
    """(K, C, D, H, W) → (D*C1*H*W, N1, N0, C0) with N0 = 16, K and C padded with zeros."""
    n0 = 16
    outputs, channels, *kernel = weight.shape
    n1, c1 = -(-outputs // n0), -(-channels // c0)
    padded = np.zeros((n1 * n0, c1 * c0, *kernel), dtype=weight.dtype)
    padded[:outputs, :channels] = weight
    blocks = padded.reshape(n1, n0, c1, c0, *kernel).transpose(4, 2, 5, 6, 0, 1, 3)
    return np.ascontiguousarray(blocks).reshape(-1, n1, n0, c0)
