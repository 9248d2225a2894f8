"""Cases of average pooling, adaptive pooling, 1D max pooling and max unpooling."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from convgrad import Client
from convgrad.demo.cases.table import Array, CaseTable, Draw, Pairs, channels_last
from convgrad.demo.gate import Expected, exactly, within
from convgrad.demo.reference import MaxPool, Windows

__all__ = ["CASES"]

CASES = CaseTable()

_AVERAGE = Windows.sliding((9, 11), (3, 3), (2, 2), (1, 1))
_ADAPTIVE = Windows.adaptive((9, 11), (4, 5))
_POOL_2X2 = MaxPool(kernel=(2, 2), stride=(2, 2), padding=(0, 0))
_POOL_1D = MaxPool(kernel=(3,), stride=(2,), padding=(1,))
# Roundings besides additions: reciprocals of the sizes in three dimensions, and their products.
_FACTORS = 6


def _mean(windows: Windows, input: Array) -> Expected:
    exact = input.astype(np.float64)
    most = max(size for _, _, size in windows.each())
    value, magnitude = windows.means(exact), windows.means(np.abs(exact))
    return within(value, magnitude, np.full(value.shape, most + 1), input.dtype)


def _spread(windows: Windows, grad_output: Array, input_size: tuple[int, ...]) -> Expected:
    exact = grad_output.astype(np.float64)
    value = windows.spread(exact, input_size)
    magnitude = windows.spread(np.abs(exact), input_size)
    most = max(size for _, _, size in windows.each())
    return within(value, magnitude, np.full(value.shape, most + _FACTORS), grad_output.dtype)


@CASES.add("avg_pool_fwd", "overlapping windows whose padding counts")
def _(client: Client, draw: Draw) -> Pairs:
    input = draw(2, 5, 9, 11)
    yield client.avg_pool_fwd(input, 3, 2, 1), _mean(_AVERAGE, input)


@CASES.add("avg_pool_bwd", "NHWC, bfloat16")
def _(client: Client, draw: Draw) -> Pairs:
    grad_output = draw(2, 8, 5, 6, dtype=ml_dtypes.bfloat16)
    answer = client.avg_pool_bwd(
        channels_last(grad_output),
        input_size=[9, 11],
        kernel_size=3,
        stride=2,
        padding=1,
        layout="NHWC",
    )
    yield answer, _spread(_AVERAGE, grad_output, (9, 11)).rearranged(channels_last)


@CASES.add("adaptive_avg_pool_fwd", "windows of several sizes")
def _(client: Client, draw: Draw) -> Pairs:
    input = draw(2, 5, 9, 11)
    yield client.adaptive_avg_pool_fwd(input, (4, 5)), _mean(_ADAPTIVE, input)


@CASES.add("adaptive_avg_pool_bwd", "windows of several sizes")
def _(client: Client, draw: Draw) -> Pairs:
    grad_output = draw(2, 5, 4, 5)
    answer = client.adaptive_avg_pool_bwd(grad_output, [9, 11])
    yield answer, _spread(_ADAPTIVE, grad_output, (9, 11))


@CASES.add("adaptive_max_pool_fwd", "windows of several sizes, int64 indices")
def _(client: Client, draw: Draw) -> Pairs:
    input = draw(2, 5, 9, 11)
    output, indices = _ADAPTIVE.maxima(input.astype(np.float64))
    answer = client.adaptive_max_pool_fwd(input, (4, 5), return_indices=True)
    yield answer.output, exactly(output, "float32")
    yield answer.indices, exactly(indices, "int64")


@CASES.add("adaptive_max_pool_bwd", "from the input and from indices")
def _(client: Client, draw: Draw) -> Pairs:
    input, grad_output = draw(2, 5, 9, 11), draw(2, 5, 4, 5)
    _, indices = _ADAPTIVE.maxima(input.astype(np.float64))
    route = MaxPool(kernel=(1, 1), stride=(1, 1), padding=(0, 0)).grad_input
    exact = grad_output.astype(np.float64)
    value = route(exact, indices, (9, 11))
    terms = route(np.ones_like(exact), indices, (9, 11))
    expected = within(value, route(np.abs(exact), indices, (9, 11)), terms, np.float32)
    yield client.adaptive_max_pool_bwd(grad_output, input), expected
    from_indices = client.adaptive_max_pool_bwd(grad_output, indices=indices, input_size=[9, 11])
    yield from_indices, expected


@CASES.add("maxpool1d_fwd", "overlapping windows, int64 indices")
def _(client: Client, draw: Draw) -> Pairs:
    input = draw(2, 5, 20)
    output, indices = _POOL_1D.forward(input.astype(np.float64))
    answer = client.maxpool1d_fwd(input, 3, 2, 1, return_indices=True)
    yield answer.output, exactly(output, "float32")
    yield answer.indices, exactly(indices, "int64")


@CASES.add("maxpool1d_bwd", "from the input")
def _(client: Client, draw: Draw) -> Pairs:
    input, grad_output = draw(2, 5, 20), draw(2, 5, 10)
    _, indices = _POOL_1D.forward(input.astype(np.float64))
    exact = grad_output.astype(np.float64)
    value = _POOL_1D.grad_input(exact, indices, (20,))
    magnitude = _POOL_1D.grad_input(np.abs(exact), indices, (20,))
    answer = client.maxpool1d_bwd(grad_output, input, kernel_size=3, stride=2, padding=1)
    yield answer, within(value, magnitude, np.full(value.shape, 3), np.float32)


@CASES.add("max_unpool_fwd", "what max pooling took, where it was")
def _(client: Client, draw: Draw) -> Pairs:
    output, indices = _POOL_2X2.forward(draw(2, 5, 8, 10, dtype=np.float64))
    output = output.astype(np.float32)
    answer = client.max_unpool_fwd(output, indices, 2)
    yield answer, exactly(_POOL_2X2.grad_input(output, indices, (8, 10)), "float32")


@CASES.add("max_unpool_bwd", "each index's element")
def _(client: Client, draw: Draw) -> Pairs:
    _, indices = _POOL_2X2.forward(draw(2, 5, 8, 10, dtype=np.float64))
    grad_output = draw(2, 5, 8, 10)
    flat = grad_output.reshape(2, 5, -1)
    expected = np.take_along_axis(flat, indices.reshape(2, 5, -1), axis=2).reshape(indices.shape)
    yield client.max_unpool_bwd(grad_output, indices), exactly(expected, "float32")
