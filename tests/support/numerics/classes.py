"""Random geometries of each class of layer that has kernels of its own.

`strategies.py` draws every geometry there is, with few channels; the fast kernels take the
shapes that networks have. Here channels come in multiples that they like, and now and then in
ones that they do not; images stay small, so that a float64 reference on the CPU is quick. Plain
draws of a `Random` and no hypothesis strategies, whose love of small and equal values would leave
most kernels unmet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from tests.support.numerics.cases import FROM_CONV, Case, fused, maxpool_bwd, maxpool_fwd
from tests.support.numerics.geometries import Conv, Pool
from tests.support.numerics.reference import padding_pairs, per_dimension
from tests.support.numerics.strategies import has_empty_window
from tests.support.numerics.window_cases import adaptive_pool, avg_pool

_ODD_CHANNELS = (5, 12, 36, 67, 131)
_KERNELS = {1: (1, 3, 4, 5, 7, 9, 15, 31), 2: (1, 2, 3, 3, 5, 7, 13), 3: (1, 2, 3, 3, 5)}
_EXTENTS = {1: 150, 2: 22, 3: 9}
_CHANNELS_A_GROUP = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Input and output channels, and groups.
_FEW_POSITIONS = (
    (32, 64, 1),
    (128, 96, 1),
    (45, 30, 1),
    (3, 32, 1),
    (64, 3, 1),
    (24, 24, 24),
    (8, 16, 8),
    (32, 32, 4),
    (100, 50, 5),
)
_MOST_PRODUCTS = 2 * 10**7
_MOST_ELEMENTS = 2**34


def _channels(rng: Random, most: int) -> int:
    """Mostly a multiple of 8."""
    if rng.randint(0, 7) == 7:
        return int(rng.choice([c for c in _ODD_CHANNELS if c <= most] or [1]))
    return 8 * int(rng.randint(1, max(1, most // 8)))


def _geometry(rng: Random, ndim: int, kernels: tuple[int, ...]) -> dict[str, Any]:
    """Sizes and steps such that the dilated kernel fits; often the padding that keeps the size."""
    kernel = rng.choice(kernels)
    stride = (rng.choice([1, 1, 2, 3]),) * ndim
    if rng.randint(0, 3) == 3:
        stride = tuple(rng.randint(1, 3) for _ in range(ndim))
    dilation = rng.choice([1, 1, 1, 2, 3])
    # A side apart from the others, now and then.
    sides = [kernel] * ndim
    if ndim > 1 and rng.randint(0, 3) == 3:
        sides[rng.randint(0, ndim - 1)] = rng.choice(kernels)
    spans = [dilation * (side - 1) + 1 for side in sides]
    padding: Any = tuple(span // 2 for span in spans)
    if rng.randint(0, 2) == 2:
        padding = tuple((rng.randint(0, 3), rng.randint(0, 3)) for _ in range(ndim))
    plain = Conv(1, 1, 1, (1,) * ndim, tuple(sides), stride, padding, dilation)
    size = tuple(n + rng.randint(0, _EXTENTS[ndim]) for n in _least(plain))
    return {
        "size": size,
        "kernel": tuple(sides),
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "n": rng.randint(1, 3),
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


def _dimensions(rng: Random) -> int:
    return int(rng.choice([1, 2, 2, 2, 3]))


def dense(rng: Random) -> Conv:
    """Many channels, no groups."""
    ndim = _dimensions(rng)
    shape = _geometry(rng, ndim, _KERNELS[ndim][:6])
    return _affordable(Conv(c=_channels(rng, 160), k=_channels(rng, 160), **shape))


def pointwise(rng: Random) -> Conv:
    """1x1 with stride 1, of as many channels that are whole chunks of 16 bytes as of others."""
    ndim = _dimensions(rng)
    size = tuple(rng.randint(1, 2 * _EXTENTS[ndim]) for _ in range(ndim))
    c, k = (rng.choice([8 * rng.randint(1, 40), rng.randint(9, 320)]) for _ in range(2))
    return _affordable(Conv(rng.randint(1, 4), c, k, size, (1,) * ndim))


def grouped(rng: Random) -> Conv:
    """2 to 64 channels per group on either side."""
    ndim = _dimensions(rng)
    shape = _geometry(rng, ndim, _KERNELS[ndim][:6])
    groups = rng.choice([2, 3, 4, 8, 16])
    c = rng.choice(_CHANNELS_A_GROUP)
    k = c if rng.random() < 0.5 else rng.choice(_CHANNELS_A_GROUP)
    return _affordable(Conv(c=groups * c, k=groups * k, groups=groups, **shape))


def depthwise(rng: Random) -> Conv:
    """One input channel per group; now and then several outputs for each."""
    ndim = _dimensions(rng)
    channels = _channels(rng, 136)
    multiplier = rng.choice([1, 1, 1, 1, 2, 3, 4])
    shape = _geometry(rng, ndim, _KERNELS[ndim])
    return _affordable(Conv(c=channels, k=channels * multiplier, groups=channels, **shape))


def first_layer(rng: Random) -> Conv:
    """1 to 4 input channels, many output channels."""
    ndim = _dimensions(rng)
    shape = _geometry(rng, ndim, {1: (3, 7, 10), 2: (2, 3, 4, 5, 7, 11), 3: (1, 2, 3, 5)}[ndim])
    if rng.randint(0, 3) == 3:
        patch = shape["kernel"]
        shape |= {"stride": patch, "padding": 0, "dilation": 1}
        shape["size"] = tuple(max(a, b) for a, b in zip(shape["size"], patch, strict=True))
    return _affordable(Conv(c=rng.randint(1, 4), k=_channels(rng, 128), **shape))


def of_any_size(rng: Random) -> Conv:
    """From one position to tensors of 2^34 elements, for plans, which need no memory."""
    ndim = _dimensions(rng)
    extents = {
        1: (1, 100, 16_000, 2**20, 2**24),
        2: (1, 4, 7, 14, 28, 56, 57, 112, 224, 512, 2048),
        3: (1, 4, 8, 16, 28, 56, 112),
    }[ndim]
    while True:
        kernel, dilation = rng.choice(_KERNELS[ndim]), rng.choice([1, 1, 1, 2, 3, 6])
        span = dilation * (kernel - 1) + 1
        sides = [rng.choice(extents)] * ndim
        if rng.random() < 0.3:
            sides = [rng.choice(extents) for _ in sides]
        channels, outputs = (
            rng.choice([8 * rng.randint(1, 64), 64 * rng.randint(1, 16), rng.randint(1, 400)])
            for _ in range(2)
        )
        groups = 1
        match rng.choice(["dense", "dense", "grouped", "depthwise", "first", "last"]):
            case "grouped":
                groups = rng.choice([2, 4, 8, 16, 32, 64])
                channels, outputs = (groups * rng.choice(_CHANNELS_A_GROUP) for _ in range(2))
            case "depthwise":
                groups, outputs = channels, channels * rng.choice([1, 1, 1, 2, 3])
            case "first":
                channels = rng.randint(1, 8)
            case "last":
                outputs = rng.randint(1, 8)
        conv = Conv(
            n=rng.choice([1, 1, 2, 8, 17, 32, 128, 256, 1024]),
            c=channels,
            k=outputs,
            size=tuple(max(side, span) for side in sides),
            kernel=(kernel,) * ndim,
            stride=rng.choice([1, 1, 2, 2, 3, 4]),
            padding=rng.choice([span // 2, 0, tuple((rng.randint(0, 3), 1) for _ in sides)]),
            dilation=dilation,
            groups=groups,
        )
        if max(math.prod(conv.input_shape), math.prod(conv.output_shape)) <= _MOST_ELEMENTS:
            return conv


def few_positions(rng: Random) -> Conv:
    """Extents of one or few positions, with any stride, dilation and padding."""
    while True:
        ndim = _dimensions(rng)
        kernel, stride, dilation, size = (
            tuple(rng.choice(values) for _ in range(ndim))
            for values in (
                (1, 1, 2, 2, 3, 4, 5),
                (1, 1, 2, 3, 4),
                (1, 1, 1, 2, 3),
                (1, 1, 2, 3, 5, 8, 13),
            )
        )
        padding = tuple((rng.randint(0, 4), rng.randint(0, 4)) for _ in range(ndim))
        c, k, groups = rng.choice(_FEW_POSITIONS)
        conv = Conv(rng.randint(1, 4), c, k, size, kernel, stride, padding, dilation, groups)
        if all(n >= least for n, least in zip(size, _least(conv), strict=True)):
            return _affordable(conv)


def pools(rng: Random) -> Pool:
    """Windows that overlap and windows that do not, with many channels."""
    ndim = rng.choice([2, 2, 3])
    kernel = rng.choice([2, 3, 3, 5])
    dilation = rng.choice([1, 1, 1, 2])
    span = dilation * (kernel - 1) + 1
    return Pool(
        n=rng.randint(1, 2),
        c=_channels(rng, 72),
        size=tuple(span + rng.randint(0, _EXTENTS[ndim]) for _ in range(ndim)),
        kernel=(kernel,) * ndim,
        stride=rng.choice([1, 2, 2, 3, kernel]),
        padding=rng.randint(0, kernel // 2),
        dilation=dilation,
        ceil_mode=rng.random() < 0.5,
    )


def _conv_request(conv: Conv, rng: Random) -> Case:
    operation = rng.choice(sorted(FROM_CONV))
    case: Case = FROM_CONV[operation]("random", conv)
    shape = {"conv_bwd_data": conv.input_shape, "grouped_conv_bwd_weight": conv.weight_shape}
    if operation in shape and rng.random() < 0.5:
        # Dyadic factors, so that the exact gate stays exact.
        case = case.with_params("epilogue", alpha=rng.choice([1.0, -0.5, 2.0]))
        if operation == "grouped_conv_bwd_weight":
            case = case.with_params("", outputs=("grad_weight",))
        if rng.random() < 0.5:
            case = case.with_tensor("accumulate", shape[operation])
    return case


def any_request(rng: Random) -> Case:
    """A request of a layer `of_any_size`, or of one and a pointwise one."""
    conv = of_any_size(rng)
    if rng.random() < 0.15:
        return _fused_with(conv, rng)
    return _conv_request(conv, rng)


def _fused_request(rng: Random) -> Case:
    return _fused_with(rng.choice([depthwise, depthwise, grouped])(rng), rng)


def _fused_with(first: Conv, rng: Random) -> Case:
    second = Conv(0, 0, _channels(rng, 300), (), (1,) * first.ndim)
    activations = ("none", "relu", "relu6", "silu")
    return fused(
        "random",
        first,
        second,
        (rng.choice(activations), rng.choice(activations)),
        (rng.random() < 0.5, rng.random() < 0.5),
    )


def _pool_request(rng: Random) -> Case:
    pool = pools(rng)
    while has_empty_window(pool):
        pool = pools(rng)
    return rng.choice([maxpool_bwd, maxpool_bwd, maxpool_fwd])("random", pool)


def _window_request(rng: Random) -> Case:
    """Average and adaptive pooling, forward and backward."""
    ndim, way = _dimensions(rng), rng.choice(("fwd", "bwd"))
    size = tuple(rng.choice((1, 2, 3, 5, 8, 13, 20)) for _ in range(ndim))
    sizes = rng.randint(1, 4), rng.choice((1, 3, 8, 16, 20, 33, 64))
    if rng.random() < 0.5:
        output = tuple(rng.randint(1, 7) for _ in range(ndim))
        return adaptive_pool(rng.choice(("avg", "max")), "random", sizes, size, output, way)
    kernel = tuple(rng.choice([k for k in (1, 2, 3, 4, 5, 9, n) if k <= n]) for n in size)
    params = {
        "kernel_size": kernel,
        "stride": tuple(rng.choice((1, 2, 3, 4)) for _ in size),
        "padding": tuple(rng.randint(0, k // 2) for k in kernel),
        "ceil_mode": rng.random() < 0.4,
        "count_include_pad": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        params["divisor_override"] = rng.randint(1, 7)
    return avg_pool("random", sizes, size, params, way)


CLASSES: Mapping[str, Callable[[Random], Case]] = {
    "dense": lambda rng: _conv_request(dense(rng), rng),
    "pointwise": lambda rng: _conv_request(pointwise(rng), rng),
    "grouped": lambda rng: _conv_request(grouped(rng), rng),
    "depthwise": lambda rng: _conv_request(depthwise(rng), rng),
    "first_layer": lambda rng: _conv_request(first_layer(rng), rng),
    "few_positions": lambda rng: _conv_request(few_positions(rng), rng),
    "fused": _fused_request,
    "pool": _pool_request,
    "windows": _window_request,
}
"""A request of each class of layer."""
