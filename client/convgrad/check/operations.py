"""Makes the `Target` of every output of an operation, from its tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import convgrad.check.layouts as layouts
from convgrad.check.adjoint import adjoint_side
from convgrad.check.bounds import Float, Reference, U, rounded
from convgrad.check.convolve import Convolver, wide
from convgrad.check.double_backward import double_backward
from convgrad.check.geometry import Geometry
from convgrad.check.layouts import Seen
from convgrad.check.pooling import maxima, pool_geometry
from convgrad.check.references import (
    Conv,
    Parameters,
    Span,
    Target,
    Targets,
    Tensors,
    kernel_of,
    spans_of,
    spatial,
)
from convgrad.check.windows import WINDOW_TARGETS, routed_target

__all__ = ["TARGETS", "targets"]

Array = NDArray[Any]


def targets(
    operation: str,
    tensors: Tensors,
    parameters: Parameters,
    convolver: Convolver,
    *,
    factors: float = 0.0,
) -> Targets:
    """Return the target of every output, by name."""
    found = TARGETS[operation](tensors, parameters, convolver, factors)
    return {target.name: target for target in found}


def _conv_fwd(t: Tensors, p: Parameters, convolver: Convolver, _: float) -> list[Target]:
    one = Conv(t, p, convolver)
    return [one.forward(one.activation("input"), one.weight())]


def _conv_bwd_data(t: Tensors, p: Parameters, convolver: Convolver, _: float) -> list[Target]:
    one = Conv(t, p, convolver)
    y, w = one.activation("grad_output"), one.weight()
    return [one.backward_data(y, w, _input_size(p, w.ndim - 3))]


def _input_size(p: Parameters, ndim: int, layout: str | None = None) -> tuple[int, ...] | None:
    stated = p.get("input_size")
    return None if stated is None else spatial(stated, ndim, layout or p.get("layout"))


def _bwd_weight(t: Tensors, p: Parameters, convolver: Convolver, _: float) -> list[Target]:
    one = Conv(t, p, convolver)
    x, y = one.activation("input"), one.activation("grad_output")
    kernel = kernel_of(p["weight_size"], x.ndim - 3, p.get("layout"))
    wanted = p.get("outputs", ("grad_weight",))
    made = {
        "grad_weight": lambda: one.backward_weight(x, y, kernel),
        "grad_bias": lambda: one.grad_bias(y),
    }
    return [made[name]() for name in wanted]


def _conv_backward(t: Tensors, p: Parameters, convolver: Convolver, _: float) -> list[Target]:
    one = Conv(t, p, convolver)
    y, x, w = one.activation("grad_output"), one.activation("input"), one.weight()
    made: dict[str, Callable[[], Target]] = {
        "grad_input": lambda: one.backward_data(y, w, x.shape[3:]),
        "grad_weight": lambda: one.backward_weight(x, y, w.shape[3:]),
        "grad_bias": lambda: one.grad_bias(y),
    }
    return [made[name]() for name in p.get("outputs", tuple(made))]


def _conv_transpose_fwd(t: Tensors, p: Parameters, convolver: Convolver, _: float) -> list[Target]:
    one = Conv(t, p, convolver)
    return [one.backward_data(one.activation("input"), one.weight(), None, "output")]


def _conv_transpose_backward(
    t: Tensors, p: Parameters, convolver: Convolver, _: float
) -> list[Target]:
    one = Conv(t, p, convolver)
    y, x, w = one.activation("grad_output"), one.activation("input"), one.weight()
    made: dict[str, Callable[[], Target]] = {
        "grad_input": lambda: one.forward(y, w, "grad_input", x.shape[3:]),
        "grad_weight": lambda: one.backward_weight(y, x, w.shape[3:]),
        "grad_bias": lambda: one.grad_bias(y),
    }
    return [made[name]() for name in p.get("outputs", tuple(made))]


def _backprop_input(t: Tensors, p: Parameters, convolver: Convolver, _: float) -> list[Target]:
    """Convert the formats to NCDHW and use conv_bwd_data."""
    groups = int(p.get("groups", 1))
    weight_format = p.get("weight_format", "NCDHW")
    weight = t["weight"]
    if weight_format == "FRACTAL_Z_3D":
        weight = layouts.fractal_z(weight, p["weight_size"], groups)
    elif weight_format == "NDHWC":
        weight = np.moveaxis(weight, -1, 1)
    channels = weight.shape[1] * groups
    grad = _plain(t["grad_output"], p.get("grad_output_format", "NCDHW"), weight.shape[0])
    one = Conv({"grad_output": grad, "weight": weight}, {**p, "layout": None}, convolver)
    y, w = one.activation("grad_output"), one.weight()
    stated = p.get("input_size")
    size = None if stated is None else tuple(stated)[-3:]
    whole = one.backward_data(y, w, size)
    region = dict(p.get("region") or {})
    d, h = (slice(*(region.get(axis) or (None,))) for axis in "dh")
    if size is None:
        size = Geometry.of(p, w.shape[3:], output_size=y.shape[3:]).input_size
    rows = [len(range(extent)[cut]) for extent, cut in zip(size, (d, h), strict=False)]
    output_format = p.get("output_format", "NCDHW")

    def part(span: Span) -> Reference:
        return whole.part(span).map(lambda array: array[:, :, :, d, h])

    def see(array: Array) -> Seen:
        return _see_format(array, output_format, channels, groups)

    def adjoint(z: Float) -> float:
        padded = np.zeros(whole.shape)
        padded[:, :, :, d, h] = z
        assert whole.linear is not None  # noqa: S101
        return adjoint_side(whole.linear, padded, convolver)

    made = replace(whole, see=see, part=part, shape=(*whole.shape[:3], *rows, size[2]))
    return [replace(made, linear=None, adjoint=adjoint)] if region else [made]


def _plain(array: Array, name: str, channels: int) -> Array:
    if name == "NDC1HWC0":
        return layouts.ndc1hwc0(array, channels)
    return np.moveaxis(array, -1, 1) if name == "NDHWC" else array


def _see_format(array: Array, name: str, channels: int, groups: int) -> Seen:
    if name != "NDC1HWC0":
        return layouts.activation(array, name, groups)
    seen = layouts.activation(layouts.ndc1hwc0(array, channels), None, groups)
    c0 = array.shape[-1]

    def index(found: Sequence[int]) -> tuple[int, ...]:
        n, c, d, h, w = seen.index(found)
        return n, d, c // c0, h, w, c % c0

    return replace(seen, index=index)


# --- the fused forward ---------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, Callable[[Float], Float]] = {
    "none": lambda x: x,
    "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0.0)),
    "relu6": lambda x: np.where(np.isnan(x), x, np.clip(x, 0.0, 6.0)),
    "silu": lambda x: x / (1.0 + np.exp(-x)),
}
# |silu'| is at most 1.0999; the slopes of the other activations are at most 1.
_SLOPE = 1.1
# Rounding errors of evaluating an activation, in units of the accumulator's roundoff.
_ACTIVATION_TERMS = 8


def _fused(t: Tensors, p: Parameters, convolver: Convolver, factors: float) -> list[Target]:
    """Make the target of the fused forward, whose intermediate is rounded once.

    For integers the intermediate is rounded exactly as in the kernel. Otherwise its error is
    propagated through the magnitudes of the second weight.
    """
    first_p, second_p = ({**dict(p.get(name) or {})} for name in ("conv0", "conv1"))
    layout = p.get("layout")
    before, after = p.get("activation0", "none"), p.get("activation1", "none")
    dtype = t["input"].dtype
    x0 = layouts.activation(t["input"], layout, _groups_of(first_p, t["input"], layout)).array
    groups0 = x0.shape[1]
    w0 = layouts.weight(t["weight0"], layout, groups0).array
    groups1 = _groups_of(second_p, None, layout, t["weight1"])
    w1 = layouts.weight(t["weight1"], layout, groups1).array
    g0 = Geometry.of(first_p, w0.shape[3:], input_size=x0.shape[3:])
    g1 = Geometry.of(second_p, w1.shape[3:], input_size=g0.output_size)
    shape = (x0.shape[0], *w1.shape[:2], *g1.output_size)
    exact = all(_whole(array) for array in t.values()) and "silu" not in (before, after)
    u_sum = U["float64"] if dtype == np.float64 else U["float32"]
    bias0, bias1 = (t.get(name) for name in ("bias0", "bias1"))
    terms0 = g0.taps_of_outputs() * w0.shape[2] + (bias0 is not None) + _ACTIVATION_TERMS
    terms1 = g1.taps_of_outputs() * w1.shape[2] + (bias1 is not None) + _ACTIVATION_TERMS
    w1_sizes = np.abs(wide(w1))

    def biased(found: tuple[Float, Float], bias: Array | None) -> tuple[Float, Float]:
        if bias is None:
            return found
        each = wide(bias).reshape(1, *found[0].shape[1:3], *(1,) * (found[0].ndim - 3))
        return found[0] + each, found[1] + np.abs(each)

    @np.errstate(all="ignore")
    def part(span: Span) -> Reference:
        value, magnitude = biased(convolver.forward(x0[slice(*span)], w0, g0), bias0)
        middle = _ACTIVATIONS[before](value)
        if exact:
            middle, error = rounded(middle, dtype), None
        else:
            summed = (factors + u_sum * terms0) * magnitude
            error = U[dtype.name] * np.abs(middle) + _SLOPE * summed
            # Infinities are exact, before and after the activation.
            error = np.where(np.isfinite(magnitude), error, 0.0)
        apart = (middle.shape[0], groups1, -1, *middle.shape[3:])
        value, magnitude = biased(convolver.forward(middle.reshape(apart), w1, g1), bias1)
        slack: Float | float = 0.0
        if error is not None:
            slack, _ = convolver.forward(error.reshape(apart), w1_sizes, g1)
        if after == "silu":
            magnitude, slack = _SLOPE * magnitude, _SLOPE * slack
        return Reference(
            _ACTIVATIONS[after](value), magnitude, np.broadcast_to(terms1, value.shape), slack
        )

    each = max(prod(x0.shape[1:]), prod(w0.shape[:2]) * prod(g0.output_size), prod(shape[1:]))
    why = "the intermediate is rounded"

    def see(array: Array) -> Seen:
        return layouts.activation(array, layout, groups1)

    return [Target("output", see, spans_of(shape[0], each), part, why_no_adjoint=why, shape=shape)]


def _groups_of(
    p: Parameters, tensor: Array | None, layout: str | None, weight: Array | None = None
) -> int:
    if layout is not None and "G" in layout:
        if tensor is not None:
            return int(tensor.shape[layout.index("G")])
        if weight is not None:
            return int(weight.shape[0])
    return int(p.get("groups", 1))


def _whole(array: Array) -> bool:
    value = array.astype(np.float64)
    return bool((np.isfinite(value) & (np.rint(value) == value)).all())


# --- pooling -------------------------------------------------------------------------------------


def _maxpool_fwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    layout = p.get("layout")
    x = layouts.activation(t["input"], layout, 1).array
    geometry = pool_geometry(p, x.shape[3:])
    shape = (*x.shape[:3], *geometry.output_size)
    spans = spans_of(shape[0], prod(x.shape[1:]))

    def see(array: Array) -> Seen:
        return layouts.activation(array, layout, 1)

    def exact(value: Float) -> Reference:
        # A maximum is one of the inputs, so it must be exact.
        return Reference(value, np.zeros_like(value), np.zeros(value.shape, np.int64))

    def values(span: Span) -> Reference:
        return exact(maxima(x[slice(*span)], geometry)[0])

    def indices(span: Span) -> Reference:
        return exact(maxima(x[slice(*span)], geometry)[1].astype(np.float64))

    why = "a maximum is not linear"
    found = [Target("output", see, spans, values, why_no_adjoint=why, shape=shape)]
    if p.get("return_indices"):
        found.append(replace(found[0], name="indices", part=indices, is_integer=True))
    return found


def _maxpool_bwd(t: Tensors, p: Parameters, _: Convolver, __: float) -> list[Target]:
    layout = p.get("layout")
    y = layouts.activation(t["grad_output"], layout, 1).array
    ndim = y.ndim - 3
    index = None
    x = None
    if t.get("indices") is not None:
        index = layouts.activation(t["indices"], layout, 1).array
        size = spatial(p["input_size"], ndim, layout)
    else:
        x = layouts.activation(t["input"], layout, 1).array
        size = x.shape[3:]
    geometry = pool_geometry(p, size)

    def routes(cut: slice) -> NDArray[np.int64]:
        if index is not None:
            return np.ascontiguousarray(index[cut]).astype(np.int64)
        assert x is not None  # noqa: S101
        return maxima(x[cut], geometry)[1]

    def see(array: Array) -> Seen:
        return layouts.activation(array, layout, 1)

    return [routed_target(see, y, routes, size)]


Maker = Callable[[Tensors, Parameters, Convolver, float], list[Target]]
TARGETS: Mapping[str, Maker] = {
    "conv_fwd": _conv_fwd,
    "conv_bwd_data": _conv_bwd_data,
    "grouped_conv_bwd_weight": _bwd_weight,
    "conv_backward": _conv_backward,
    "conv_transpose_fwd": _conv_transpose_fwd,
    "conv_transpose_backward": _conv_transpose_backward,
    "conv_double_backward": partial(double_backward, transposed=False),
    "conv_transpose_double_backward": partial(double_backward, transposed=True),
    "conv3d_transpose": _conv_transpose_fwd,
    "conv3d_backprop_input": _backprop_input,
    "grouped_conv_conv_fwd": _fused,
    **{f"maxpool{ndim}d_fwd": _maxpool_fwd for ndim in (1, 2, 3)},
    **{f"maxpool{ndim}d_bwd": _maxpool_bwd for ndim in (1, 2, 3)},
    **WINDOW_TARGETS,
}
