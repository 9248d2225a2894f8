"""Hypothesis strategies: random geometries of each class of layer that has kernels of its own.

`tests/strategies.py` draws every geometry there is, with few channels; the fast kernels take the
shapes that networks have. Here channels come in multiples that they like, and now and then in
ones that they do not; images stay small, so that a float64 reference on the CPU is quick.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.cases import FROM_CONV, Case, fused, maxpool_bwd, maxpool_fwd
from tests.geometries import Conv, Pool
from tests.reference import padding_pairs, per_dimension
from tests.strategies import has_empty_window

Draw = Callable[[st.SearchStrategy[Any]], Any]

_ODD_CHANNELS = (5, 12, 36, 67, 131)
_KERNELS = {1: (1, 3, 5, 9, 31), 2: (1, 2, 3, 3, 5, 7, 13), 3: (1, 2, 3, 3, 5)}
_EXTENTS = {1: 150, 2: 22, 3: 9}
_MOST_PRODUCTS = 2 * 10**7


def _channels(draw: Draw, most: int) -> int:
    """Mostly a multiple of 8."""
    if draw(st.integers(0, 7)) == 7:
        return int(draw(st.sampled_from([c for c in _ODD_CHANNELS if c <= most] or [1])))
    return 8 * int(draw(st.integers(1, max(1, most // 8))))


def _geometry(draw: Draw, ndim: int, kernels: tuple[int, ...]) -> dict[str, Any]:
    """Sizes and steps such that the dilated kernel fits; often the padding that keeps the size."""
    kernel = draw(st.sampled_from(kernels))
    one = st.integers(1, 3) if draw(st.booleans()) else st.just(1)
    stride = draw(st.tuples(*[one] * ndim))
    dilation = draw(st.sampled_from([1, 1, 1, 2, 3]))
    # A side apart from the others, now and then.
    sides = [kernel] * ndim
    if ndim > 1 and draw(st.integers(0, 3)) == 3:
        sides[draw(st.integers(0, ndim - 1))] = draw(st.sampled_from(kernels))
    spans = [dilation * (side - 1) + 1 for side in sides]
    padding: Any = tuple(span // 2 for span in spans)
    if draw(st.integers(0, 2)) == 2:
        pair = st.tuples(st.integers(0, 3), st.integers(0, 3))
        padding = draw(st.tuples(*[pair] * ndim))
    plain = Conv(1, 1, 1, (1,) * ndim, tuple(sides), stride, padding, dilation)
    size = tuple(n + draw(st.integers(0, _EXTENTS[ndim])) for n in _least(plain))
    return {
        "size": size,
        "kernel": tuple(sides),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "n": draw(st.integers(1, 3)),
    }


def _affordable(conv: Conv) -> Conv:
    """The same convolution with fewer images, pixels or groups, until the reference is quick."""
    while math.prod(conv.output_shape) * math.prod(conv.weight_shape[1:]) > _MOST_PRODUCTS:
        least = _least(conv)
        if conv.n > 1:
            conv = replace(conv, n=1)
        elif conv.size != least:
            size = (max(a, (b + a) // 2) for a, b in zip(least, conv.size, strict=True))
            conv = replace(conv, size=tuple(size))
        elif conv.groups > 1:
            groups = conv.groups // 2
            c, k = conv.c // conv.groups, conv.k // conv.groups
            conv = replace(conv, groups=groups, c=c * groups, k=k * groups)
        else:
            conv = replace(conv, c=max(1, conv.c // 2), k=max(1, conv.k // 2))
    return conv


def _least(conv: Conv) -> tuple[int, ...]:
    """The smallest input that the dilated kernel fits into, padding included."""
    dilation = per_dimension(conv.dilation, conv.ndim)
    pads = padding_pairs(conv.padding, conv.ndim)
    sides = zip(conv.kernel, dilation, pads, strict=True)
    return tuple(max(1, d * (k - 1) + 1 - sum(pad)) for k, d, pad in sides)


def _dimensions(draw: Draw) -> int:
    return int(draw(st.sampled_from([1, 2, 2, 2, 3])))


@st.composite
def dense(draw: Draw) -> Conv:
    """Many channels, no groups."""
    ndim = _dimensions(draw)
    shape = _geometry(draw, ndim, _KERNELS[ndim][:5])
    return _affordable(Conv(c=_channels(draw, 160), k=_channels(draw, 160), **shape))


@st.composite
def grouped(draw: Draw) -> Conv:
    """2 to 64 channels a group on either side."""
    ndim = _dimensions(draw)
    shape = _geometry(draw, ndim, _KERNELS[ndim][:5])
    groups = draw(st.sampled_from([2, 3, 4, 8, 16]))
    each = st.sampled_from([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    c = draw(each)
    k = c if draw(st.booleans()) else draw(each)
    return _affordable(Conv(c=groups * c, k=groups * k, groups=groups, **shape))


@st.composite
def depthwise(draw: Draw) -> Conv:
    """One input channel a group; now and then several outputs for each."""
    ndim = _dimensions(draw)
    channels = _channels(draw, 136)
    multiplier = draw(st.sampled_from([1, 1, 1, 1, 2, 3, 4]))
    shape = _geometry(draw, ndim, _KERNELS[ndim])
    return _affordable(Conv(c=channels, k=channels * multiplier, groups=channels, **shape))


@st.composite
def first_layer(draw: Draw) -> Conv:
    """1 to 4 input channels, many output channels."""
    ndim = _dimensions(draw)
    shape = _geometry(draw, ndim, {1: (3, 7, 10), 2: (2, 3, 4, 5, 7, 11), 3: (1, 2, 3, 5)}[ndim])
    if draw(st.integers(0, 3)) == 3:
        patch = shape["kernel"]
        shape |= {"stride": patch, "padding": 0, "dilation": 1}
        shape["size"] = tuple(max(a, b) for a, b in zip(shape["size"], patch, strict=True))
    return _affordable(Conv(c=draw(st.integers(1, 4)), k=_channels(draw, 128), **shape))


@st.composite
def pools(draw: Draw) -> Pool:
    """Windows that overlap and windows that do not, with many channels."""
    ndim = draw(st.sampled_from([2, 2, 3]))
    kernel = draw(st.sampled_from([2, 3, 3, 5]))
    dilation = draw(st.sampled_from([1, 1, 1, 2]))
    span = dilation * (kernel - 1) + 1
    return Pool(
        n=draw(st.integers(1, 2)),
        c=_channels(draw, 72),
        size=tuple(span + draw(st.integers(0, _EXTENTS[ndim])) for _ in range(ndim)),
        kernel=(kernel,) * ndim,
        stride=draw(st.sampled_from([1, 2, 2, 3, kernel])),
        padding=draw(st.integers(0, kernel // 2)),
        dilation=dilation,
        ceil_mode=draw(st.booleans()),
    )


@st.composite
def _conv_requests(draw: Draw, convs: st.SearchStrategy[Conv]) -> Case:
    conv = draw(convs)
    operation = draw(st.sampled_from(sorted(FROM_CONV)))
    case: Case = FROM_CONV[operation]("random", conv)
    shape = {"conv_bwd_data": conv.input_shape, "grouped_conv_bwd_weight": conv.weight_shape}
    if operation in shape and draw(st.booleans()):
        # Dyadic factors, so that the exact gate stays exact.
        case = case.with_params("epilogue", alpha=draw(st.sampled_from([1.0, -0.5, 2.0])))
        if operation == "grouped_conv_bwd_weight":
            case = case.with_params("", outputs=("grad_weight",))
        if draw(st.booleans()):
            case = case.with_tensor("accumulate", shape[operation])
    return case


@st.composite
def _fused_requests(draw: Draw) -> Case:
    first = draw(depthwise() if draw(st.integers(0, 3)) else grouped())
    activations = st.sampled_from(["none", "relu", "relu6", "silu"])
    second = Conv(0, 0, _channels(draw, 300), (), (1,) * first.ndim)
    return fused(
        "random",
        first,
        second,
        (draw(activations), draw(activations)),
        (draw(st.booleans()), draw(st.booleans())),
    )


@st.composite
def _pool_requests(draw: Draw) -> Case:
    pool = draw(pools().filter(lambda one: not has_empty_window(one)))
    make = draw(st.sampled_from([maxpool_bwd, maxpool_bwd, maxpool_fwd]))
    case: Case = make("random", pool)
    return case


CLASSES: Mapping[str, st.SearchStrategy[Case]] = {
    "dense": _conv_requests(dense()),
    "grouped": _conv_requests(grouped()),
    "depthwise": _conv_requests(depthwise()),
    "first_layer": _conv_requests(first_layer()),
    "fused": _fused_requests(),
    "pool": _pool_requests(),
}
"""Requests of each class of layer."""
