"""Hypothesis strategies: small valid geometries of every kind, and requests to be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.numerics.cases import (
    FROM_CONV,
    FROM_CONV3D,
    FROM_PASSES,
    Case,
    fused,
    maxpool_bwd,
    maxpool_fwd,
)
from tests.support.numerics.geometries import Conv, Pool
from tests.support.numerics.reference import padding_pairs, per_dimension

Draw = Callable[[st.SearchStrategy[Any]], Any]

# The most input elements along a dimension, by the number of dimensions.
_EXTENT = {1: 40, 2: 12, 3: 6}


def _ints(ndim: int, most: int) -> st.SearchStrategy[int | tuple[int, ...]]:
    one = st.integers(1, most)
    return one | st.tuples(*[one] * ndim)


def _padding(ndim: int, most: int) -> st.SearchStrategy[Any]:
    one = st.integers(0, most)
    pair = st.tuples(one, one)
    return st.just(0) | one | st.tuples(*[one] * ndim) | st.tuples(*[pair] * ndim)


@st.composite
def convs(draw: Draw, ndim: int | None = None) -> Conv:
    """A convolution whose dilated kernel fits into its padded input."""
    n = draw(st.integers(1, 3)) if ndim is None else ndim
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    kernel = draw(st.tuples(*[st.integers(1, 4)] * n))
    dilation = draw(_ints(n, 3))
    padding = draw(_padding(n, 4))
    spans = [
        d * (k - 1) + 1 - sum(p)
        for k, d, p in zip(
            kernel, per_dimension(dilation, n), padding_pairs(padding, n), strict=True
        )
    ]
    size = tuple(max(1, span) + draw(st.integers(0, _EXTENT[n])) for span in spans)
    return Conv(
        n=draw(st.integers(1, 3)),
        c=groups * draw(st.integers(1, 5)),
        k=groups * draw(st.integers(1, 5)),
        size=size,
        kernel=kernel,
        stride=draw(_ints(n, 5)),
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


@st.composite
def conv_cases(draw: Draw) -> Case:
    """A request of any convolution."""
    conv = draw(convs())
    makers = {**FROM_CONV, **FROM_PASSES, **(FROM_CONV3D if conv.ndim == 3 else {})}
    case: Case = makers[draw(st.sampled_from(sorted(makers)))]("random", conv)
    return case


@st.composite
def fused_cases(draw: Draw) -> Case:
    """Two convolutions, the second of which fits the first's output."""
    first = draw(convs())
    second = draw(convs(first.ndim))
    groups = draw(st.sampled_from([g for g in range(1, first.k + 1) if first.k % g == 0]))
    spans = zip(
        first.output_size,
        per_dimension(second.dilation, first.ndim),
        padding_pairs(second.padding, first.ndim),
        second.kernel,
        strict=True,
    )
    kernel = tuple(min(k, (size + sum(pad) - 1) // d + 1) for size, d, pad, k in spans)
    activations = draw(st.tuples(*[st.sampled_from(["none", "relu", "relu6", "silu"])] * 2))
    return fused(
        "random",
        first,
        replace(second, kernel=kernel, groups=groups, k=groups * draw(st.integers(1, 5))),
        activations,
        draw(st.tuples(st.booleans(), st.booleans())),
    )


def has_empty_window(pool: Pool) -> bool:
    """Whether some window meets no element of the input: tried one by one."""
    n = pool.ndim
    kernel, d = per_dimension(pool.kernel, n), per_dimension(pool.dilation, n)
    s = kernel if pool.stride is None else per_dimension(pool.stride, n)
    pad = padding_pairs(pool.padding, n)
    for a in range(n):
        for o in range(pool.output_size[a]):
            at = (o * s[a] + r * d[a] - pad[a][0] for r in range(kernel[a]))
            if not any(0 <= i < pool.size[a] for i in at):
                return True
    return False


@st.composite
def pools(draw: Draw) -> Pool:
    """A pooling whose every window has an element, its padding below the effective kernel."""
    n = draw(st.integers(2, 3))
    kernel = draw(_ints(n, 4))
    dilation = draw(_ints(n, 3))
    spans = [
        d * (k - 1) + 1
        for k, d in zip(per_dimension(kernel, n), per_dimension(dilation, n), strict=True)
    ]
    padding = tuple(
        (draw(st.integers(0, min(span - 1, 4))), draw(st.integers(0, min(span - 1, 4))))
        for span in spans
    )
    size = tuple(
        max(1, span - sum(p)) + draw(st.integers(0, _EXTENT[n]))
        for span, p in zip(spans, padding, strict=True)
    )
    pool = Pool(
        n=draw(st.integers(1, 2)),
        c=draw(st.integers(1, 9)),
        size=size,
        kernel=kernel,
        stride=draw(st.none() | _ints(n, 5)),
        padding=padding,
        dilation=dilation,
        ceil_mode=draw(st.booleans()),
    )
    if has_empty_window(pool):
        fits = tuple(max(extent, span) for extent, span in zip(size, spans, strict=True))
        return replace(pool, padding=0, size=fits)
    return pool


@st.composite
def pool_cases(draw: Draw) -> Case:
    """A request of a pooling, forward or backward."""
    pool = draw(pools())
    case: Case = draw(st.sampled_from([maxpool_fwd, maxpool_bwd]))("random", pool)
    return case


def _changed(shape: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] + by, *shape[axis + 1 :])


def _spoil_parameter(draw: Draw, case: Case) -> Case:
    """A parameter that no geometry may have."""
    wrong: dict[str, Any] = {
        "stride": draw(st.sampled_from([0, -1, (1,) * (case.ndim + 1), ()])),
        "dilation": draw(st.sampled_from([0, -2, (2,) * (case.ndim + 1)])),
        "padding": draw(st.sampled_from([-1, (1,) * (case.ndim + 1), ((0, -1),) * case.ndim])),
        "layout": draw(st.sampled_from(["NCDHWX", "HWCN", "nchw", "N" * 16])),
    }
    if case.operation.startswith("maxpool"):
        wrong["kernel_size"] = draw(st.sampled_from([0, -3, (2,) * (case.ndim + 1), 2**40]))
    else:
        wrong["groups"] = draw(st.sampled_from([0, -1, 2**33, 7 * max(case.groups, 1)]))
    if case.operation == "conv3d_backprop_input":
        del wrong["layout"]
    name = draw(st.sampled_from(sorted(wrong)))
    return case.with_params(f"wrong_{name}", **{name: wrong[name]})


def _spoil_extent(draw: Draw, case: Case) -> Case:
    """A tensor with a zero dimension, one too many, or one too few."""
    name = draw(st.sampled_from(sorted(case.shapes)))
    shape = case.shapes[name]
    axis = draw(st.integers(0, len(shape) - 1))
    wrong = draw(st.sampled_from([_changed(shape, axis, -shape[axis]), (*shape, 1), shape[:-1]]))
    return case.with_tensor(name, wrong)


def _spoil_agreement(draw: Draw, case: Case) -> Case:
    """Two tensors that contradict each other."""
    name, axis = _DISAGREES.get(case.operation, ("grad_output", 1))
    if name not in case.shapes:
        return case.with_params("wrong_padding", padding=10**6)
    more = case.groups if (name, axis) == ("grad_output", 1) else 1
    return case.with_tensor(name, _changed(case.shapes[name], axis, more))


# The axis whose change no other tensor of the operation can follow.
_DISAGREES = {
    "conv_fwd": ("weight", 1),
    "conv3d_transpose": ("weight", 0),
    "conv_transpose_fwd": ("weight", 0),
    "grouped_conv_bwd_weight": ("grad_output", 0),
}


@st.composite
def refused_cases(draw: Draw) -> Case:
    """A request whose sizes or parameters contradict each other, one thing at a time."""
    case = draw(conv_cases() | pool_cases())
    spoil = draw(st.sampled_from([_spoil_parameter, _spoil_extent, _spoil_agreement]))
    spoilt: Case = spoil(draw, case)
    return spoilt


def zeros(case: Case, dtype: Any = np.float32) -> dict[str, NDArray[Any]]:
    """Tensors of a case's shapes, for requests whose values do not matter."""
    types = {"indices": np.int64}
    return {name: np.zeros(shape, types.get(name, dtype)) for name, shape in case.shapes.items()}


__all__ = [
    "conv_cases",
    "convs",
    "fused_cases",
    "has_empty_window",
    "pool_cases",
    "pools",
    "refused_cases",
    "zeros",
]
