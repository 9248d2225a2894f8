"""The float64 reference: every operation from its definition, in plain loops over taps or windows.

It shares no code with the service. Arrays are channels first, groups inside the channel axis as
PyTorch has them: activations (N, C, *spatial), weights (K, C/groups, *kernel). Everything rests on
one sentence: input coordinate i and output coordinate o meet at tap r exactly when

    i = o*stride + r*dilation - pad_before,    0 <= i < input,    0 <= o < output.

Only pairs that meet are ever multiplied, so an infinity never becomes 0*inf in the padding. Every
result carries what an error bound needs: S, the sum of the magnitudes of its terms, and how
many terms there were, both element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Float, Reference

Sizes = int | Sequence[int]
Padding = int | Sequence[int | Sequence[int]]


def per_dimension(value: Sizes, ndim: int) -> tuple[int, ...]:
    """One int for all dimensions, or one each."""
    return (value,) * ndim if isinstance(value, int) else tuple(value)


def padding_pairs(padding: Padding, ndim: int) -> tuple[tuple[int, int], ...]:
    """(before, after) for each dimension."""
    each = (padding,) * ndim if isinstance(padding, int) else tuple(padding)
    return tuple((p, p) if isinstance(p, int) else (p[0], p[1]) for p in each)


# --- sizes ---------------------------------------------------------------------------------------


def conv_output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sizes, padding: Padding, dilation: Sizes
) -> tuple[int, ...]:
    """Return how many positions the dilated kernel has in the padded input, in steps of stride."""
    n = len(size)
    s, p, d = per_dimension(stride, n), padding_pairs(padding, n), per_dimension(dilation, n)
    return tuple((size[a] + sum(p[a]) - d[a] * (kernel[a] - 1) - 1) // s[a] + 1 for a in range(n))


def smallest_input_size(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    output_padding: Sizes = 0,
) -> tuple[int, ...]:
    """The smallest input that yields an output of this size, plus output_padding."""
    n = len(size)
    s, p, d = per_dimension(stride, n), padding_pairs(padding, n), per_dimension(dilation, n)
    more = per_dimension(output_padding, n)
    return tuple(
        (size[a] - 1) * s[a] - sum(p[a]) + d[a] * (kernel[a] - 1) + 1 + more[a] for a in range(n)
    )


def pool_output_size(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
    ceil_mode: bool,
) -> tuple[int, ...]:
    """PyTorch's rule: ceil_mode rounds up, then drops a window that starts past the input."""
    n = len(size)
    s, p, d = per_dimension(stride, n), padding_pairs(padding, n), per_dimension(dilation, n)
    found = []
    for a in range(n):
        room = size[a] + sum(p[a]) - d[a] * (kernel[a] - 1) - 1
        windows = (math.ceil(room / s[a]) if ceil_mode else room // s[a]) + 1
        if ceil_mode and (windows - 1) * s[a] >= size[a] + p[a][0]:
            windows -= 1
        found.append(windows)
    return tuple(found)


# --- convolution ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Meetings:
    """Which coordinates meet at each tap: the sentence at the top, tried for every o."""

    input_size: tuple[int, ...]
    output_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]

    def at(self, tap: Sequence[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Index expressions of the meeting inputs and outputs, for arrays (N, G, C, *spatial)."""
        inputs, outputs = [], []
        for a, r in enumerate(tap):
            met = []
            for o in range(self.output_size[a]):
                i = o * self.stride[a] + r * self.dilation[a] - self.padding[a][0]
                if 0 <= i < self.input_size[a]:
                    met.append((i, o))
            inputs.append(np.array([i for i, _ in met], dtype=np.intp))
            outputs.append(np.array([o for _, o in met], dtype=np.intp))
        rest = (slice(None),) * 3
        return (*rest, *np.ix_(*inputs)), (*rest, *np.ix_(*outputs))


def _float64(array: NDArray[Any]) -> Float:
    return np.asarray(array).astype(np.float64)


def _grouped(array: NDArray[Any], groups: int) -> Float:
    """(N, C, ...) as (N, G, C/G, ...)."""
    n, c, *spatial = array.shape
    return _float64(array).reshape(n, groups, c // groups, *spatial)


def _grouped_weight(weight: NDArray[Any], groups: int) -> Float:
    """(K, C/G, ...) as (G, K/G, C/G, ...)."""
    k, c, *kernel = weight.shape
    return _float64(weight).reshape(groups, k // groups, c, *kernel)


def _meetings(
    input_size: Sequence[int],
    output_size: Sequence[int],
    stride: Sizes,
    padding: Padding,
    dilation: Sizes,
) -> _Meetings:
    n = len(input_size)
    return _Meetings(
        tuple(input_size),
        tuple(output_size),
        per_dimension(stride, n),
        padding_pairs(padding, n),
        per_dimension(dilation, n),
    )


def _flat(array: Float) -> Float:
    """The spatial axes of (N, G, C, *spatial) as one."""
    return array.reshape(*array.shape[:3], math.prod(array.shape[3:]))


@np.errstate(all="ignore")
def conv_fwd(
    input: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any] | None = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Reference:
    """out[n, k, o] = sum of input[n, c, i] * weight[k, c, r] over c and all (i, r) that o meets."""
    kernel = weight.shape[2:]
    output_size = conv_output_size(input.shape[2:], kernel, stride, padding, dilation)
    meet = _meetings(input.shape[2:], output_size, stride, padding, dilation)
    x, w = _grouped(input, groups), _grouped_weight(weight, groups)
    shape = (x.shape[0], groups, w.shape[1], *output_size)
    value, magnitude, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    for tap in np.ndindex(*kernel):
        at_input, at_output = meet.at(tap)
        seen, w_tap = x[at_input], w[(..., *tap)]
        value[at_output] += (w_tap @ _flat(seen)).reshape(value[at_output].shape)
        magnitude[at_output] += (np.abs(w_tap) @ np.abs(_flat(seen))).reshape(
            value[at_output].shape
        )
        terms[at_output] += w.shape[2]
    out = Reference(value, magnitude, terms)
    out = out.map(lambda a: a.reshape(shape[0], -1, *output_size))
    return out if bias is None else _with_bias(out, bias)


def of_bias(bias: NDArray[Any], shape: Sequence[int]) -> Reference:
    """The bias of each channel at every place of an activation of this shape."""
    each = _float64(bias).reshape(-1, *(1,) * (len(shape) - 2))
    value = np.broadcast_to(each, tuple(shape))
    return Reference(value, np.abs(value), np.ones(tuple(shape), np.int64))


def _with_bias(out: Reference, bias: NDArray[Any]) -> Reference:
    return total(out.value.shape, [out, of_bias(bias, out.value.shape)])


@np.errstate(all="ignore")
def conv_bwd_data(
    grad_output: NDArray[Any],
    weight: NDArray[Any],
    input_size: Sequence[int],
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Reference:
    """grad_input[n, c, i] = sum of grad_output[n, k, o] * weight[k, c, r] over k and all (o, r)."""
    kernel = weight.shape[2:]
    meet = _meetings(input_size, grad_output.shape[2:], stride, padding, dilation)
    dy, w = _grouped(grad_output, groups), _grouped_weight(weight, groups)
    shape = (dy.shape[0], groups, w.shape[2], *input_size)
    value, magnitude, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    for tap in np.ndindex(*kernel):
        at_input, at_output = meet.at(tap)
        seen, w_tap = dy[at_output], w[(..., *tap)].swapaxes(1, 2)
        value[at_input] += (w_tap @ _flat(seen)).reshape(value[at_input].shape)
        magnitude[at_input] += (np.abs(w_tap) @ np.abs(_flat(seen))).reshape(value[at_input].shape)
        terms[at_input] += w.shape[1]
    out = Reference(value, magnitude, terms)
    return out.map(lambda a: a.reshape(shape[0], -1, *input_size))


@np.errstate(all="ignore")
def conv_bwd_weight(
    input: NDArray[Any],
    grad_output: NDArray[Any],
    kernel_size: Sequence[int],
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Reference:
    """grad_weight[k, c, r] = sum of input[n, c, i] * grad_output[n, k, o] over n and all (i, o)."""
    meet = _meetings(input.shape[2:], grad_output.shape[2:], stride, padding, dilation)
    x, dy = _grouped(input, groups), _grouped(grad_output, groups)
    shape = (groups, dy.shape[2], x.shape[2], *kernel_size)
    value, magnitude, terms = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.int64)
    for tap in np.ndindex(*kernel_size):
        at_input, at_output = meet.at(tap)
        a, b = _flat(dy[at_output]), _flat(x[at_input]).swapaxes(2, 3)
        value[(..., *tap)] = (a @ b).sum(axis=0)
        magnitude[(..., *tap)] = (np.abs(a) @ np.abs(b)).sum(axis=0)
        terms[(..., *tap)] = a.shape[0] * a.shape[3]
    out = Reference(value, magnitude, terms)
    return out.map(lambda a: a.reshape(-1, *shape[2:]))


@np.errstate(all="ignore")
def grad_bias(grad_output: NDArray[Any]) -> Reference:
    """grad_bias[k] = sum over n and o of grad_output[n, k, o]."""
    dy = _float64(grad_output)
    axes = (0, *range(2, dy.ndim))
    count = np.full(dy.shape[1], math.prod(dy.shape) // dy.shape[1], np.int64)
    return Reference(dy.sum(axis=axes), np.abs(dy).sum(axis=axes), count)


@np.errstate(all="ignore")
def total(shape: Sequence[int], parts: Sequence[Reference]) -> Reference:
    """The sum of references; of none, zero."""
    value, terms = np.zeros(tuple(shape)), np.zeros(tuple(shape), np.int64)
    made = Reference(value, value.copy(), terms)
    for part in parts:
        made = Reference(
            made.value + part.value, made.magnitude + part.magnitude, made.terms + part.terms
        )
    return made


@np.errstate(all="ignore")
def epilogue(
    grad: Reference, alpha: float, beta: float, accumulate: NDArray[Any] | None
) -> Reference:
    """alpha*grad + beta*accumulate, where beta = 0 does not read accumulate."""
    value, magnitude = alpha * grad.value, abs(alpha) * grad.magnitude
    if accumulate is not None and beta != 0:
        added = beta * _float64(accumulate)
        value, magnitude = value + added, magnitude + np.abs(added)
    return Reference(value, magnitude, grad.terms + 3)


def conv_transpose(
    input: NDArray[Any],
    weight: NDArray[Any],
    bias: NDArray[Any] | None = None,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Reference:
    """conv_bwd_data with input for grad_output, weight [C_in, C_out/groups, *kernel]; plus bias."""
    size = smallest_input_size(
        input.shape[2:], weight.shape[2:], stride, padding, dilation, output_padding
    )
    out = conv_bwd_data(
        input, weight, size, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    return out if bias is None else _with_bias(out, bias)


# --- the fused forward ---------------------------------------------------------------------------

ACTIVATIONS: Mapping[str, Callable[[Float], Float]] = {
    "none": lambda x: x,
    "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0.0)),
    "relu6": lambda x: np.where(np.isnan(x), x, np.clip(x, 0.0, 6.0)),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}
# |silu'| never exceeds 1.0999; the others' slope is at most 1.
_SLOPE = 1.1
# Terms that evaluating an activation may cost in rounding, in units of the accumulator: the
# exponential's few, the sum's and the quotient's.
_ACTIVATION_TERMS = 8


@np.errstate(all="ignore")
def fused(
    input: NDArray[Any],
    weight0: NDArray[Any],
    weight1: NDArray[Any],
    bias0: NDArray[Any] | None = None,
    bias1: NDArray[Any] | None = None,
    *,
    conv0: Mapping[str, Any],
    conv1: Mapping[str, Any],
    activation0: str = "none",
    activation1: str = "none",
    round_intermediate: Callable[[Float], Float] | None = None,
    u_intermediate: float = 0.0,
    u_accumulate: float = 0.0,
    c_factors: float = 0.0,
) -> Reference:
    """activation1(conv1(round(activation0(conv0(input) + bias0))) + bias1).

    With `round_intermediate` the intermediate is rounded here too (the exact gate: nothing before
    it rounds, so both round the same number). Without, the error of that rounding, u_intermediate
    of the value, u_accumulate a term and c_factors for rounded factors, becomes slack: |weight1|
    convolved with it.
    """
    first = conv_fwd(input, weight0, bias0, **conv0)
    middle = ACTIVATIONS[activation0](first.value)
    if round_intermediate is not None:
        middle, error = round_intermediate(middle), np.zeros_like(middle)
    else:
        terms = first.terms + _ACTIVATION_TERMS
        summed = (c_factors + u_accumulate * terms) * first.magnitude
        error = u_intermediate * np.abs(middle) + _SLOPE * summed
        # An infinity is exact, and so is what an activation makes of it.
        error = np.where(np.isfinite(first.magnitude), error, 0.0)
    second = conv_fwd(middle, weight1, bias1, **conv1)
    slack = conv_fwd(error, np.abs(_float64(weight1)), **conv1).value
    return Reference(
        ACTIVATIONS[activation1](second.value),
        _SLOPE * second.magnitude if activation1 == "silu" else second.magnitude,
        second.terms + _ACTIVATION_TERMS,
        _SLOPE * slack if activation1 == "silu" else slack,
    )
