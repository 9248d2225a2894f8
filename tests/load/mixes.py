"""The mixes of requests: backward passes of known networks, many small requests, a few huge ones.

A mix is a list of requests with their frequencies. Layers are those of the networks' papers, with
batch 1 and a quarter of the usual image size, so that a CPU can serve them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MIXES", "Layer", "Sent", "requests_of"]

Arrays = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Layer:
    """A convolution from ``channels`` to ``filters`` channels, on images of ``side`` x ``side``."""

    channels: int
    filters: int
    side: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    batch: int = 1
    count: int = 1

    @property
    def parameters(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.kernel // 2, "groups": self.groups}

    def tensors(self, rng: np.random.Generator) -> Arrays:
        out = (self.side + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1
        shapes = {
            "grad_output": (self.batch, self.filters, out, out),
            "input": (self.batch, self.channels, self.side, self.side),
            "weight": (self.filters, self.channels // self.groups, self.kernel, self.kernel),
        }
        return {
            name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
        }


@dataclass(frozen=True)
class Sent:
    """One request: an operation, its tensors and parameters, and its frequency."""

    operation: str
    tensors: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, Any]
    count: int
    label: str


def _bottleneck(channels: int, side: int, count: int) -> list[Layer]:
    """ResNet-50's block: 1x1 down, 3x3, 1x1 up."""
    wide = 4 * channels
    return [
        Layer(wide, channels, side, kernel=1, count=count),
        Layer(channels, channels, side, count=count),
        Layer(channels, wide, side, kernel=1, count=count),
    ]


# He et al. 2015, table 1; strided layers lead into each stage.
RESNET50 = [
    Layer(3, 64, 56, kernel=7, stride=2),
    *_bottleneck(64, 14, 3),
    Layer(128, 128, 14, stride=2),
    *_bottleneck(128, 7, 3),
    Layer(256, 256, 7, stride=2),
    *_bottleneck(256, 4, 5),
    *_bottleneck(512, 2, 3),
]
# Howard et al. 2017, table 1: depthwise and pointwise layers alternate.
MOBILENET = [
    Layer(3, 32, 56, stride=2),
    *(
        layer
        for channels, filters, side, stride, count in (
            (32, 64, 28, 1, 1),
            (64, 128, 28, 2, 1),
            (128, 128, 14, 1, 1),
            (128, 256, 14, 2, 1),
            (256, 256, 7, 1, 1),
            (256, 512, 7, 2, 1),
            (512, 512, 4, 1, 5),
            (512, 1024, 4, 2, 1),
        )
        for layer in (
            Layer(channels, channels, side, stride=stride, groups=channels, count=count),
            Layer(channels, filters, -(-side // stride), kernel=1, count=count),
        )
    ),
]
SMALL = [Layer(4, 4, 8), Layer(8, 4, 6, kernel=1), Layer(8, 8, 5, groups=8)]
HUGE = [Layer(64, 64, 224, batch=2)]

MIXES: Mapping[str, Sequence[Layer]] = {
    "resnet50": RESNET50,
    "mobilenet": MOBILENET,
    "small": SMALL,
    "huge": HUGE,
}
"""By name; for the networks, every request sent ``count`` times is one training step."""

# The tensors of each gradient, and the size parameter that the client sends.
_GRADIENTS: Mapping[str, tuple[tuple[str, str], Callable[[Layer], dict[str, int]]]] = {
    "conv_bwd_data": (("grad_output", "weight"), lambda layer: {"input_size": layer.side}),
    "grouped_conv_bwd_weight": (
        ("input", "grad_output"),
        lambda layer: {"weight_size": layer.kernel},
    ),
}


def requests_of(mix: str, seed: int = 0) -> list[Sent]:
    """Return both gradients of every layer of a mix, without the gradient of the image."""
    rng = np.random.default_rng(seed)
    sent = []
    for layer in MIXES[mix]:
        tensors = layer.tensors(rng)
        for operation, (names, sizes) in _GRADIENTS.items():
            if operation == "conv_bwd_data" and layer.channels == 3:
                continue
            square = {name: (side, side) for name, side in sizes(layer).items()}
            chosen = {name: tensors[name] for name in names}
            parameters = {**layer.parameters, **square}
            sent.append(Sent(operation, chosen, parameters, layer.count, mix))
    return sent
