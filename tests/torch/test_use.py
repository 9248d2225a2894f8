"""`use`: models unchanged, their backward passes on a backend."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import convgrad.torch as ours
from convgrad import (
    ConnectionFailed,
    DeviceUnavailable,
    Internal,
    ServiceError,
    Unauthenticated,
)
from convgrad.torch import _prepared


class Residual(nn.Module):
    """A block of a ResNet with grouped and strided convolutions, and batch norm."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, stride, 1, groups=4),
            nn.BatchNorm2d(out),
        )
        self.side = nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.side(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3),
        nn.MaxPool2d(3, 2, 1),
        Residual(8, 16, 1),
        Residual(16, 32, 2),
        nn.ConvTranspose2d(32, 8, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 10).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_models_gradients_are_pytorchs(backend: ours.Backend, channels_last: bool) -> None:
    torch.manual_seed(1)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    model = network().to(memory_format=memory)
    x = torch.randn(4, 3, 32, 32).to(memory_format=memory)
    wanted = gradients(model, x)
    ours.report(reset=True)
    with ours.use(backend, fallback=False):
        found = gradients(model, x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    rows = ours.report(reset=True).rows
    assert {row.computed_by for row in rows} == {backend.name}
    # Eight convolutions, one of them transposed, and the pooling: one call each.
    assert sum(row.calls for row in rows) == 9


def test_the_report_has_the_times_of_calls(backend: ours.Backend) -> None:
    model, x = network(), torch.randn(2, 3, 32, 32)
    ours.report(reset=True)
    for _ in range(2):
        with ours.use(backend, fallback=False, time_calls=True):
            gradients(model, x)
    rows = ours.report(reset=True).rows
    assert sum(row.calls for row in rows) == 18
    assert all(row.ms is not None and 0 < row.ms < 60_000 for row in rows)
    with ours.use(backend, fallback=False):
        gradients(model, x)
    untimed = ours.report(reset=True)
    assert {row.ms for row in untimed.rows} == {None}
    assert "ms a call" in str(untimed)


def test_double_backward_passes_are_one_call_each(backend: ours.Backend) -> None:
    """A gradient penalty: it differentiates the gradient of the input by the parameters."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.Softplus(), nn.ConvTranspose2d(6, 4, 3, 2))
    x = torch.randn(2, 3, 9, 9, requires_grad=True)

    def penalized() -> list[torch.Tensor]:
        model.zero_grad()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = penalized()
    ours.report(reset=True)
    with ours.use(backend, fallback=False):
        found = penalized()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    calls: Counter[str] = Counter()
    for row in ours.report(reset=True).rows:
        calls[row.operation] += row.calls
    assert calls["conv_double_backward"] == calls["conv_transpose_double_backward"] == 1
    # Once for the gradient, and once for what goes on through the forward pass.
    assert sum(calls.values()) - 2 == 4


def test_third_derivatives_stay_pytorchs() -> None:
    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def third() -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, w).pow(4).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.square().sum(), w)[0]

    wanted = third()
    with ours.use(ours.Local()):
        torch.testing.assert_close(third(), wanted)


def test_for_good_it_holds_on_other_threads_until_the_next_call() -> None:
    layer, x = nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5, requires_grad=True)

    def calls() -> int:
        layer(x).sum().backward()
        return sum(row.calls for row in ours.report(reset=True).rows)

    ours.report(reset=True)
    ours.use(ours.Local())
    try:
        assert calls() == 1
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(calls).result() == 1
        with ours.use(None):
            assert calls() == 0
        assert calls() == 1
    finally:
        ours.use(None)
    assert calls() == 0


def test_outside_of_it_pytorch_computes() -> None:
    model, x = network(), torch.randn(2, 3, 32, 32)
    with ours.use(ours.Local()):
        pass
    ours.report(reset=True)
    gradients(model, x)
    assert not ours.report().rows


def test_two_runs_have_the_same_bits() -> None:
    model, x = network(), torch.randn(4, 3, 32, 32)
    with ours.use(ours.Local()):
        first, second = gradients(model, x), gradients(model, x)
    # Batch norm and the linear layer are PyTorch's, and on one CPU as deterministic.
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_a_backend_does_not_take_is_left_to_pytorch() -> None:
    x = torch.randn(1, 2, 5, 5, dtype=torch.complex64, requires_grad=True)
    w = torch.randn(2, 2, 3, 3, dtype=torch.complex64)
    real = torch.randn(0, 2, 5, 5, requires_grad=True)
    layer = nn.Conv2d(2, 2, 3)
    ours.report(reset=True)
    with ours.use(ours.Local()):
        torch.nn.functional.conv2d(x, w).abs().sum().backward()
        layer(real).sum().backward()
    rows = ours.report(reset=True).rows
    assert any(row.computed_by == "PyTorch" and "empty" in row.kernel for row in rows)
    half = torch.randn(1, 2, 5, 5, requires_grad=True)
    with ours.use(ours.Local(), fallback=False):
        layer(half).sum().backward()
    assert half.grad is not None


def test_backends_that_are_alike_share_what_they_prepared() -> None:
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 7, 11)
    sizes = []
    for local in (ours.Local(), ours.Local(), ours.Local(wait=False)):
        with ours.use(local):
            layer(x).sum().backward()
        sizes.append(len(_prepared.PASSES))
    assert sizes[0] == sizes[1] < sizes[2]


def test_what_pytorch_computes_faster_is_left_to_it() -> None:
    said = "PyTorch is faster: 1 us, not 2"

    class Slow(ours.Local):
        def prepare(self, *given: Any, **options: Any) -> Any:
            runner: Any = super().prepare(*given, **options)
            runner.prepared.faster_peer = said
            return runner

    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    w = torch.randn(2, 2, 3, 3)
    slow = Slow()
    for fallback, computed_by, kernel in ((True, "PyTorch", said), (False, "local", "bwd_data")):
        ours.report(reset=True)
        with ours.use(slow, fallback=fallback):
            nn.functional.conv2d(x, w).sum().backward()
        (row,) = ours.report(reset=True).rows
        assert (row.computed_by, row.calls) == (computed_by, 1)
        assert kernel in row.kernel
    with ours.use(slow):
        ours.conv2d(x, w).sum().backward()
    assert {row.computed_by for row in ours.report(reset=True).rows} == {"local"}


def test_a_server_that_is_gone_is_an_error_and_not_left_to_pytorch() -> None:
    layer, x = nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5, requires_grad=True)
    gone = ours.Remote("http://127.0.0.1:9")
    with ours.use(gone), pytest.raises(ConnectionFailed):
        layer(x).sum().backward()
    gone.close()


@pytest.mark.parametrize("error", [Unauthenticated, Internal, DeviceUnavailable])
def test_a_backend_that_fails_is_an_error(error: type[ServiceError]) -> None:
    class Failing:
        name = "failing"

        def prepare(self, *_: object, **__: object) -> ours.Runner:
            raise error("it cannot be had")

    x = torch.randn(1, 2, 5, 5, requires_grad=True)
    with ours.use(Failing()), pytest.raises(error, match="it cannot be had"):
        nn.functional.conv2d(x, torch.randn(2, 2, 3, 3)).sum().backward()


def test_training_follows_pytorchs_own() -> None:
    torch.manual_seed(2)
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10

    def train(steps: int) -> list[float]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    wanted = train(10)
    with ours.use(ours.Local()):
        found = train(10)
    assert found == pytest.approx(wanted, rel=1e-3)
    assert wanted[-1] < wanted[0]
