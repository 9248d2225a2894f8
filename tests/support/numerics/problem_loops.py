"""Every problem computed by plain float64 loops over the geometry's identity, for small sizes.

It reads a Problem the way a backend does (shapes, canonical views, signed padding) and nothing
else, so it shows that what a Problem says, whole or cut into pieces, is enough to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.problems import (
    Conv3dBackpropInput,
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    ConvPasses,
    ConvShape,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    PoolShape,
    Problem,
)
from convgrad_service.problems.layouts import activation_view, weight_view

Array = NDArray[Any]
Tensors = Mapping[str, Array]
Position = tuple[int, ...]


def meetings(shape: ConvShape | PoolShape) -> Iterator[tuple[Position, Position, Position]]:
    """All (input, output, tap) that meet, the taps of an output in row-major order."""
    per_axis = []
    for axis in range(shape.ndim):
        s, d, (before, _) = shape.stride[axis], shape.dilation[axis], shape.padding[axis]
        per_axis.append(
            [
                (o * s + r * d - before, o, r)
                for o in range(shape.output_size[axis])
                for r in range(shape.kernel_size[axis])
                if 0 <= o * s + r * d - before < shape.input_size[axis]
            ]
        )
    for triple in product(*per_axis):
        i, o, r = zip(*triple, strict=True)
        yield i, o, r


def fprop(conv: ConvShape, x: Array, w: Array) -> Array:
    """On canonical views, as are the two below."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    y = np.zeros((conv.batch, conv.groups, conv.out_channels_per_group, *conv.output_size))
    for i, o, r in meetings(conv):
        y[(..., *o)] += np.einsum("ngc,gkc->ngk", x[(..., *i)], w[(..., *r)])
    return y


def dgrad(conv: ConvShape, dy: Array, w: Array) -> Array:
    dy, w = dy.astype(np.float64), w.astype(np.float64)
    dx = np.zeros((conv.batch, conv.groups, conv.in_channels_per_group, *conv.input_size))
    for i, o, r in meetings(conv):
        dx[(..., *i)] += np.einsum("ngk,gkc->ngc", dy[(..., *o)], w[(..., *r)])
    return dx


def wgrad(conv: ConvShape, x: Array, dy: Array) -> Array:
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    k, c = conv.out_channels_per_group, conv.in_channels_per_group
    dw = np.zeros((conv.groups, k, c, *conv.kernel_size))
    for i, o, r in meetings(conv):
        dw[(..., *r)] += np.einsum("ngk,ngc->gkc", dy[(..., *o)], x[(..., *i)])
    return dw


def run(problem: Problem, tensors: Tensors) -> dict[str, Array]:
    """The outputs of a problem, each with the shape and dtype that it promises."""
    outputs = {
        name: np.full(spec.shape, -9, spec.dtype.numpy) for name, spec in problem.outputs.items()
    }
    for name, spec in problem.inputs.items():
        assert tensors[name].shape == spec.shape, name
        assert tensors[name].dtype == spec.dtype.numpy, name
    _RUN[type(problem)](problem, tensors, outputs)
    return outputs


def _conv_fwd(p: ConvFwd, t: Tensors, out: dict[str, Array]) -> None:
    g = p.conv.groups
    y = fprop(
        p.conv, activation_view(t["input"], p.layout, g), weight_view(t["weight"], p.layout, g)
    )
    if p.bias:
        y += _over_channels(t["bias"], y)
    activation_view(out["output"], p.layout, g)[...] = y


def _over_channels(bias: Array, y: Array) -> Array:
    return bias.astype(np.float64).reshape(1, *y.shape[1:3], *[1] * (y.ndim - 3))


def _conv_bwd_data(p: ConvBwdData, t: Tensors, out: dict[str, Array]) -> None:
    g = p.conv.groups
    dx = p.epilogue.alpha * dgrad(
        p.conv,
        activation_view(t["grad_output"], p.layout, g),
        weight_view(t["weight"], p.layout, g),
    )
    if p.epilogue.accumulate:
        dx += p.epilogue.beta * activation_view(t["accumulate"], p.layout, g)
    activation_view(out["grad_input"], p.layout, g)[...] = dx


def _bwd_weight(p: GroupedConvBwdWeight, t: Tensors, out: dict[str, Array]) -> None:
    g = p.conv.groups
    dy = activation_view(t["grad_output"], p.layout, g)
    if "grad_weight" in out:
        dw = p.epilogue.alpha * wgrad(p.conv, activation_view(t["input"], p.layout, g), dy)
        if p.epilogue.accumulate:
            dw += p.epilogue.beta * weight_view(t["accumulate"], p.layout, g)
        weight_view(out["grad_weight"], p.layout, g)[...] = dw
    if "grad_bias" in out:
        out["grad_bias"][...] = dy.astype(np.float64).sum((0, *range(3, dy.ndim))).reshape(-1)


