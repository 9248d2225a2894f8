"""Average and adaptive pooling and unpooling of `convgrad.torch`, called and through `use`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch

import convgrad.torch as ours
from tests.support.torch_tensors import TOLERANCE, normal, same

functional = torch.nn.functional
Tensor: TypeAlias = torch.Tensor

# By function: shapes of the input, arguments.
POOLS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("avg_pool1d", (2, 5, 20), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("avg_pool2d", (2, 8, 9, 10), {"kernel_size": 3, "stride": 1, "padding": 1}),
    ("avg_pool2d", (2, 5, 9, 10), {"kernel_size": (3, 2), "ceil_mode": True}),
    (
        "avg_pool2d",
        (2, 5, 9, 10),
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
    ),
    ("avg_pool2d", (5, 8, 8), {"kernel_size": 2, "divisor_override": 3}),
    ("avg_pool3d", (1, 3, 5, 6, 7), {"kernel_size": 2, "padding": 1}),
    ("adaptive_avg_pool1d", (2, 3, 17), {"output_size": 5}),
    ("adaptive_avg_pool2d", (2, 8, 10, 7), {"output_size": (7, None)}),
    ("adaptive_avg_pool2d", (2, 8, 7, 7), {"output_size": 1}),
    ("adaptive_avg_pool3d", (1, 3, 5, 6, 7), {"output_size": 3}),
    ("adaptive_max_pool1d", (2, 3, 17), {"output_size": 5}),
    ("adaptive_max_pool2d", (2, 8, 10, 7), {"output_size": (7, None)}),
    ("adaptive_max_pool2d", (3, 9, 9), {"output_size": 4}),
    ("adaptive_max_pool3d", (1, 3, 5, 6, 7), {"output_size": 3}),
    ("max_pool1d", (2, 5, 20), {"kernel_size": 3, "stride": 2, "padding": 1}),
]
IDS = [f"{name}-{index}" for index, (name, *_) in enumerate(POOLS)]


@pytest.fixture(autouse=True)
def _on(backend: ours.Backend) -> Any:
    with ours.use(backend):
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "shape", "options"), POOLS, ids=IDS)
def test_poolings_are_pytorchs(
    name: str, shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    input = normal(shape, dtype)
    output = getattr(ours, name)(input, **options)
    with ours.use(None):
        # PyTorch has not all of them in 16 bits on the CPU.
        exact = input.detach().double().requires_grad_()
        wanted = getattr(functional, name)(exact, **options)
        grad = torch.randn_like(wanted).to(dtype)
        gradients = torch.autograd.grad(wanted, [exact], grad.double())
    same([output], [wanted.to(dtype)], dtype)
    found = torch.autograd.grad(output, [input], grad)
    same(found, [gradient.to(dtype) for gradient in gradients], dtype)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_unpooling_is_pytorchs(ndim: int) -> None:
    torch.manual_seed(0)
    planes = normal((2, 3, *(6, 9, 4)[:ndim]), grad=False)
    pool = getattr(functional, f"max_pool{ndim}d")
    output, indices = pool(planes, 2, return_indices=True)
    input = output.detach().requires_grad_()
    size = planes.shape
    found = getattr(ours, f"max_unpool{ndim}d")(input, indices, 2, output_size=size)
    wanted = getattr(functional, f"max_unpool{ndim}d")(input, indices, 2, output_size=size)
    assert torch.equal(found, wanted)
    grad = torch.randn_like(wanted)
    same(
        torch.autograd.grad(found, [input], grad),
        torch.autograd.grad(wanted, [input], grad),
        torch.float64,
    )


def test_the_operators_keep_pytorchs_rules() -> None:
    torch.manual_seed(0)
    x, indices = functional.max_pool2d(normal((1, 2, 6, 6)), 2, return_indices=True)
    x = x.detach().requires_grad_()
    average = [2, 2], [1, 1], [0, 0], False, True, None
    operators: dict[str, tuple[Any, ...]] = {
        "avg_pool": (x, *average),
        "avg_pool_backward": (normal((1, 2, 2, 2)), [3, 3], *average, False),
        "adaptive_avg_pool": (x, [2, 2]),
        "adaptive_avg_pool_backward": (normal((1, 2, 2, 2)), [3, 3], False),
        "adaptive_max_pool": (x, [2, 2]),
        "max_unpool": (x, indices, [2, 2], [2, 2], [0, 0], [6, 6]),
        "max_unpool_backward": (normal((1, 2, 6, 6)), indices),
    }
    for name, given in operators.items():
        torch.library.opcheck(getattr(torch.ops.convgrad, name).default, given)


@pytest.mark.parametrize(("name", "shape", "options"), POOLS, ids=IDS)
def test_second_derivatives(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pool: Callable[..., Tensor] = getattr(ours, name)
    small = normal(shape)
    assert torch.autograd.gradgradcheck(
        lambda x: pool(x, **options), [small], fast_mode=True, check_batched_grad=True
    )


def test_second_derivatives_of_unpooling() -> None:
    x = torch.randperm(2 * 3 * 36).double().view(2, 3, 6, 6)
    pooled, indices = functional.max_pool2d(x, 3, 1, return_indices=True)  # indices repeat
    unpool = partial(ours.max_unpool2d, indices=indices, kernel_size=3, stride=1)
    assert torch.autograd.gradgradcheck(unpool, [pooled.requires_grad_()], check_batched_grad=True)


def test_channels_last_stays() -> None:
    torch.manual_seed(0)
    x = normal((2, 8, 9, 9), torch.float32, grad=False).to(memory_format=torch.channels_last)
    x.requires_grad_()
    for pool, options in (("avg_pool2d", (3, 1, 1)), ("adaptive_avg_pool2d", (1,))):
        output = getattr(ours, pool)(x, *options)
        (grad,) = torch.autograd.grad(output.sum(), [x])
        assert grad.is_contiguous(memory_format=torch.channels_last)
        wanted = getattr(functional, pool)(x.detach().contiguous(), *options)
        torch.testing.assert_close(output, wanted)


@pytest.mark.parametrize("last", [False, True])
def test_use_computes_the_gradients_of_poolings(backend: ours.Backend, last: bool) -> None:
    """PyTorch's own gradient of average pooling in channels last is left out of the comparison."""
    torch.manual_seed(0)
    poolings: list[Callable[[Tensor], Tensor]] = [
        lambda x: functional.avg_pool2d(x, 3, 1, 1),
        lambda x: functional.adaptive_avg_pool2d(x, (4, 5)),
        lambda x: functional.adaptive_max_pool2d(x, (4, 5)),
    ]
    x = normal((2, 8, 9, 10), torch.float32, grad=False)
    ours.report(reset=True)
    for pool in poolings:
        with ours.use(None):
            plain = x.clone().requires_grad_()
            output = pool(plain)
            grad = torch.randn_like(output)
            (wanted,) = torch.autograd.grad(output, [plain], grad)
        given = x.clone()
        if last:
            given = given.to(memory_format=torch.channels_last)
        given.requires_grad_()
        with ours.use(backend, fallback=False):
            (found,) = torch.autograd.grad(pool(given), [given], grad)
        tolerance = TOLERANCE[torch.float32]
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    rows = ours.report(reset=True).rows
    assert {row.operation for row in rows} == {
        "avg_pool_bwd",
        "adaptive_avg_pool_bwd",
        "adaptive_max_pool_bwd",
    }
    assert {row.computed_by for row in rows} == {backend.name}


def test_compiled() -> None:
    x = normal((2, 4, 8, 8), torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def pooled(x: Tensor) -> Tensor:
        y = ours.avg_pool2d(x, 3, 1, 1)
        return ours.adaptive_max_pool2d(y, 3).sum() + ours.adaptive_avg_pool2d(y, 5).square().sum()

    (found,) = torch.autograd.grad(pooled(x), [x])
    with ours.use(None):
        y = functional.avg_pool2d(x, 3, 1, 1)
        wanted = functional.adaptive_max_pool2d(y, 3).sum()
        wanted = wanted + functional.adaptive_avg_pool2d(y, 5).square().sum()
    torch.testing.assert_close(found, torch.autograd.grad(wanted, [x])[0], rtol=1e-5, atol=1e-5)
