"""`Local` on CUDA tensors: PyTorch's gradients, streams, CUDA graphs, mixed precision."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import convgrad.torch as ours
from convgrad.torch import _prepared
from tests.support.torch_tensors import assert_same_bits, awkward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def local() -> Iterator[ours.Local]:
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield ours.Local()
    torch.backends.cudnn.allow_tf32 = allowed


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(32, 64, 3, 1, 1, groups=4),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1, groups=64),
        nn.Conv2d(64, 96, 1, bias=False),
        nn.ConvTranspose2d(96, 16, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    ).cuda()


def gradients(model: nn.Module, x: torch.Tensor, **autocast: Any) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", **autocast):
        loss = model(x).square().sum()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], share: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= share * b.norm() + 1e-6, (a.shape, float((a - b).norm()))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_models_gradients(local: ours.Local, dtype: torch.dtype, memory: Any) -> None:
    model = network().to(memory_format=memory)
    x = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=memory)
    options = {"dtype": dtype, "enabled": dtype is not torch.float32}
    wanted = gradients(model, x, **options)
    ours.report(reset=True)
    with ours.use(local, fallback=False):
        found = gradients(model, x, **options)
        again = gradients(model, x, **options)
    assert_near(found, wanted, 1e-4 if dtype is torch.float32 else 3e-2)
    assert {row.computed_by for row in ours.report().rows} == {"local"}
    assert_near(again, found, 1e-3)  # what PyTorch computes here adds atomically


def test_a_cuda_graph_replays_what_eager_computes(local: ours.Local) -> None:
    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(96, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(8, 96, 28, 28, device="cuda", dtype=torch.bfloat16)
    steps = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    with ours.use(local, fallback=False):

        def run() -> list[torch.Tensor]:
            return list(torch.ops.aten.convolution_backward(grad, x, w, [96], *steps))

        wanted = [each.clone() for each in run()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for scale in (1.0, -2.0):
            grad.mul_(scale)
            graph.replay()
            torch.cuda.synchronize()
            for a, b in zip(found, run(), strict=True):
                assert torch.equal(a, b)
        grad.div_(-2.0)
        for a, b in zip(wanted, run(), strict=True):
            assert torch.equal(a, b)


def test_large_1x1_layers_side_by_side(local: ours.Local) -> None:
    """Both gradients' kernels run at the same time, each on half of the GPU."""

    def draw(*shape: int) -> torch.Tensor:
        tensor = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        return tensor.to(memory_format=torch.channels_last)

    y, x, w = draw(32, 256, 56, 56), draw(32, 64, 56, 56), draw(256, 64, 1, 1)
    rest = [0], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    wanted = torch.ops.aten.convolution_backward(y.float(), x.float(), w.float(), *rest)
    with ours.use(local, fallback=False):
        every = [torch.ops.aten.convolution_backward(y, x, w, *rest) for _ in range(3)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every.append(torch.ops.aten.convolution_backward(y, x, w, *rest))
    graph.replay()
    for found in every:
        assert_near([each.float() for each in found[:2]], list(wanted[:2]), 1e-2)
        assert all(torch.equal(a, b) for a, b in zip(found[:2], every[0][:2], strict=True))


def test_any_number_of_graphs(local: ours.Local) -> None:
    """Each capture has counters of its own, and may have to allocate them."""
    x = torch.randn(2, 64, 14, 14, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    rest = [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    graphs = []
    with ours.use(local, fallback=False):
        wanted = torch.ops.aten.convolution_backward(x, x, w, *rest)
        for _ in range(90):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = torch.ops.aten.convolution_backward(x, x, w, *rest)
            graphs.append((graph, found))
    for graph, found in graphs:
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("channels", [64, 40, 256])
@pytest.mark.parametrize("kernel", [1, 3])
def test_tensors_at_other_addresses(local: ours.Local, channels: int, kernel: int) -> None:
    """The kernels' arguments are made once, for the first tensors of these shapes."""

    def draw(*shape: int) -> torch.Tensor:
        tensor = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        return tensor.to(memory_format=torch.channels_last)

    x, w = (4, channels, 28, 28), (channels, channels, kernel, kernel)
    steps = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1, [True, True, True])
    layers = [(draw(*x), draw(*x), draw(*w)) for _ in range(4)]

    def run() -> list[list[torch.Tensor]]:
        return [
            list(torch.ops.aten.convolution_backward(*layer, [channels], *steps))
            for layer in layers
        ]

    wanted = run()
    with ours.use(local, fallback=False):
        first, second = run(), run()
    for found, again, peers in zip(first, second, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
        assert_near([a.float() for a in found], [b.float() for b in peers], 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prepared_calls_are_answered_without_python(local: ours.Local, dtype: torch.dtype) -> None:
    x = torch.randn(4, 48, 20, 20, device="cuda", dtype=dtype, requires_grad=True)
    layer = nn.Conv2d(48, 48, 3, padding=1, device="cuda", dtype=dtype)
    backend: Any = local
    grad = torch.randn_like(layer(x))  # no view that would be copied

    def backward() -> torch.Tensor:
        (found,) = torch.autograd.grad(layer(x), x, grad)
        return found

    wanted = backward()
    with ours.use(local, fallback=False):
        for _ in range(2):
            backward()
        backend.prepare = None
        passes = dict(_prepared.PASSES)
        _prepared.PASSES.clear()  # Python could not answer
        try:
            assert_near([backward().float()], [wanted.float()], 1e-2)
        finally:
            del backend.prepare
            _prepared.PASSES.update(passes)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_max_pooling_has_the_bits_of_pytorchs(
    local: ours.Local, dtype: torch.dtype, last: bool
) -> None:
    """Python answers first, then native code; with and without indices."""
    torch.manual_seed(0)
    pools: list[tuple[Any, ...]] = [
        (nn.functional.max_pool2d, 3, 2, 1),
        (nn.functional.max_pool2d, (3, 2), None, 0, 1, True),
        (nn.functional.max_pool2d, 3, (1, 2), 1, 2),
        (nn.functional.adaptive_max_pool2d, (7, 5)),
        (nn.functional.max_pool3d, 2, 2, 1, 1, True),
    ]
    for pool, *options in pools:
        shape = (3, 40, 7, 9, 12) if "3d" in pool.__name__ else (3, 40, 21, 18)
        x = awkward(shape, dtype, last).cuda()
        # Where all are -inf, PyTorch's indices in channels last are others than in its default.
        values, indices = pool(x.contiguous(), *options, return_indices=True)
        ours.report(reset=True)
        with ours.use(local, fallback=False):
            found = [pool(x, *options) for _ in range(3)]
            both = [pool(x, *options, return_indices=True) for _ in range(3)]
        for each in (*found, *(each for each, _ in both)):
            assert_same_bits(each, values)
        for _, each in both:
            assert torch.equal(each, indices)
        assert sum(row.calls for row in ours.report(reset=True).rows) == 6


def test_a_cuda_graph_of_a_pooling(local: ours.Local) -> None:
    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        output = nn.functional.max_pool2d(x, 3, 2, 1)
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
        return output.detach(), grad

    wanted = run()
    with ours.use(local, fallback=False):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
    graph.replay()
    assert torch.equal(found[0], wanted[0])
    assert_near([found[1].float()], [wanted[1].float()], 1e-2)


def test_the_report_has_times_on_the_gpu(local: ours.Local) -> None:
    x = torch.randn(16, 64, 56, 56, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = nn.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=torch.bfloat16)
    ours.report(reset=True)
    with ours.use(local, fallback=False, time_calls=True):
        for _ in range(300):
            layer(x).sum().backward()
    (row,) = ours.report(reset=True).rows
    assert row.calls == 300
    assert row.ms is not None
    assert 0.01 < row.ms < 10, "at least the time in which the memory can be read"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_device_that_is_not_the_current_one(local: ours.Local) -> None:
    x = torch.randn(2, 8, 16, 16, device="cuda:1")
    w = torch.randn(8, 8, 3, 3, device="cuda:1")
    with ours.use(local, fallback=False):
        found = ours.conv2d(x, w)
    assert found.device == x.device
    assert_near([found], [nn.functional.conv2d(x, w)], 1e-4)


def test_streams_are_pytorchs_current_one(local: ours.Local) -> None:
    x = torch.randn(16, 64, 56, 56, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = nn.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=torch.bfloat16)
    with ours.use(local, fallback=False):
        (wanted,) = torch.autograd.grad(layer(x).sum(), x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)  # work that is still running when ours is launched
            y = x * 1.0
            (found,) = torch.autograd.grad(layer(y).sum(), y)
        torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(found, wanted)


def test_threads_on_streams_of_their_own(local: ours.Local) -> None:
    x = torch.randn(8, 64, 28, 28, device="cuda", dtype=torch.bfloat16)
    # Made here: drawing weights in several threads would be a race for the generator.
    layers = [
        nn.Conv2d(64, 64, 3, padding=1, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    ]

    def gradients_of(layer: nn.Module) -> list[torch.Tensor]:
        return list(torch.autograd.grad(layer(x).square().sum(), layer.parameters()))

    def work(layer: nn.Module) -> list[torch.Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found = gradients_of(layer)
            torch.cuda.current_stream().synchronize()
        return found

    with ours.use(local, fallback=False):
        wanted = [gradients_of(layer) for layer in layers]
        torch.cuda.synchronize()
        with ThreadPoolExecutor(4) as pool:
            for found, own in zip(pool.map(work, layers), wanted, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))


def test_a_view_that_starts_anywhere(local: ours.Local) -> None:
    whole = torch.randn(9, 7, 15, 15, device="cuda")
    x = whole[1:].requires_grad_()
    w = torch.randn(5, 7, 3, 3, device="cuda")
    wanted = torch.autograd.grad(nn.functional.conv2d(x, w).square().sum(), x)
    with ours.use(local, fallback=False):
        found = torch.autograd.grad(nn.functional.conv2d(x, w).square().sum(), x)
    assert_near(list(found), list(wanted), 1e-4)


def test_an_overflow_is_seen_by_the_gradient_scaler(local: ours.Local) -> None:
    layer = nn.Conv2d(8, 8, 3, padding=1).cuda()
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)
    x = torch.randn(4, 8, 16, 16, device="cuda")
    with ours.use(local, fallback=False):
        with torch.autocast("cuda", torch.float16):
            loss = layer(x).square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(layer.weight, before)
    assert scaler.get_scale() < 2.0**60


def test_a_layer_that_is_being_compiled_is_pytorchs(local: ours.Local) -> None:
    x = torch.randn(3, 40, 17, 19, device="cuda", dtype=torch.float16, requires_grad=True)
    w = torch.randn(24, 40, 5, 3, device="cuda", dtype=torch.float16)
    wanted = torch.autograd.grad(nn.functional.conv2d(x, w).sum(), x)
    with ours.use(ours.Local(wait=False)):
        found = torch.autograd.grad(nn.functional.conv2d(x, w).sum(), x)
    assert_near(list(found), list(wanted), 1e-2)
