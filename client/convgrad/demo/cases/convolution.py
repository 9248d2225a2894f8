"""Cases of the convolutions in 1D, 2D and 3D: forward, and every gradient."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from convgrad import Client
from convgrad.demo.cases.table import Array, CaseTable, Draw, Pairs, channels_last
from convgrad.demo.gate import bounded
from convgrad.demo.reference import Convolution

__all__ = ["CASES"]

CASES = CaseTable()


@CASES.add("conv_bwd_data", "1D, stride 3 above the kernel, rows past the last window")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(3,), padding=((0, 0),), dilation=(1,))
    grad_output, weight = draw(2, 6, 5), draw(6, 4, 2)
    answer = client.conv_bwd_data(grad_output, weight, stride=3, input_size=[16])
    yield answer, bounded(lambda g, w: conv.grad_input(g, w, (16,)), grad_output, weight)


@CASES.add("conv_bwd_data", "2D, NHWC, bfloat16, a pair of pads")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(2, 1), padding=((1, 0), (2, 1)), dilation=(1, 2))
    grad_output = draw(2, 16, 4, 6, dtype=ml_dtypes.bfloat16)
    weight = draw(16, 8, 3, 3, dtype=ml_dtypes.bfloat16)
    size = (9, 7)
    answer = client.conv_bwd_data(
        channels_last(grad_output),
        channels_last(weight),
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        input_size=size,
        layout="NHWC",
    )
    expected = bounded(lambda g, w: conv.grad_input(g, w, size), grad_output, weight)
    yield answer, expected.rearranged(channels_last)


@CASES.add("conv_bwd_data", "3D, two groups, alpha * grad + beta * accumulate")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(1, 2, 2), padding=((1, 1),) * 3, dilation=(1, 1, 1), groups=2)
    grad_output, weight, old = draw(1, 6, 3, 3, 3), draw(6, 4, 3, 3, 3), draw(1, 8, 3, 5, 5)
    alpha, beta = np.float32(-0.5), np.float32(2)
    answer = client.conv_bwd_data(
        grad_output,
        weight,
        stride=conv.stride,
        padding=1,
        groups=2,
        alpha=float(alpha),
        beta=float(beta),
        accumulate=old,
    )

    def formula(g: Array, w: Array, acc: Array, a: Array, b: Array) -> Array:
        grad: Array = a * conv.grad_input(g, w, (3, 5, 5)) + b * acc
        return grad

    scalars = np.asarray(alpha), np.asarray(beta)
    yield answer, bounded(formula, grad_output, weight, old, *scalars)


@CASES.add("grouped_conv_bwd_weight", "1D, four groups, float64")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(2,), padding=((1, 1),), dilation=(1,), groups=4)
    input, grad_output = draw(3, 8, 11, dtype=np.float64), draw(3, 12, 6, dtype=np.float64)
    answer = client.grouped_conv_bwd_weight(
        input=input, grad_output=grad_output, stride=2, padding=1, groups=4, weight_size=[3]
    )
    expected = bounded(lambda x, g: conv.grad_weight(x, g, (3,)), input, grad_output)
    yield answer.grad_weight, expected


@CASES.add("grouped_conv_bwd_weight", "2D, depthwise, float16 into float32, with the bias")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(1, 1), padding=((1, 1),) * 2, dilation=(1, 1), groups=16)
    input, grad_output = (draw(2, 16, 7, 7, dtype=np.float16) for _ in range(2))
    answer = client.grouped_conv_bwd_weight(
        input=input,
        grad_output=grad_output,
        padding=1,
        groups=16,
        weight_size=[3, 3],
        weight_dtype="float32",
        outputs=["grad_weight", "grad_bias"],
    )
    yield (
        answer.grad_weight,
        bounded(lambda x, g: conv.grad_weight(x, g, (3, 3)), input, grad_output, out="float32"),
    )
    yield answer.grad_bias, bounded(lambda g: g.sum(axis=(0, 2, 3)), grad_output, out="float32")


@CASES.add("grouped_conv_bwd_weight", "3D, NDHWC, dilated")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(1, 1, 1), padding=((1, 1),) * 3, dilation=(1, 2, 2))
    input, grad_output = draw(2, 3, 4, 6, 6), draw(2, 5, 4, 4, 4)
    answer = client.grouped_conv_bwd_weight(
        input=channels_last(input),
        grad_output=channels_last(grad_output),
        padding=1,
        dilation=conv.dilation,
        layout="NDHWC",
        weight_size=[3, 3, 3],
    )
    expected = bounded(lambda x, g: conv.grad_weight(x, g, (3, 3, 3)), input, grad_output)
    yield answer.grad_weight, expected.rearranged(channels_last)


@CASES.add("conv_fwd", "2D, dilated, two groups, bias, padding beyond the kernel")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(1, 2), padding=((4, 4), (1, 1)), dilation=(2, 1), groups=2)
    input, weight, bias = draw(2, 6, 5, 7), draw(8, 3, 3, 3), draw(8)
    answer = client.conv_fwd(input, weight, bias, (1, 2), (4, 1), (2, 1), 2)

    def formula(x: Array, w: Array, b: Array) -> Array:
        output: Array = conv.forward(x, w) + b[:, None, None]
        return output

    yield answer, bounded(formula, input, weight, bias)


@CASES.add("conv_backward", "all three gradients of one request, bfloat16")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(2, 2), padding=((1, 1),) * 2, dilation=(1, 1))
    grad_output = draw(3, 6, 4, 4, dtype=ml_dtypes.bfloat16)
    input, weight = draw(3, 5, 8, 7, dtype="bfloat16"), draw(6, 5, 3, 3, dtype="bfloat16")
    answer = client.conv_backward(grad_output, input, weight, stride=2, padding=1)
    yield (
        answer.grad_input,
        bounded(lambda g, w: conv.grad_input(g, w, (8, 7)), grad_output, weight),
    )
    yield (
        answer.grad_weight,
        bounded(lambda x, g: conv.grad_weight(x, g, (3, 3)), input, grad_output),
    )
    yield answer.grad_bias, bounded(lambda g: g.sum(axis=(0, 2, 3)), grad_output)
