"""The functions of `convgrad.torch` take what PyTorch's take: transforms, proxies, any tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import convgrad.torch as ours

Tensor = torch.Tensor
Run = Callable[[Any], Any]
# PyTorch's own: rules for forward mode are compiled by it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def _on(backend: ours.Backend) -> Iterator[None]:
    with ours.use(backend):
        yield


def same(run: Run, tolerance: float = 1e-5) -> None:
    """Run with PyTorch's functions, and with ours."""
    with ours.use(None):
        wanted = run(functional)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        found = run(ours)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def layers(library: Any, weight: Tensor, x: Tensor) -> Tensor:
    """A convolution, an activation, two kinds of pooling."""
    y = library.conv2d(x, weight, padding=1).tanh()
    pooled: Tensor = library.avg_pool2d(library.max_pool2d(y, 2), (2, 1))
    return pooled


@pytest.fixture
def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(3, 2, 3, 3, dtype=torch.double)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 2, 6, 6, dtype=torch.double)


def test_gradients_per_sample(weight: Tensor, x: Tensor) -> None:
    def run(library: Any) -> Any:
        def loss(weight: Tensor, one: Tensor) -> Tensor:
            return layers(library, weight, one[None]).square().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    same(run)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_jacobians(transform: Any, weight: Tensor, x: Tensor) -> None:
    same(lambda library: transform(lambda each: layers(library, each, x[:1]))(weight))


def test_forward_mode_does_not_lose_tangents(weight: Tensor, x: Tensor) -> None:
    tangents = torch.ones_like(weight), torch.ones_like(x)
    same(
        lambda library: torch.func.jvp(lambda *both: layers(library, *both), (weight, x), tangents)
    )

    def dual(library: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            made = torch.autograd.forward_ad.make_dual(x, tangents[1])
            y = library.adaptive_avg_pool2d(library.avg_pool1d(made[0], 2, divisor_override=3), 2)
            return torch.autograd.forward_ad.unpack_dual(y)

    assert dual(ours).tangent is not None


def test_vmap_has_batching_rules(x: Tensor) -> None:
    def run(library: Any) -> list[Any]:
        return [
            torch.vmap(lambda one: library.adaptive_avg_pool2d(one, 2))(x),
            torch.vmap(lambda one: library.adaptive_max_pool2d(one, 2))(x),
            torch.vmap(lambda one: library.avg_pool1d(one, 3, 2, 1))(x),
            torch.vmap(lambda one: library.conv_transpose2d(one, torch.ones_like(x)[:2]))(x),
        ]

    same(run)


def test_vmap_of_gradients_and_separable_convolutions(weight: Tensor, x: Tensor) -> None:
    grad = torch.randn(4, 3, 4, 4, dtype=torch.double)
    depthwise, pointwise = weight[:2, :1], weight[:, :, :1, :1]
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    cases: list[tuple[Callable[..., Tensor], Tensor]] = [
        (lambda each: ours.conv2d_weight(x, weight.shape, each), grad),
        (lambda each: ours.conv2d_input(x.shape, weight, each), grad),
        (lambda each: ours.convolution_backward(each, x, weight, [3], *geometry)[0], grad),  # type: ignore[return-value]
        (lambda each: ours.separable_conv2d(each, depthwise, pointwise, None, 2, 1), x),
    ]
    for function, tensor in cases:
        several = torch.stack([tensor, 2 * tensor])
        wanted = torch.stack([function(each) for each in several])
        torch.testing.assert_close(torch.vmap(function)(several), wanted)


def test_what_is_left_to_pytorch_is_reported(weight: Tensor, x: Tensor) -> None:
    ours.report(reset=True)
    torch.vmap(lambda one: ours.conv2d(one, weight))(x)
    (row,) = ours.report(reset=True).rows
    assert (row.operation, row.computed_by) == ("conv2d", "PyTorch")
    assert "functorch" in row.kernel


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 6, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 3, 3, 3, dtype=dtype, requires_grad=True)

    def run(library: Any) -> Any:
        y = library.conv_transpose2d(library.conv2d(x, weight), weight)
        return y, *torch.autograd.grad(y.abs().sum(), (x, weight))

    same(run, 1e-3)


def test_tensors_without_memory(weight: Tensor) -> None:
    x = torch.empty(2, 2, 8, 8, device="meta", requires_grad=True)
    y = layers(ours, weight.float().to("meta"), x)
    y.sum().backward()
    assert y.is_meta
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_autocast_leaves_float64(weight: Tensor, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.conv2d(x, weight).dtype is functional.conv2d(x, weight).dtype is torch.double
        single = x.float(), weight.float()
        assert ours.conv2d(*single).dtype is functional.conv2d(*single).dtype is torch.bfloat16


def test_sizes_may_be_numpys_and_a_stride_empty(weight: Tensor, x: Tensor) -> None:
    def run(library: Any) -> list[Tensor]:
        return [
            library.conv2d(x, weight, None, np.int64(2), padding=np.int32(1)),
            library.max_pool2d(x, (np.int64(3), np.int64(2)), stride=[]),
        ]

    same(run)
    assert ours.adaptive_avg_pool2d(x, np.int64(2)).shape == (4, 2, 2, 2)


def test_what_is_no_tensor_gets_pytorchs_error(weight: Tensor) -> None:
    with pytest.raises(TypeError, match="invalid combination of arguments"):
        ours.conv2d(np.ones((1, 4, 5, 5), np.float32), weight)


def test_max_pooling_returns_indices(x: Tensor) -> None:
    same(lambda library: library.max_pool2d(x, 2, return_indices=True))


def test_a_subclass_sees_the_function(weight: Tensor, x: Tensor) -> None:
    class Logged(torch.Tensor):
        seen: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    y = ours.conv2d(x.as_subclass(Logged), weight)
    assert type(y) is Logged
    assert ours.conv2d in Logged.seen


def test_fx_traces_replaced_modules() -> None:
    convolution = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    model = nn.Sequential(convolution, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2))
    traced = torch.fx.symbolic_trace(ours.nn.replace(model))
    targets = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert {ours.conv2d, ours.max_pool2d, ours.adaptive_avg_pool2d} <= targets
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(traced(x), model(x))


@pytest.mark.parametrize("part", ["chunk", "rows", "every second column"])
def test_a_part_of_a_channels_last_tensor_is_channels_last(part: str) -> None:
    whole = torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    x = {
        "chunk": whole.chunk(2, 1)[1],
        "rows": whole[:, :4, 1:4],
        "every second column": whole[:, :4, :, ::2],
    }[part]
    weight = torch.randn(4, 4, 3, 3)
    for function in ("conv2d", "avg_pool2d"):
        other: Any = weight if function == "conv2d" else 2
        found = getattr(ours, function)(x, other)
        assert found.stride() == getattr(functional, function)(x, other).stride()
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("backend_given", ["local", ours.Local])
def test_use_refuses_what_is_no_backend(backend_given: Any) -> None:
    with pytest.raises(TypeError, match=r"such as Local\(\)"):
        ours.use(backend_given)
