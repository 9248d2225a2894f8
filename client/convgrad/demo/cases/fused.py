"""Cases of the two fused convolutions."""

from __future__ import annotations

import numpy as np

from convgrad import Client
from convgrad.demo.cases.table import Array, CaseTable, Draw, Pairs
from convgrad.demo.gate import Expected, bounded
from convgrad.demo.reference import Convolution

__all__ = ["CASES"]

CASES = CaseTable()


@CASES.add("grouped_conv_conv_fwd", "depthwise 3x3, ReLU, then pointwise, with biases")
def _(client: Client, draw: Draw) -> Pairs:
    depthwise = Convolution(stride=(1, 1), padding=((1, 1),) * 2, dilation=(1, 1), groups=12)
    pointwise = Convolution(stride=(1, 1), padding=((0, 0),) * 2, dilation=(1, 1))
    input, weight0, bias0 = draw(2, 12, 6, 7), draw(12, 1, 3, 3), draw(12)
    weight1, bias1 = draw(9, 12, 1, 1), draw(9)
    answer = client.grouped_conv_conv_fwd(
        input,
        weight0,
        weight1,
        bias0,
        bias1,
        conv0={"padding": 1, "groups": 12},
        activation0="relu",
    )

    def first(x: Array, w: Array, b: Array) -> Array:
        output: Array = depthwise.forward(x, w) + b[:, None, None]
        return output

    def second(x: Array, w: Array, b: Array) -> Array:
        output: Array = pointwise.forward(x, w) + b[:, None, None]
        return output

    # ReLU does not increase errors, so the intermediate's error propagates through |weight1|.
    intermediate = bounded(first, input, weight0, bias0)
    rectified = np.maximum(intermediate.value, 0)
    exact1, exact_bias1 = weight1.astype(np.float64), bias1.astype(np.float64)
    output = bounded(second, rectified.astype(np.float32), weight1, bias1)
    inherited = pointwise.forward(intermediate.allowed, np.abs(exact1))
    yield (
        answer,
        Expected(second(rectified, exact1, exact_bias1), output.allowed + inherited, output.dtype),
    )
