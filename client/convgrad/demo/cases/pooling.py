"""Cases of max pooling in 2D and 3D: forward, which is exact, and backward."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from convgrad import Client
from convgrad.demo.cases.table import CaseTable, Draw, Pairs, channels_last
from convgrad.demo.gate import bounded, exactly
from convgrad.demo.reference import MaxPool

__all__ = ["CASES"]

CASES = CaseTable()


_POOL_2D = MaxPool(kernel=(3, 3), stride=(2, 2), padding=(1, 1))
_POOL_3D = MaxPool(kernel=(2, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))


@CASES.add("maxpool2d_fwd", "overlapping windows, padding, int64 indices")
def _(client: Client, draw: Draw) -> Pairs:
    input = draw(2, 5, 9, 11)
    output, indices = _POOL_2D.forward(input.astype(np.float64))
    answer = client.maxpool2d_fwd(input, 3, 2, 1, return_indices=True)
    yield answer.output, exactly(output, "float32")
    yield answer.indices, exactly(indices, "int64")


@CASES.add("maxpool2d_fwd", "NHWC, bfloat16 with many ties")
def _(client: Client, draw: Draw) -> Pairs:
    input = np.round(draw(2, 5, 9, 11)).astype(ml_dtypes.bfloat16)
    output, indices = _POOL_2D.forward(input.astype(np.float64))
    answer = client.maxpool2d_fwd(
        channels_last(input), 3, 2, 1, return_indices=True, index_dtype="int32", layout="NHWC"
    )
    yield answer.output, exactly(output, ml_dtypes.bfloat16).rearranged(channels_last)
    yield answer.indices, exactly(indices, "int32").rearranged(channels_last)


@CASES.add("maxpool2d_bwd", "from the input, overlapping windows")
def _(client: Client, draw: Draw) -> Pairs:
    input, grad_output = draw(2, 5, 9, 11), draw(2, 5, 5, 6)
    _, indices = _POOL_2D.forward(input.astype(np.float64))
    answer = client.maxpool2d_bwd(grad_output, input, kernel_size=3, stride=2, padding=1)
    yield answer, bounded(lambda g: _POOL_2D.grad_input(g, indices, (9, 11)), grad_output)


@CASES.add("maxpool2d_bwd", "from indices, float16")
def _(client: Client, draw: Draw) -> Pairs:
    grad_output = draw(2, 5, 5, 6, dtype=np.float16)
    _, indices = _POOL_2D.forward(draw(2, 5, 9, 11, dtype=np.float64))
    answer = client.maxpool2d_bwd(
        grad_output, indices=indices, input_size=[9, 11], kernel_size=3, stride=2, padding=1
    )
    yield answer, bounded(lambda g: _POOL_2D.grad_input(g, indices, (9, 11)), grad_output)


@CASES.add("maxpool3d_fwd", "overlapping windows, a stride and pad per dimension")
def _(client: Client, draw: Draw) -> Pairs:
    input = draw(2, 3, 4, 7, 6)
    output, indices = _POOL_3D.forward(input.astype(np.float64))
    answer = client.maxpool3d_fwd(
        input, _POOL_3D.kernel, _POOL_3D.stride, _POOL_3D.padding, return_indices=True
    )
    yield answer.output, exactly(output, "float32")
    yield answer.indices, exactly(indices, "int64")


@CASES.add("maxpool3d_bwd", "from the input and from indices")
def _(client: Client, draw: Draw) -> Pairs:
    input, grad_output = draw(2, 3, 4, 7, 6), draw(2, 3, 3, 4, 3)
    _, indices = _POOL_3D.forward(input.astype(np.float64))
    expected = bounded(lambda g: _POOL_3D.grad_input(g, indices, (4, 7, 6)), grad_output)
    from_input = client.maxpool3d_bwd(
        grad_output,
        input,
        kernel_size=_POOL_3D.kernel,
        stride=_POOL_3D.stride,
        padding=_POOL_3D.padding,
    )
    yield from_input, expected
    from_indices = client.maxpool3d_bwd(
        grad_output,
        indices=indices,
        input_size=[4, 7, 6],
        kernel_size=_POOL_3D.kernel,
        stride=_POOL_3D.stride,
        padding=_POOL_3D.padding,
    )
    yield from_indices, expected
