"""Random convolutions like those of real networks, to fit and to judge choices of kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod
from typing import Any

__all__ = ["random_any_depthwise_layers", "random_depthwise_layers", "random_few_channel_layers"]
__all__ += ["random_layers"]

# How often a network has such a layer: the kernel, its stride, its dilation.
KERNELS = (
    (10, 1, 1, 1),
    (1, 1, 2, 1),
    (6, 3, 1, 1),
    (2, 3, 2, 1),
    (1, 3, 1, 2),
    (1, 5, 1, 1),
    (1, 2, 2, 1),
)
# Spatial sizes from an input of 224 (and neighbours), or of a segmentation network.
SIZES = (7, 7, 8, 13, 14, 14, 16, 20, 28, 28, 32, 40, 56, 56, 64, 80, 112)
BATCHES = (1, 1, 2, 4, 8, 8, 16, 32, 32, 64)
# Mostly multiples of 8 or 16, some of 4 or 2.
NARROW, WIDE = (8, 12, 16, 18, 24, 32, 36, 40, 48, 60), (1.0, 1.0, 1.25, 1.5)
MOST_FLOPS, MOST_ELEMENTS = 3e11, 2e8


def random_layers(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """``count`` layers with a batch, as entries of `suite/networks.json`; equal for equal seeds."""
    draw = random.Random(seed)
    while count > 0:
        layer = _layer(draw)
        if layer is None:
            continue
        count -= 1
        yield layer


def _channels(draw: random.Random) -> int:
    if draw.random() < 0.25:
        return draw.choice(NARROW)
    return max(16, int(2 ** draw.uniform(5, 11) * draw.choice(WIDE)) // 16 * 16)


def _layer(draw: random.Random) -> dict[str, Any] | None:
    """None where it would be larger than real ones are."""
    weights = [weight for weight, *_ in KERNELS]
    _, kernel, stride, dilation = draw.choices(KERNELS, weights)[0]
    inputs, outputs = _channels(draw), _channels(draw)
    ndim = draw.choices((1, 2, 3), (1, 8, 1))[0]
    size = draw.choice(SIZES)
    sizes = {1: [size * size], 2: [size, size], 3: [min(size, 8), min(size, 28), min(size, 28)]}[
        ndim
    ]
    pad = dilation * (kernel - 1) // 2
    out = [(one + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for one in sizes]
    batch = draw.choice(BATCHES)
    pixels_in = pixels_out = batch
    for a, b in zip(sizes, out, strict=True):
        pixels_in, pixels_out = pixels_in * a, pixels_out * b
    flops = 2 * pixels_out * inputs * outputs * kernel**ndim
    if flops > MOST_FLOPS or max(pixels_in * inputs, pixels_out * outputs) > MOST_ELEMENTS:
        return None
    shape = "x".join(map(str, sizes))
    return {
        "name": f"{inputs}>{outputs}_{shape}_k{kernel}_s{stride}_d{dilation}_n{batch}",
        "class": "dense",
        "networks": {},
        "ndim": ndim,
        "N": batch,
        "C": inputs,
        "K": outputs,
        "groups": 1,
        "input_size": sizes,
        "output_size": out,
        "kernel_size": [kernel] * ndim,
        "stride": [stride] * ndim,
        "padding": [pad] * ndim,
        "dilation": [dilation] * ndim,
    }


# Layers of images: channels of the image and others, kernel, stride, size and batch.
IMAGE_CHANNELS, OTHER_CHANNELS = (1, 2, 3, 3, 3, 4, 8), (16, 24, 32, 45, 48, 64, 96, 128, 512)
IMAGE_KERNELS, IMAGE_STRIDES = (1, 2, 3, 3, 4, 5, 7, 7, 11, 16), (1, 1, 2, 2, 4)
IMAGE_SIZES, IMAGE_BATCHES = (32, 64, 112, 224, 225, 256), (1, 4, 16, 32, 64)


def random_few_channel_layers(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """As `random_layers`, of up to eight channels of the input, or a third of them of the output;
    a fifth have patches that do not overlap."""
    draw = random.Random(seed)
    while count > 0:
        channels = [draw.choice(IMAGE_CHANNELS), draw.choice(OTHER_CHANNELS)]
        if draw.random() < 1 / 3:
            channels.reverse()
        kernel, stride = draw.choice(IMAGE_KERNELS), draw.choice(IMAGE_STRIDES)
        pad = (kernel - 1) // 2
        if draw.random() < 0.2:
            stride, pad = kernel, 0
        size, batch = draw.choice(IMAGE_SIZES), draw.choice(IMAGE_BATCHES)
        ndim = draw.choices((1, 2, 3), (1, 8, 1))[0]
        sizes = {1: [size * 64], 2: [size, size], 3: [8, min(size, 64), min(size, 64)]}[ndim]
        kernels = [min(kernel, 5) if ndim == 3 else kernel] * ndim
        out = [(one + 2 * pad - k) // stride + 1 for one, k in zip(sizes, kernels, strict=True)]
        largest = batch * max(prod(sizes) * channels[0], prod(out) * channels[1])
        if min(out) < 1 or largest > MOST_ELEMENTS:
            continue
        count -= 1
        shape = "x".join(map(str, sizes))
        yield {
            "name": f"{channels[0]}>{channels[1]}_{shape}_k{kernels[0]}_s{stride}_p{pad}_n{batch}",
            "class": "first",
            "networks": {},
            "ndim": ndim,
            "N": batch,
            "C": channels[0],
            "K": channels[1],
            "groups": 1,
            "input_size": sizes,
            "output_size": out,
            "kernel_size": kernels,
            "stride": [stride] * ndim,
            "padding": [pad] * ndim,
            "dilation": [1] * ndim,
        }


# Depthwise layers: how often the kernel, its stride.
DEPTHWISE_KERNELS = (
    (6, 3, 1),
    (3, 3, 2),
    (4, 5, 1),
    (2, 5, 2),
    (3, 7, 1),
    (1, 7, 2),
    (1, 9, 1),
    (1, 9, 2),
    (1, 11, 1),
)
DEPTHWISE_BATCHES = (1, 1, 8, 32, 128)


def random_depthwise_layers(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """As `random_layers`, depthwise ones."""
    draw = random.Random(seed)
    while count > 0:
        layer = _depthwise_layer(draw)
        if layer is not None:
            count -= 1
            yield layer


def _depthwise_layer(draw: random.Random) -> dict[str, Any] | None:
    """None where it would be larger than real ones are."""
    _, kernel, stride = draw.choices(
        DEPTHWISE_KERNELS, [weight for weight, *_ in DEPTHWISE_KERNELS]
    )[0]
    multiple = draw.choices((8, 4, 2, 1), (16, 3, 2, 1))[0]
    channels = max(8, int(2 ** draw.uniform(4, 10.5)) // multiple * multiple)
    ndim = draw.choices((1, 2, 3), (1, 12, 1))[0]
    size = draw.choice(SIZES)
    kernels = [kernel] * ndim
    if ndim == 3:
        kernels = [3] * 3
    sizes = {1: [size * size], 2: [size, size], 3: [min(size, 8), min(size, 28), min(size, 28)]}[
        ndim
    ]
    out = [(one + k // 2 * 2 - k) // stride + 1 for one, k in zip(sizes, kernels, strict=True)]
    batch = draw.choice(DEPTHWISE_BATCHES)
    elements = batch * channels
    for extent in sizes:
        elements *= extent
    if elements > MOST_ELEMENTS / 2:
        return None
    shape = "x".join(map(str, sizes))
    return {
        "name": f"dw{channels}_{shape}_k{kernels[0]}_s{stride}_n{batch}",
        "class": "depthwise",
        "kind": "conv",
        "networks": {},
        "ndim": ndim,
        "N": batch,
        "C": channels,
        "K": channels,
        "groups": channels,
        "input_size": sizes,
        "output_size": out,
        "kernel_size": kernels,
        "stride": [stride] * ndim,
        "padding": [k // 2 for k in kernels],
        "dilation": [1] * ndim,
    }


# Depthwise layers of any geometry: how often each kind is drawn, and its kernels.
ANY_DEPTHWISE = {
    "square": (10, tuple((k, k) for k in (2, 3, 3, 3, 4, 5, 5, 7, 7, 9, 11, 13))),
    "row": (2, tuple((1, k) for k in (3, 5, 7, 11, 15, 21, 31))),
    "column": (2, tuple((k, 1) for k in (3, 5, 7, 11, 15, 21, 31))),
    "signal": (2, tuple((k,) for k in (3, 4, 5, 7, 9, 15, 31))),
    "volume": (2, ((3, 3, 3), (3, 3, 3), (1, 3, 3), (3, 1, 1), (5, 5, 5), (1, 5, 5), (3, 5, 5))),
    "dilated": (1, ((3, 3), (5, 5), (3, 5))),
    "several": (1.5, ((3, 3), (5, 5), (7, 7))),
    "long_stride": (1.5, ((3, 3), (4, 4), (5, 5), (7, 7), (8, 8))),
}


def random_any_depthwise_layers(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """As `random_depthwise_layers`, also kernels of one row or column, in volumes, dilated, with
    several outputs per channel and strides of 3 to 5."""
    draw = random.Random(seed)
    weights = [weight for weight, _ in ANY_DEPTHWISE.values()]
    while count > 0:
        kind = draw.choices(list(ANY_DEPTHWISE), weights)[0]
        kernels = draw.choice(ANY_DEPTHWISE[kind][1])
        size, stride = draw.choice(SIZES), draw.choices((1, 2), (7, 3))[0]
        dilation, factor = 1, 1
        multiple = draw.choices((8, 4, 2, 1), (16, 3, 2, 1.5))[0]
        channels = max(multiple, int(2 ** draw.uniform(3.5, 10.5)) // multiple * multiple)
        sizes = [size] * len(kernels)
        if kind == "signal":
            sizes = [draw.choice((49, 100, 196, 500, 784, 1500, 3136))]
        elif kind == "volume":
            sizes = [min(size, 8), min(size, 28), min(size, 28)]
        elif kind == "dilated":
            dilation, stride = draw.choice((2, 3, 4)), 1
        elif kind == "several":
            factor = draw.choice((2, 3, 4))
        elif kind == "long_stride":
            stride = draw.choice((3, 4, 4, 5))
        strides = [1 if kernel == 1 else stride for kernel in kernels]
        pads = [dilation * (kernel - 1) // 2 for kernel in kernels]
        out = [
            (one + 2 * pad - dilation * (kernel - 1) - 1) // step + 1
            for one, pad, kernel, step in zip(sizes, pads, kernels, strides, strict=True)
        ]
        batch = draw.choice((1, 1, 2, 8, 16, 32, 64, 128))
        if min(out) < 1 or batch * channels * factor * prod(sizes) > MOST_ELEMENTS / 3:
            continue
        count -= 1
        shape, taps = ("x".join(map(str, values)) for values in (sizes, kernels))
        yield {
            "name": f"dw{channels}x{factor}_{shape}_k{taps}_s{stride}_d{dilation}_n{batch}",
            "class": "depthwise",
            "kind": "conv",
            "networks": {},
            "ndim": len(kernels),
            "N": batch,
            "C": channels,
            "K": channels * factor,
            "groups": channels,
            "input_size": sizes,
            "output_size": out,
            "kernel_size": list(kernels),
            "stride": strides,
            "padding": pads,
            "dilation": [dilation] * len(kernels),
        }
