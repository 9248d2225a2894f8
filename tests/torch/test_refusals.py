"""What convgrad.torch does not take: PyTorch computes it, or raises its own error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import convgrad.torch as ours
from convgrad import InvalidProblem

Call = Callable[[Any], Any]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

IMAGE, WEIGHT = torch.ones(1, 2, 8, 8), torch.ones(4, 2, 3, 3)
PLACES = torch.arange(16).reshape(1, 1, 4, 4).expand(1, 2, 4, 4)

WRONG: dict[str, Call] = {
    "channels": lambda library: library.conv2d(IMAGE[:, :1], WEIGHT),
    "groups": lambda library: library.conv2d(IMAGE, WEIGHT, groups=3),
    "no groups": lambda library: library.conv2d(IMAGE, WEIGHT, groups=0),
    "small input": lambda library: library.conv2d(IMAGE[..., :2], WEIGHT),
    "negative padding": lambda library: library.conv2d(IMAGE, WEIGHT, padding=-1),
    "stride 0": lambda library: library.conv2d(IMAGE, WEIGHT, stride=0),
    "dilation 0": lambda library: library.conv2d(IMAGE, WEIGHT, dilation=0),
    "three strides": lambda library: library.conv2d(IMAGE, WEIGHT, stride=(1, 1, 1)),
    "two dimensions": lambda library: library.conv2d(IMAGE[0, 0], WEIGHT),
    "1D weight": lambda library: library.conv2d(IMAGE, WEIGHT[0]),
    "bias": lambda library: library.conv2d(IMAGE, WEIGHT, torch.ones(3)),
    "dtypes": lambda library: library.conv2d(IMAGE, WEIGHT.double()),
    "name of a padding": lambda library: library.conv2d(IMAGE, WEIGHT, padding="valud"),
    "same with stride": lambda library: library.conv2d(IMAGE, WEIGHT, padding="same", stride=2),
    "output_padding": lambda library: library.conv_transpose2d(IMAGE, WEIGHT[:2], output_padding=1),
    "negative output": lambda library: library.conv_transpose2d(
        IMAGE[..., :1, :1], WEIGHT[:2], padding=2
    ),
    "padding of pooling": lambda library: library.max_pool2d(IMAGE, 2, padding=2),
    "kernel 0": lambda library: library.max_pool2d(IMAGE, 0),
    "large kernel": lambda library: library.max_pool2d(IMAGE, 9),
    "padding of averages": lambda library: library.avg_pool2d(IMAGE, 2, padding=2),
    "divisor 0": lambda library: library.avg_pool2d(IMAGE, 2, divisor_override=0),
    "negative size": lambda library: library.adaptive_avg_pool2d(IMAGE, -1),
    "three sizes": lambda library: library.adaptive_avg_pool2d(IMAGE, (1, 2, 3)),
    "no rows": lambda library: library.adaptive_max_pool2d(IMAGE[:, :, :0], 2),
    "dtype of indices": lambda library: library.max_unpool2d(IMAGE, IMAGE, 2),
    "shape of indices": lambda library: library.max_unpool2d(IMAGE, PLACES, 2),
    "large indices": lambda library: library.max_unpool2d(IMAGE[..., :4, :4], PLACES + 999, 2),
    "size of unpooling": lambda library: library.max_unpool2d(
        IMAGE[..., :4, :4], PLACES, 2, output_size=(90, 90)
    ),
    "integers": lambda library: library.adaptive_avg_pool2d(IMAGE.int(), 2),
    "bytes": lambda library: library.avg_pool2d(IMAGE.byte(), 2),
    "integers' places": lambda library: library.max_unpool2d(IMAGE[..., :4, :4].int(), PLACES, 2),
}

LEFT: dict[str, Call] = {
    "integers": lambda library: library.max_pool2d(torch.arange(16).view(1, 1, 4, 4), 2),
    "no results": lambda library: library.adaptive_avg_pool2d(IMAGE, 0),
    "an image": lambda library: library.adaptive_avg_pool2d(IMAGE[0, 0], 1),
    "far taps": lambda library: library.conv2d(IMAGE, WEIGHT[..., :1, :1], dilation=2**40),
    "oneDNN's layout": lambda library: library.max_pool2d(IMAGE.to_mkldnn(), 2).to_dense(),
    "quantized": lambda library: library.adaptive_avg_pool2d(
        torch.quantize_per_tensor(IMAGE, 0.5, 0, torch.quint8), 2
    ).dequantize(),
}


@pytest.fixture(autouse=True)
def _on(backend: ours.Backend) -> Iterator[None]:
    with ours.use(backend):
        yield


def answer(call: Call, library: Any) -> Any:
    """Return the result, or the error."""
    try:
        return call(library)
    except Exception as error:  # noqa: BLE001 - any error is compared
        return error


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_pytorchs(name: str) -> None:
    wanted, found = answer(WRONG[name], functional), answer(WRONG[name], ours)
    assert isinstance(wanted, Exception)
    assert type(found) is type(wanted)
    assert str(found) == str(wanted)


@pytest.mark.parametrize("name", LEFT)
def test_pytorch_computes_what_it_takes(name: str) -> None:
    ours.report(reset=True)
    found = answer(LEFT[name], ours)
    torch.testing.assert_close(found, answer(LEFT[name], functional))
    (row,) = ours.report(reset=True).rows
    assert row.computed_by == "PyTorch"
    assert row.kernel


def test_a_replaced_module_raises_what_pytorchs_does() -> None:
    layer = ours.nn.replace(nn.Conv2d(3, 4, 3))
    with pytest.raises(RuntimeError, match="to have 3 channels") as caught:
        layer(IMAGE)
    assert isinstance(caught.value.__context__, InvalidProblem)  # and says what was expected


def test_without_fallback_the_refusal_is_raised(backend: ours.Backend) -> None:
    with ours.use(backend, fallback=False):
        with pytest.raises(InvalidProblem, match="output_size"):
            ours.adaptive_avg_pool2d(IMAGE, 0)
        with pytest.raises(ValueError, match="expected one, or 2"):
            ours.conv2d(IMAGE, WEIGHT, stride=(1, 1, 1))
