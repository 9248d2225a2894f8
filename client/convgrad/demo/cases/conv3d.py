"""Cases of Ascend C's 3D convolutions, in its formats and in plain ones."""

from __future__ import annotations

import numpy as np

from convgrad import Client
from convgrad.demo.cases.table import Array, CaseTable, Draw, Pairs
from convgrad.demo.gate import bounded
from convgrad.demo.reference import Convolution, fractal_z_3d, ndc1hwc0

__all__ = ["CASES"]

CASES = CaseTable()


_CONV_3D = Convolution(stride=(1, 2, 2), padding=((1, 1),) * 3, dilation=(1, 1, 1))


@CASES.add("conv3d_backprop_input", "NDC1HWC0 and FRACTAL_Z_3D, float16")
def _(client: Client, draw: Draw) -> Pairs:
    grad_output = draw(1, 20, 3, 4, 3, dtype=np.float16)
    weight = draw(20, 17, 3, 3, 3, dtype=np.float16)
    size = (3, 8, 5)
    answer = client.conv3d_backprop_input(
        ndc1hwc0(grad_output, 16),
        fractal_z_3d(weight, 16),
        input_size=[1, 17, *size],
        weight_size=weight.shape,
        stride=_CONV_3D.stride,
        padding=1,
        grad_output_format="NDC1HWC0",
        weight_format="FRACTAL_Z_3D",
        output_format="NDC1HWC0",
    )
    expected = bounded(lambda g, w: _CONV_3D.grad_input(g, w, size), grad_output, weight)
    yield answer, expected.rearranged(lambda array: ndc1hwc0(array, 16))


@CASES.add("conv3d_backprop_input", "plain formats, one region of the gradient")
def _(client: Client, draw: Draw) -> Pairs:
    grad_output, weight, size = draw(2, 6, 4, 4, 3), draw(6, 3, 3, 3, 3), (4, 8, 6)
    answer = client.conv3d_backprop_input(
        grad_output,
        weight,
        input_size=size,
        stride=_CONV_3D.stride,
        padding=1,
        region={"d": [1, 3], "h": [2, 7]},
    )
    whole = bounded(lambda g, w: _CONV_3D.grad_input(g, w, size), grad_output, weight)
    yield answer, whole.rearranged(lambda array: array[:, :, 1:3, 2:7])


@CASES.add("conv3d_transpose", "two groups, bias, output_padding")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(2, 2, 1), padding=((1, 1),) * 3, dilation=(1, 1, 1), groups=2)
    input, weight, bias = draw(2, 4, 2, 3, 4), draw(4, 3, 3, 3, 3), draw(6)
    answer = client.conv3d_transpose(
        input, weight, bias, conv.stride, 1, output_padding=(1, 0, 0), groups=2
    )

    def formula(x: Array, w: Array, b: Array) -> Array:
        output: Array = conv.grad_input(x, w, (4, 5, 4)) + b[:, None, None, None]
        return output

    yield answer, bounded(formula, input, weight, bias)
