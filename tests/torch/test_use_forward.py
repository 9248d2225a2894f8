"""`use` with a backend that computes the forward passes of poolings too, here on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

import convgrad.torch as ours
from convgrad import UnsupportedProblem
from tests.support.torch_tensors import TOLERANCE, assert_same_bits, awkward, normal

functional = torch.nn.functional
Tensor: TypeAlias = torch.Tensor


class Everywhere(ours.Local):
    """Computes forward passes on the CPU as on a GPU."""

    forward_devices = ("cpu", "cuda")


BACKEND = Everywhere()


@pytest.fixture(autouse=True)
def _report() -> Iterator[None]:
    torch.manual_seed(0)
    ours.report(reset=True)
    yield
    ours.use(None)


def counted() -> dict[str, int]:
    """The calls of each operation that the backend computed, since the last time."""
    rows = ours.report(reset=True).rows
    assert {row.computed_by for row in rows} <= {"local"}, rows
    found: dict[str, int] = {}
    for row in rows:
        found[row.operation] = found.get(row.operation, 0) + row.calls
    return found


MAX_POOLS: list[tuple[int, tuple[int, ...], dict[str, Any]]] = [
    (1, (2, 5, 20), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (2, (2, 8, 9, 10), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (2, (2, 5, 9, 10), {"kernel_size": (3, 2), "ceil_mode": True}),
    (2, (1, 8, 12, 11), {"kernel_size": 3, "stride": (1, 2), "padding": 1, "dilation": 2}),
    (3, (1, 3, 5, 6, 7), {"kernel_size": 2, "stride": 2, "ceil_mode": True}),
]


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ndim", "shape", "options"), MAX_POOLS)
def test_max_pooling_has_the_bits_of_pytorchs(
    ndim: int,
    shape: tuple[int, ...],
    options: dict[str, Any],
    dtype: torch.dtype,
    last: bool,
    indices: bool,
) -> None:
    x = awkward(shape, dtype, last)
    pool = getattr(functional, f"max_pool{ndim}d")
    options = {**options, "return_indices": indices}

    def pooled(x: Tensor) -> tuple[Tensor, ...]:
        found = pool(x, **options)
        return found if indices else (found,)

    # Where all are -inf, PyTorch's indices in channels last are others than in its default format.
    wanted, strides = pooled(x.contiguous()), [each.stride() for each in pooled(x)]
    with ours.use(BACKEND, fallback=False):
        given = x.clone().requires_grad_()
        found = pooled(given)
        (grad,) = torch.autograd.grad(found[0], given, torch.randn_like(found[0]))
        with torch.no_grad():
            again = pooled(x)
    for a, b in zip((*found, *again), (*wanted, *wanted), strict=True):
        assert_same_bits(a, b)
    assert [each.stride() for each in found] == strides
    assert grad.shape == x.shape
    forward, backward = (f"maxpool{max(ndim, 2)}d_{way}" for way in ("fwd", "bwd"))
    assert counted().keys() == {forward, backward}


@pytest.mark.parametrize("last", [False, True])
def test_gradients_and_second_derivatives_of_max_pooling(last: bool) -> None:
    x = normal((2, 4, 9, 10), grad=False)
    x = x.to(memory_format=torch.channels_last) if last else x

    def derivatives() -> list[Tensor]:
        given = x.clone().requires_grad_()
        output = functional.max_pool2d(given, 3, 2, 1)
        (first,) = torch.autograd.grad(output.pow(3).sum(), given, create_graph=True)
        return [output, first, *torch.autograd.grad(first.pow(2).sum(), given)]

    wanted = derivatives()
    with ours.use(BACKEND, fallback=False):
        for a, b in zip(derivatives(), wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert torch.autograd.gradcheck(
            lambda y: functional.max_pool2d(y, 3, 2, 1), [normal((1, 2, 5, 5))]
        )
        assert torch.autograd.gradgradcheck(
            lambda y: functional.max_pool2d(y, 3, 2, 1), [normal((1, 2, 5, 5))]
        )


def test_max_pooling_keeps_no_indices_unless_they_are_asked_for() -> None:
    x = normal((2, 4, 8, 8), torch.float32)
    with ours.use(BACKEND):
        alone = functional.max_pool2d(x, 2)
        both, _ = functional.max_pool2d(x, 2, return_indices=True)
    assert not hasattr(alone.grad_fn, "_saved_result1")
    assert both.grad_fn is not None
    # The backend may be another one by the time of the backward pass, or none.
    (wanted,) = torch.autograd.grad(both.sum(), x)
    (found,) = torch.autograd.grad(alone.sum(), x)
    assert torch.equal(found, wanted)


AVERAGES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("avg_pool1d", (2, 5, 20), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("avg_pool2d", (2, 8, 9, 10), {"kernel_size": 3, "stride": 1, "padding": 1}),
    (
        "avg_pool2d",
        (2, 5, 9, 10),
        {"kernel_size": (3, 2), "padding": 1, "ceil_mode": True, "count_include_pad": False},
    ),
    ("avg_pool2d", (2, 5, 8, 8), {"kernel_size": 2, "divisor_override": 3}),
    ("avg_pool3d", (2, 3, 5, 6, 7), {"kernel_size": 2, "padding": 1}),
    ("adaptive_avg_pool1d", (2, 3, 17), {"output_size": 1}),
    ("adaptive_avg_pool2d", (2, 8, 10, 7), {"output_size": (7, None)}),
    ("adaptive_avg_pool2d", (2, 8, 10, 7), {"output_size": 1}),
    ("adaptive_avg_pool3d", (2, 3, 5, 6, 7), {"output_size": 3}),
    ("adaptive_max_pool2d", (2, 8, 10, 7), {"output_size": (7, None)}),
    ("adaptive_max_pool3d", (2, 3, 5, 6, 7), {"output_size": 3}),
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("name", "shape", "options"), AVERAGES)
def test_other_poolings(
    name: str, shape: tuple[int, ...], options: dict[str, Any], last: bool
) -> None:
    pool: Callable[..., Tensor] = getattr(functional, name)
    x = normal(shape, torch.float32, grad=False)
    if last and x.dim() > 3:
        x = x.to(memory_format=[torch.channels_last, torch.channels_last_3d][x.dim() - 4])
    wanted = pool(x, **options)
    with ours.use(BACKEND, fallback=False):
        given = x.clone().requires_grad_()
        found = pool(given, **options)
        found.sum().backward()
    tolerance = TOLERANCE[torch.float32]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert given.grad is not None
    assert given.grad.stride() == x.stride()
    if x.dim() < 5:  # in 3D, PyTorch's averages leave the channels-last format
        assert found.stride() == wanted.stride()
    assert sum(counted().values()) == 2


def test_the_input_of_an_average_may_change_afterwards() -> None:
    x = normal((2, 4, 6, 6), torch.float32)
    with ours.use(BACKEND, fallback=False):
        y = x * 2
        averages = functional.adaptive_avg_pool2d(y, 1)
        y.mul_(averages.detach())
        (grad,) = torch.autograd.grad(averages.sum() + y.sum(), x)
    assert torch.isfinite(grad).all()
    assert counted() == {"adaptive_avg_pool_fwd": 1, "adaptive_avg_pool_bwd": 1}


def test_what_is_not_taken_stays_pytorchs() -> None:
    unbatched, whole = normal((3, 8, 8), torch.float32), torch.arange(16).reshape(1, 1, 4, 4)
    empty = torch.zeros(0, 3, 8, 8)
    with ours.use(BACKEND):
        assert functional.max_pool2d(unbatched, 2).shape == (3, 4, 4)
        assert functional.max_pool2d(empty, 2).shape == (0, 3, 4, 4)
        assert functional.avg_pool2d(unbatched, 2).shape == (3, 4, 4)
        assert functional.max_pool2d(whole, 2).flatten().tolist() == [5, 7, 13, 15]
        with pytest.raises(RuntimeError):
            functional.max_pool2d(torch.zeros(1, 1, 2, 2), 5)
    left = [row for row in ours.report(reset=True).rows if row.computed_by == "PyTorch"]
    assert {row.operation for row in left} >= {"max_pool2d_with_indices"}
    with ours.use(BACKEND, fallback=False), pytest.raises(UnsupportedProblem):
        functional.max_pool2d(whole, 2)


def test_forward_passes_are_only_of_backends_that_ask_for_them(backend: ours.Backend) -> None:
    x = normal((1, 4, 8, 8), torch.float32)
    with ours.use(backend, fallback=False):
        functional.avg_pool2d(functional.max_pool2d(x, 3, 1), 2).sum().backward()
    assert sorted(row.operation for row in ours.report(reset=True).rows) == [
        "avg_pool_bwd",
        "maxpool2d_bwd",
    ]


def test_a_refused_pass_is_pytorchs_both_ways() -> None:
    class Refuses(Everywhere):
        def prepare(self, *given: Any, **options: Any) -> Any:
            raise UnsupportedProblem("not today")

    x = normal((2, 3, 8, 8), torch.float32)
    wanted = torch.autograd.grad(functional.max_pool2d(x, 3, 2, 1).sum(), x)
    with ours.use(Refuses()):
        y = functional.max_pool2d(x, 3, 2, 1)
        found = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found[0], wanted[0])
    assert {row.computed_by for row in ours.report(reset=True).rows} == {"PyTorch"}


@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
def test_compiled_forwards(compiler: str) -> None:
    """A graph is the same with and without a backend in use; its operators run on the backend."""
    x = normal((2, 4, 8, 8), torch.float32)

    @torch.compile(backend=compiler, fullgraph=True)
    def pooled(x: Tensor) -> Tensor:
        y = functional.avg_pool2d(functional.max_pool2d(x, 3, 1, 1), 2)
        return (y * functional.adaptive_avg_pool2d(y, 1)).sum()

    (wanted,) = torch.autograd.grad(pooled(x), x)
    for traced_without in (True, False):
        if not traced_without:
            torch._dynamo.reset()
        with ours.use(BACKEND, fallback=False):
            (found,) = torch.autograd.grad(pooled(x), x)
        torch.testing.assert_close(found, wanted)
        assert counted().keys() >= {
            "maxpool2d_fwd",
            "maxpool2d_bwd",
            "avg_pool_fwd",
            "avg_pool_bwd",
        }
    (found,) = torch.autograd.grad(pooled(x), x)
    torch.testing.assert_close(found, wanted)
    assert not counted()


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_transforms_and_modes_see_pytorchs_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    x = normal((3, 2, 4, 8, 8), torch.float32, grad=False)

    def loss(x: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(functional.max_pool2d(x, 2), 1).square().sum()

    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def all_of_them() -> list[Tensor]:
        with Seen():
            y = x[0].clone().requires_grad_()
            loss(y).backward()
        assert y.grad is not None
        return [
            y.grad,
            torch.func.vmap(torch.func.grad(loss))(x),
            torch.func.jvp(loss, (x[0],), (torch.ones_like(x[0]),))[1],
            torch.func.hessian(loss)(x[0, :1, :1, :2, :2]),
        ]

    wanted, before = all_of_them(), list(seen)
    seen.clear()
    with ours.use(BACKEND):
        found = all_of_them()
    assert seen == before
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_inference_mode_and_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    x = normal((2, 4, 8, 8), torch.float32)
    wanted = functional.max_pool2d(x, 3, 1)
    with ours.use(BACKEND, fallback=False):
        with torch.inference_mode():
            assert torch.equal(functional.max_pool2d(x, 3, 1), wanted)
        again: Any = checkpoint(lambda y: functional.max_pool2d(y, 3, 1), x, use_reentrant=False)
        (found,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(found, torch.autograd.grad(wanted.sum(), x)[0])
