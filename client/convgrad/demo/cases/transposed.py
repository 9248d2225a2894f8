"""Cases of transposed convolutions, and of all double backward passes."""

from __future__ import annotations

from convgrad import Client
from convgrad.demo.cases.table import Array, CaseTable, Draw, Pairs, channels_last
from convgrad.demo.gate import bounded
from convgrad.demo.reference import Convolution

__all__ = ["CASES"]

CASES = CaseTable()


@CASES.add("conv_transpose_fwd", "2D, NHWC, bfloat16, upsampling by 2 with a bias")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(2, 2), padding=((0, 0),) * 2, dilation=(1, 1))
    input, weight = draw(2, 16, 5, 6, dtype="bfloat16"), draw(16, 8, 2, 2, dtype="bfloat16")
    bias = draw(8, dtype="bfloat16")
    answer = client.conv_transpose_fwd(
        channels_last(input), channels_last(weight), bias, stride=2, layout="NHWC"
    )

    def formula(x: Array, w: Array, b: Array) -> Array:
        output: Array = conv.grad_input(x, w, (10, 12)) + b[:, None, None]
        return output

    yield answer, bounded(formula, input, weight, bias).rearranged(channels_last)


@CASES.add("conv_transpose_backward", "1D, two groups, dilated, output_padding")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(3,), padding=((1, 1),), dilation=(2,), groups=2)
    grad_output, input, weight = draw(2, 6, 23), draw(2, 4, 7), draw(4, 3, 3)
    answer = client.conv_transpose_backward(
        grad_output, input, weight, stride=3, padding=1, output_padding=2, dilation=2, groups=2
    )
    yield answer.grad_input, bounded(lambda g, w: conv.forward(g, w), grad_output, weight)
    yield (
        answer.grad_weight,
        bounded(lambda g, x: conv.grad_weight(g, x, (3,)), grad_output, input),
    )
    yield answer.grad_bias, bounded(lambda g: g.sum(axis=(0, 2)), grad_output)


@CASES.add("conv_double_backward", "2D, strided, all gradients given")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(2, 1), padding=((1, 1),) * 2, dilation=(1, 1))
    grad_output, input, weight = draw(2, 5, 4, 6), draw(2, 3, 8, 6), draw(5, 3, 3, 3)
    ggx, ggw, ggb = draw(2, 3, 8, 6), draw(5, 3, 3, 3), draw(5)
    answer = client.conv_double_backward(
        grad_output,
        input,
        weight,
        grad_grad_input=ggx,
        grad_grad_weight=ggw,
        grad_grad_bias=ggb,
        stride=(2, 1),
        padding=1,
    )

    def formula(x: Array, w: Array, vx: Array, vw: Array, vb: Array) -> Array:
        both: Array = conv.forward(vx, w) + conv.forward(x, vw) + vb[:, None, None]
        return both

    yield answer.grad_grad_output, bounded(formula, input, weight, ggx, ggw, ggb)
    yield (
        answer.grad_input,
        bounded(lambda g, v: conv.grad_input(g, v, (8, 6)), grad_output, ggw),
    )
    yield (
        answer.grad_weight,
        bounded(lambda v, g: conv.grad_weight(v, g, (3, 3)), ggx, grad_output),
    )


@CASES.add("conv_transpose_double_backward", "3D, float16, of grad_input alone")
def _(client: Client, draw: Draw) -> Pairs:
    conv = Convolution(stride=(1, 2, 2), padding=((0, 0),) * 3, dilation=(1, 1, 1))
    input, weight = draw(1, 4, 2, 3, 3, dtype="float16"), draw(4, 3, 2, 2, 2, dtype="float16")
    grad_output, ggx = draw(1, 3, 3, 6, 6, dtype="float16"), draw(1, 4, 2, 3, 3, dtype="float16")
    answer = client.conv_transpose_double_backward(
        grad_output,
        input,
        weight,
        grad_grad_input=ggx,
        stride=(1, 2, 2),
        outputs=["grad_grad_output", "grad_weight"],
    )
    yield (
        answer.grad_grad_output,
        bounded(lambda v, w: conv.grad_input(v, w, (3, 6, 6)), ggx, weight),
    )
    yield (
        answer.grad_weight,
        bounded(lambda g, v: conv.grad_weight(g, v, (2, 2, 2)), grad_output, ggx),
    )
