"""Fused forwards whose channels fill 16-byte vectors: what the fused GPU kernels take, corner by
corner."""

from __future__ import annotations

from typing import Any

from tests.support.numerics.cases import Case, fused
from tests.support.numerics.geometries import Conv

__all__ = ["LAYOUT", "POINTWISE", "SEPARABLE"]

LAYOUT = {1: "NWC", 2: "NHWC", 3: "NDHWC"}
"""Channels last, by the number of dimensions."""


def _depthwise(
    channels: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    batch: int = 2,
) -> Conv:
    return Conv(batch, channels, channels, size, kernel, stride, padding, dilation, channels)


def _pointwise(outputs: int, ndim: int = 2) -> Conv:
    return Conv(0, 0, outputs, (), (1,) * ndim)


ALL = (True, True)

SEPARABLE: list[Case] = [
    fused("3x3", _depthwise(16, (9, 11), (3, 3), 1, 1), _pointwise(24)),
    # One chunk of channels with a tail, outputs in no whole vectors.
    fused("tails", _depthwise(40, (7, 7), (3, 3), 1, 1), _pointwise(67), ("relu", "silu"), ALL),
    # Two chunks, two passes' worth of outputs.
    fused(
        "strided",
        _depthwise(72, (15, 13), (3, 3), 2, 1, batch=3),
        _pointwise(130),
        ("relu6", "relu"),
        (True, False),
    ),
    # More chunks than weights are kept for, outputs beyond one pass.
    fused("deep", _depthwise(200, (7, 7), (3, 3), 1, 1), _pointwise(300), ("relu", "none"), ALL),
    fused("passes", _depthwise(136, (5, 5), (3, 3), 1, 1), _pointwise(600), ("none", "relu6"), ALL),
    fused("one_pixel", _depthwise(8, (1, 1), (3, 3), 1, 1, batch=1), _pointwise(8)),
    # Rows beyond 48 pixels: tiles are rectangles; more of them than there are multiprocessors.
    fused("rectangles", _depthwise(24, (35, 60), (3, 3), 1, 1, batch=5), _pointwise(40)),
    fused("5x5", _depthwise(24, (9, 8), (5, 5), 1, 2), _pointwise(40)),
    fused("5x5_strided", _depthwise(24, (9, 8), (5, 5), 2, (2, 1)), _pointwise(40)),
    fused("7x7", _depthwise(24, (9, 8), (7, 7), 1, 3), _pointwise(40), ("silu", "silu"), ALL),
    fused("7x7_strided", _depthwise(24, (12, 13), (7, 7), 2, 3), _pointwise(41)),
    fused(
        "dilated",
        _depthwise(24, (12, 13), (2, 3), (3, 2), ((1, 0), (2, 3)), (2, 3)),
        _pointwise(41),
    ),
    fused("padding_beyond", _depthwise(8, (3, 4), (3, 3), 1, 5), _pointwise(16)),
    fused("1d", _depthwise(24, (50,), (5,), 1, ((4, 0),)), _pointwise(41, 1)),
    fused("3d", _depthwise(24, (5, 6, 7), (3, 3, 3), 1, 1), _pointwise(41, 3)),
]

POINTWISE: list[Case] = [
    fused("1x1", Conv(2, 16, 24, (9, 11), (1, 1)), _pointwise(24)),
    fused("1x1_tails", Conv(2, 72, 200, (9, 11), (1, 1)), _pointwise(67), ("relu", "silu"), ALL),
    fused(
        "1x1_passes", Conv(2, 200, 320, (9, 11), (1, 1)), _pointwise(520), ("relu6", "relu"), ALL
    ),
    fused("1x1_whole", Conv(3, 64, 64, (19, 11), (1, 1)), _pointwise(64), ("silu", "none"), ALL),
]
