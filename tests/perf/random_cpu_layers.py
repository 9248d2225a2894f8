"""Random layers of every kind, of a size that one core computes in milliseconds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from tests.perf.cpu_layers import Layer

__all__ = ["KINDS", "random_cpu_layers"]

# How often each kind of layer is drawn.
KINDS = {
    "dense": 5,
    "first": 4,
    "last": 3,
    "few": 2,
    "dilated": 1,
    "grouped": 2,
    "depthwise": 3,
    "transposed": 1,
    "pool": 2,
    "average": 2,
}
FEW = (1, 2, 3, 3, 3, 4, 5, 6, 8)
OTHERS = (
    *(7, 8, 10, 12, 16, 16, 20, 24, 32, 32, 40, 48, 64, 64),
    *(96, 100, 112, 128, 192, 256, 384, 512),
)
SIZES = (7, 9, 13, 14, 17, 20, 28, 28, 32, 35, 40, 56, 64, 80, 112, 128, 224)
KERNELS, STRIDES = (1, 1, 1, 2, 3, 3, 3, 3, 4, 5, 7), (1, 1, 2)
# Of layers with few channels on one side.
IMAGE_KERNELS, IMAGE_STRIDES = (1, 1, 2, 3, 3, 4, 5, 7, 7, 8, 11, 16), (1, 1, 1, 2, 2, 3, 4)
UPSAMPLED = ((2, 2), (3, 2), (4, 2), (3, 1))
POOLED = ((2, 2), (2, 2), (3, 2), (3, 1), (3, 3), (4, 4), (5, 1), (7, 7))
BATCH = 4
LEAST_FLOPS, MOST_FLOPS, MOST_ELEMENTS = 2e5, 6e8, 4e6


def random_cpu_layers(seed: int, count: int, kinds: set[str] | None = None) -> Iterator[Layer]:
    """``count`` layers, equal for equal arguments; of some kinds, or of all of them."""
    draw = random.Random(seed)
    weights = {kind: often for kind, often in KINDS.items() if not kinds or kind in kinds}
    while count > 0:
        (kind,) = draw.choices(list(weights), list(weights.values()))
        layer = _drawn(draw, kind)
        if min(layer.output_size) < 1 or min(layer.size) < layer.kernel[0]:
            continue
        elements = layer.batch * max(
            layer.in_channels * math.prod(layer.size),
            layer.out_channels * math.prod(layer.output_size),
        )
        least = 0 if kind in ("pool", "average") else LEAST_FLOPS
        if elements > MOST_ELEMENTS or not least <= layer.flops <= MOST_FLOPS:
            continue
        count -= 1
        yield layer


def _drawn(draw: random.Random, kind: str) -> Layer:
    ndim = draw.choices((1, 2, 3), (2, 7, 2))[0]
    image, pooled = kind in ("first", "last"), kind in ("pool", "average")
    kernel = draw.choice(IMAGE_KERNELS if image else KERNELS)
    stride = draw.choice(IMAGE_STRIDES if image else STRIDES)
    inputs, outputs, groups = _channels(draw, kind)
    dilation = 1
    if kind == "dilated":
        kernel, stride, dilation = draw.choice((2, 3, 3, 5)), 1, draw.choice((2, 2, 3, 4, 6, 12))
    elif kind == "depthwise":
        kernel = draw.choice((3, 3, 3, 5, 5, 7, 9))
    elif kind == "transposed":
        kernel, stride = draw.choice(UPSAMPLED)
    elif pooled:
        kernel, stride = draw.choice(POOLED)
    if ndim == 3:
        kernel = min(kernel, 5)
        stride = min(stride, kernel)
    if kind != "dilated" and draw.random() < 0.15:
        stride = kernel  # patches
    if kernel == 1 and inputs < 16:
        stride = 1  # oneDNN in PyTorch 2.13 crashes on some in channels_last
    bare = stride == kernel or draw.random() < 0.1
    padding = 0 if bare else min(dilation * (kernel - 1) // 2, 2 if ndim == 3 else 99)
    sizes = _sizes(draw, ndim)
    shape = "x".join(map(str, sizes))
    window = f"k{kernel}_s{stride}_p{padding}_d{dilation}"
    return Layer(
        name=f"{inputs}>{outputs}g{groups}_{shape}_{window}",
        kind=kind,
        size=sizes,
        in_channels=inputs,
        out_channels=outputs,
        kernel=(kernel,) * ndim,
        stride=(stride,) * ndim,
        padding=(padding,) * ndim,
        dilation=(dilation,) * ndim,
        groups=groups,
        batch=BATCH,
    )


def _channels(draw: random.Random, kind: str) -> tuple[int, int, int]:
    """Channels of the input and of the output, and groups."""
    inputs, outputs = draw.choice(OTHERS), draw.choice(OTHERS)
    if kind == "first":
        return draw.choice(FEW), outputs, 1
    if kind == "last":
        return inputs, draw.choice(FEW), 1
    if kind == "few":
        return draw.randint(1, 24), draw.randint(1, 24), 1
    if kind == "grouped":
        groups = draw.choice((2, 3, 4, 8, 16, 32))
        widths = draw.choice((2, 4, 8, 10, 16, 24)), draw.choice((2, 4, 8, 16))
        return groups * widths[0], groups * widths[1], groups
    if kind == "depthwise":
        return inputs, inputs * draw.choice((1, 1, 1, 1, 2)), inputs
    return (inputs, inputs, inputs) if kind in ("pool", "average") else (inputs, outputs, 1)


def _sizes(draw: random.Random, ndim: int) -> tuple[int, ...]:
    size = draw.choice(SIZES)
    if ndim == 1:
        return (size * draw.choice((4, 16, 64)),)
    if ndim == 2:
        return size, size if draw.random() < 0.8 else draw.choice(SIZES)
    return draw.choice((4, 8, 8, 16)), min(size, 40), min(size, 40)
