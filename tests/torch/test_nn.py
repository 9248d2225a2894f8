"""`convgrad.torch.nn`: torch.nn's modules, computed by a backend."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import convgrad.torch as ours

MODULES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Conv", (4, 6, 3), {"stride": 2, "padding": 1, "groups": 2}),
    ("Conv", (4, 6, 3), {"padding": "same", "dilation": 2}),
    ("Conv", (4, 6, 3), {"padding": 1, "padding_mode": "circular", "bias": False}),
    ("ConvTranspose", (4, 6, 3), {"stride": 2, "output_padding": 1}),
    ("MaxPool", (3, 2), {"padding": 1, "ceil_mode": True}),
    ("AvgPool", (3, 2), {"padding": 1, "count_include_pad": False}),
    ("AdaptiveAvgPool", (3,), {}),
    ("AdaptiveMaxPool", (3,), {}),
]


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize(("kind", "arguments", "options"), MODULES)
def test_a_module_computes_what_torchs_does(
    ndim: int, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    theirs = getattr(nn, f"{kind}{ndim}d")(*arguments, **options).double()
    module = getattr(ours.nn, f"{kind}{ndim}d")(*arguments, **options).double()
    module.load_state_dict(theirs.state_dict())
    assert repr(module) == repr(theirs)
    x = torch.randn(2, 4, *(7,) * ndim, dtype=torch.double, requires_grad=True)

    def both(module: nn.Module) -> list[torch.Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])]

    ours.report(reset=True)
    for found, wanted in zip(both(module), both(theirs), strict=True):
        torch.testing.assert_close(found, wanted)
    assert sum(row.calls for row in ours.report(reset=True).rows) == 2


def test_unpooling_and_return_indices() -> None:
    x = torch.randn(2, 3, 6, 6)
    values, indices = ours.nn.MaxPool2d(2, return_indices=True)(x)
    found = ours.nn.MaxUnpool2d(2)(values, indices)
    assert torch.equal(found, nn.MaxUnpool2d(2)(values, indices))
    assert ours.nn.AdaptiveMaxPool2d(2, return_indices=True)(x)[1].dtype is torch.int64


def test_transposed_convolutions_take_an_output_size() -> None:
    module = ours.nn.ConvTranspose2d(3, 2, 3, stride=3)
    assert module(torch.randn(1, 3, 4, 4), output_size=[13, 14]).shape == (1, 2, 13, 14)


def test_replace_converts_a_model_in_place() -> None:
    class Special(nn.Conv2d):
        pass

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.MaxPool2d(2)), Special(4, 2, 1))
    x = torch.randn(2, 3, 8, 8)
    before, parameters = model(x), list(model.parameters())
    called: list[str] = []
    model[0].register_forward_hook(lambda *_: called.append("hook"))
    assert ours.nn.replace(model) is model
    assert [type(each) for each in model] == [ours.nn.Conv2d, nn.Sequential, Special]
    assert type(model[1][0]) is ours.nn.MaxPool2d
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    ours.report(reset=True)
    torch.testing.assert_close(model(x), before)
    assert called == ["hook"]
    assert {row.operation for row in ours.report(reset=True).rows} == {"conv_fwd", "maxpool2d_fwd"}


def test_modules_are_copied_and_pickled() -> None:
    module = ours.nn.Conv2d(2, 2, 3)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        assert type(again) is ours.nn.Conv2d
        assert torch.equal(again.weight, module.weight)