def _conv_backward(p: ConvBackward, t: Tensors, out: dict[str, Array]) -> None:
    for part in p.parts:
        out.update(run(part, t))


def _passes(p: ConvPasses, t: Tensors, out: dict[str, Array]) -> None:
    """Term by term, as each pass says."""
    g = p.conv.groups
    view = {"x": activation_view, "w": weight_view, "y": activation_view}
    compute = {"fwd": fprop, "bwd_data": dgrad, "bwd_weight": wgrad}
    for one in p.passes:
        operands = [
            [view[one.sides[name]](t[name], p.layout, g) for name in term] for term in one.terms
        ]
        if one.direction == "input_sums":
            x = operands[0][0].astype(np.float64)
            out[one.output][...] = x.sum((0, *range(3, x.ndim))).reshape(-1)
            continue
        result = view[one.written or ""](out[one.output], p.layout, g)
        total = np.zeros(result.shape)
        for term in operands:
            total += compute[one.direction](p.conv, *term)
        if one.bias is not None:
            total += _over_channels(t[one.bias], total)
        result[...] = total


def _backprop_input(p: Conv3dBackpropInput, t: Tensors, out: dict[str, Array]) -> None:
    plain = {
        "grad_output": p.grad_output_format.unpack(t["grad_output"], p.conv.out_channels),
        "weight": p.weight_format.unpack(t["weight"], p.conv.groups, p.weight_size),
    }
    p.output_format.pack(run(p.plain, plain)["grad_input"], out["grad_input"])


def _fused(p: GroupedConvConvFwd, t: Tensors, out: dict[str, Array]) -> None:
    g0, g1 = p.conv0.groups, p.conv1.groups
    mid = fprop(
        p.conv0, activation_view(t["input"], p.layout, g0), weight_view(t["weight0"], p.layout, g0)
    )
    if p.bias0:
        mid += _over_channels(t["bias0"], mid)
    mid = _ACTIVATE[p.activation0](mid).reshape(mid.shape[0], g1, -1, *mid.shape[3:])
    y = fprop(p.conv1, mid, weight_view(t["weight1"], p.layout, g1))
    if p.bias1:
        y += _over_channels(t["bias1"], y)
    activation_view(out["output"], p.layout, g1)[...] = _ACTIVATE[p.activation1](y)


def winners(pool: PoolShape, x: Array) -> tuple[Array, Array]:
    """The maxima of an (N, C, *in) input and their flat indices."""
    best = np.zeros((*x.shape[:2], *pool.output_size))
    where = np.full(best.shape, -1, np.int64)
    for i, o, _ in meetings(pool):
        value, at = x[(..., *i)], (..., *o)
        wins = (where[at] < 0) | (value > best[at]) | np.isnan(value)
        best[at] = np.where(wins, value, best[at])
        where[at] = np.where(wins, np.ravel_multi_index(i, pool.input_size), where[at])
    assert (where >= 0).all()
    return best, where


def _pool_fwd(p: MaxPoolFwd, t: Tensors, out: dict[str, Array]) -> None:
    best, where = winners(p.pool, activation_view(t["input"], p.layout, 1)[:, 0])
    activation_view(out["output"], p.layout, 1)[:, 0] = best
    if "indices" in out:
        activation_view(out["indices"], p.layout, 1)[:, 0] = where


def _pool_bwd(p: MaxPoolBwd, t: Tensors, out: dict[str, Array]) -> None:
    dy = activation_view(t["grad_output"], p.layout, 1)[:, 0]
    if p.source == "input":
        where = winners(p.pool, activation_view(t["input"], p.layout, 1)[:, 0])[1]
    else:
        where = activation_view(t["indices"], p.layout, 1)[:, 0]
    dx = np.zeros((*dy.shape[:2], *p.pool.input_size))
    flat = dx.reshape(*dy.shape[:2], -1)
    assert (where >= 0).all()
    assert (where < flat.shape[-1]).all()
    for at in product(*[range(extent) for extent in dy.shape]):
        flat[(*at[:2], where[at])] += dy[at]
    activation_view(out["grad_input"], p.layout, 1)[:, 0] = dx


_ACTIVATE: dict[str, Callable[[Array], Array]] = {
    "none": lambda a: a,
    "relu": lambda a: np.maximum(a, 0),
    "relu6": lambda a: np.clip(a, 0, 6),
    "silu": lambda a: a * (1 + np.tanh(a / 2)) / 2,
}
_RUN: dict[type[Problem], Callable[[Any, Tensors, dict[str, Array]], None]] = {
    ConvFwd: _conv_fwd,
    ConvBwdData: _conv_bwd_data,
    GroupedConvBwdWeight: _bwd_weight,
    ConvBackward: _conv_backward,
    ConvPasses: _passes,
    Conv3dBackpropInput: _backprop_input,
    GroupedConvConvFwd: _fused,
    MaxPoolFwd: _pool_fwd,
    MaxPoolBwd: _pool_bwd,
}
