"""Random grouped convolutions: those of networks with groups, at random stages and batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import prod
from typing import Any

__all__ = ["random_grouped_layers"]

# By network: the channels of its stages on 56 x 56 to 7 x 7, and of a group.
STAGES = {
    "resnext_32x4d": ((128, 256, 512, 1024), (4, 8, 16, 32)),
    "resnext_32x8d": ((256, 512, 1024, 2048), (8, 16, 32, 64)),
    "resnext_64x4d": ((256, 512, 1024, 2048), (4, 8, 16, 32)),
    "regnety_400m": ((48, 104, 208, 440), (8,) * 4),
    "regnetx_800m": ((64, 128, 288, 672), (16,) * 4),
    "regnetx_1600m": ((72, 168, 408, 912), (24,) * 4),
    "regnety_3200m": ((72, 216, 576, 1512), (24,) * 4),
    "regnetx_3200m": ((96, 192, 432, 1008), (48,) * 4),
    "regnetx_4000m": ((80, 240, 560, 1360), (40,) * 4),
    "regnety_4000m": ((128, 192, 512, 1088), (64,) * 4),
    "regnety_8000m": ((224, 448, 896, 2016), (56,) * 4),
    "regnetx_8000m": ((80, 240, 720, 1920), (80, 120, 120, 120)),
    "regnety_16g": ((224, 448, 1232, 3024), (112,) * 4),
}
# Others: input and output channels, groups, sizes, kernel, stride, dilation.
OTHERS = (
    ("shufflenet_g3", 240, 60, 3, (28, 28), 1, 1, 1),
    ("shufflenet_g3", 120, 480, 3, (14, 14), 1, 1, 1),
    ("shufflenet_g8", 384, 96, 8, (28, 28), 1, 1, 1),
    ("shufflenet_g8", 192, 768, 8, (14, 14), 1, 1, 1),
    ("condensenet", 32, 8, 4, (56, 56), 3, 1, 1),
    ("condensenet", 64, 16, 4, (28, 28), 3, 1, 1),
    ("condensenet", 128, 32, 4, (14, 14), 3, 1, 1),
    ("condensenet", 256, 64, 4, (7, 7), 3, 1, 1),
    ("deeplab_resnext", 512, 512, 32, (33, 33), 3, 1, 2),
    ("deeplab_resnext", 1024, 1024, 32, (33, 33), 3, 1, 4),
    ("resnext_5x5", 256, 256, 16, (28, 28), 5, 1, 1),
    ("resnext_5x5", 128, 128, 16, (56, 56), 5, 2, 1),
    ("squeezebert", 768, 768, 4, (384,), 1, 1, 1),
    ("squeezebert", 768, 3072, 4, (128,), 1, 1, 1),
    ("speech", 512, 512, 8, (400,), 9, 1, 1),
    ("speech", 256, 256, 16, (1600,), 5, 2, 1),
    ("resnext3d", 128, 128, 32, (8, 28, 28), 3, 1, 1),
    ("resnext3d", 256, 256, 32, (8, 28, 28), 3, 2, 1),
    ("resnext3d", 512, 512, 32, (4, 14, 14), 3, 1, 1),
    ("resnext3d", 1024, 1024, 32, (4, 14, 14), 3, 2, 1),
)
SIZES = (56, 28, 14, 7)
BATCHES = (1, 8, 32, 128)
MOST_ELEMENTS, MOST_FLOPS = 120e6, 1.5e11


def random_grouped_layers(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """``count`` different layers with a batch, as `random_layers` has them."""
    draw = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        layer = _layer(draw)
        if layer is None or layer["name"] in seen:
            continue
        seen.add(layer["name"])
        yield layer


def _layer(draw: random.Random) -> dict[str, Any] | None:
    """None where it would be larger than real ones are."""
    if draw.random() < 0.2:
        network, inputs, outputs, groups, sizes, kernel, stride, dilation = draw.choice(OTHERS)
    else:
        network = draw.choice(list(STAGES))
        channels, widths = STAGES[network]
        stage = draw.randrange(4)
        stride = draw.choice((1, 1, 2))
        sizes = (SIZES[stage] * stride,) * 2
        # An input that is no power of two times 7.
        if draw.random() < 0.15:
            sizes = (sizes[0] + draw.choice((-2, 1, 2)),) * 2
        inputs = outputs = channels[stage]
        groups, kernel, dilation = inputs // widths[stage], 3, 1
    batch, pad = draw.choice(BATCHES), dilation * (kernel - 1) // 2
    out = [(size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for size in sizes]
    flops = 2 * batch * prod(out) * inputs // groups * outputs * kernel ** len(sizes)
    if batch * max(prod(sizes) * inputs, prod(out) * outputs) > MOST_ELEMENTS or flops > MOST_FLOPS:
        return None
    size = "x".join(map(str, sizes))
    return {
        "name": f"{inputs}>{outputs}g{groups}_{size}_k{kernel}_s{stride}_d{dilation}_n{batch}",
        "class": "grouped",
        "kind": "conv",
        "networks": {network: 1},
        "ndim": len(sizes),
        "N": batch,
        "C": inputs,
        "K": outputs,
        "groups": groups,
        "input_size": list(sizes),
        "output_size": out,
        "kernel_size": [kernel] * len(sizes),
        "stride": [stride] * len(sizes),
        "padding": [pad] * len(sizes),
        "dilation": [dilation] * len(sizes),
    }
