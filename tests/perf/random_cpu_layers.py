"""Random layers of a size that one core computes in milliseconds, of every kind that a CPU serves."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from tests.perf.cpu_layers import Layer

__all__ = ["KINDS", "random_cpu_layers"]

# How often: kinds of layers, as `_drawn` understands them.
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
OTHERS = (7, 8, 10, 12, 16, 16, 20, 24, 32, 32, 40, 48, 64, 64, 96, 100, 112, 128, 192, 256, 384, 512)
SIZES = (7, 9, 13, 14, 17, 20, 28, 28, 32, 35, 40, 56, 64, 80, 112, 128, 224)
KERNELS = (1, 1, 1, 2, 3, 3, 3, 3, 4, 5, 7)
IMAGE_KERNELS = (1, 1, 2, 3, 3, 4, 5, 7, 7, 8, 11, 16)
BATCH = 4
LEAST_FLOPS, MOST_FLOPS, MOST_ELEMENTS = 2e5, 6e8, 4e6


def random_cpu_layers(seed: int, count: int, kinds: set[str] | None = None) -> Iterator[Layer]:
    """``count`` layers, equal for equal arguments; of some kinds, or of all of them."""
    draw = random.Random(seed)
    weights = {kind: often for kind, often in KINDS.items() if not kinds or kind in kinds}
    while count > 0:
        (kind,) = draw.choices(list(weights), list(weights.values()))
        layer = _drawn(draw, kind)
        sizes = (*layer.size, *layer.output_size)
        if min(sizes) < 1:
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
    size = draw.choice(SIZES)
    kernel = draw.choice(IMAGE_KERNELS if kind in ("first", "last") else KERNELS)
    stride = draw.choice((1, 1, 1, 2, 2, 3, 4) if kind in ("first", "last") else (1, 1, 2))
    inputs, outputs, groups, dilation = draw.choice(OTHERS), draw.choice(OTHERS), 1, 1
    if kind == "first":
        inputs = draw.choice(FEW)
    elif kind == "last":
        outputs = draw.choice(FEW)
    elif kind == "few":
        inputs, outputs = draw.randint(1, 24), draw.randint(1, 24)
    elif kind == "dilated":
        kernel, stride, dilation = draw.choice((2, 3, 3, 5)), 1, draw.choice((2, 2, 3, 4, 6, 12))
    elif kind == "grouped":
        groups = draw.choice((2, 3, 4, 8, 16, 32))
        inputs, outputs = groups * draw.choice((2, 4, 8, 10, 16, 24)), groups * draw.choice((2, 4, 8, 16))
    elif kind == "depthwise":
        groups = inputs
        outputs = inputs * draw.choice((1, 1, 1, 1, 2))
        kernel = draw.choice((3, 3, 3, 5, 5, 7, 9))
    elif kind == "transposed":
        kernel, stride = draw.choice(((2, 2), (3, 2), (4, 2), (3, 1)))
    elif kind in ("pool", "average"):
        outputs = groups = inputs
        kernel, stride = draw.choice(((2, 2), (2, 2), (3, 2), (3, 1), (3, 3), (4, 4), (5, 1), (7, 7)))
    if kind != "dilated" and draw.random() < 0.15:
        stride = kernel
    if kernel == 1 and inputs < 16:
        stride = 1  # some crash PyTorch 2.13 in oneDNN: weight gradients in channels_last
    padding = 0 if stride == kernel else dilation * (kernel - 1) // 2
    if draw.random() < 0.1:
        padding = 0
    if kind in ("pool", "average"):
        padding = min(padding, kernel // 2)
    if ndim == 1:
        sizes: tuple[int, ...] = (size * draw.choice((4, 16, 64)),)
    elif ndim == 2:
        sizes = (size, size if draw.random() < 0.8 else draw.choice(SIZES))
    else:
        kernel, size = min(kernel, 5), min(size, 40)
        stride, padding = min(stride, kernel) if kind != "pool" else stride, min(padding, 2)
        sizes = (draw.choice((4, 8, 8, 16)), size, size)
    return Layer(
        name=f"{inputs}>{outputs}g{groups}_{'x'.join(map(str, sizes))}_k{kernel}_s{stride}_p{padding}_d{dilation}",
        kind=kind,
        size=sizes,
        in_channels=inputs,
        out_channels=outputs,
        kernel=(kernel,) * ndim,
        stride=(stride,) * ndim,
        padding=(min(padding, kernel // 2),) * ndim if kind in ("pool", "average") else (padding,) * ndim,
        dilation=(dilation,) * ndim,
        groups=groups,
        batch=BATCH,
    )
