"""Native kernels of `convgrad.torch.Local`, on CPU tensors with a CUDA driver that notes calls.

Run by test_front.py in a process of its own: what is registered here stays registered.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

import convgrad.torch as ours
from convgrad.errors import UnsupportedProblem
from convgrad.torch import _front, _local, _use
from convgrad.torch._choice import CHOICE
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cuda import attributed_launch
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.core import tensor_maps
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.inprocess import cuda, launch_plan
from convgrad_service.inprocess.base import problem_of
from convgrad_service.inprocess.cuda import PreparedOnCuda
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Launch

CONTEXT, STREAM = 77, 5
POINTER = ctypes.c_void_p
ATEN = torch.ops.aten
REST = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
state: dict[str, Any] = {"context": CONTEXT, "stream": STREAM, "capturing": 0, "status": 0}
hooks: dict[str, Callable[..., int]] = {}  # instead of the state, for threads
launched: list[tuple[int, int]] = []  # stream, address of the kernel's structure
set_anew: list[int] = []  # nodes of a graph
copied: list[tuple[int, bytes]] = []  # by native code: where to, and what


def write(at: int, value: int, kind: Any = POINTER) -> int:
    kind.from_address(at).value = value
    return 0


def note(config: int, _: int, arguments: int, __: int) -> int:
    if "launch" in hooks:
        return hooks["launch"](config, _, arguments, __)
    block = POINTER.from_address(arguments).value or 0
    launched.append((launch_plan.LaunchConfig.from_address(config).stream, block))
    return int(state["status"])


def copier() -> Any:
    """Return PyTorch's function that copies a tensor, which notes its calls."""
    torch_c = _front._functions({})

    def copy(into: int, source: int, non_blocking: int) -> int:
        status = torch_c["aoti_torch_copy_"](POINTER(into), POINTER(source), non_blocking)
        at, count = POINTER(), ctypes.c_int64()
        torch_c["aoti_torch_get_data_ptr"](POINTER(into), ctypes.byref(at))
        torch_c["aoti_torch_get_numel"](POINTER(into), ctypes.byref(count))
        copied.append((at.value or 0, ctypes.string_at(at.value or 0, 2 * count.value)))
        return int(status)

    return ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, ctypes.c_int32)(copy)


class Graph:
    """Stands for a `LaunchGraph`: its nodes are the kernels' places in it."""

    made: ClassVar[list[Graph]] = []
    alive = 0

    def __init__(self, _: Any, kernels: Sequence[Any], __: Any, after: list[int | None]) -> None:
        self.after = after
        self.kernels, self.nodes = kernels, list(range(1, 1 + len(kernels)))
        self.made.append(self)
        self.address = len(self.made)

    @classmethod
    def set_kernel(cls, graph: int, node: int, kernel: int) -> int:
        assert ctypes.addressof(cls.made[graph - 1].kernels[node - 1]) == kernel
        set_anew.append(node)
        return 0

    @classmethod
    def launch(cls, graph: int, stream: int | None) -> int:
        config = launch_plan.LaunchConfig(stream=stream)
        for kernel in cls.made[graph - 1].kernels:
            status = note(ctypes.addressof(config), 0, kernel.arguments, 0)
        return status


def functions() -> list[Any]:
    """The driver's, in the order of `launch_plan.Driver`, and PyTorch's current stream."""
    kinds = {4: (POINTER,) * 4, 3: (POINTER,) * 3, 2: (POINTER,) * 2, 1: (POINTER,)}

    def made(count: int, run: Callable[..., int]) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds[count])(run)

    return [
        made(4, note),
        made(4, lambda *_: 0),
        made(2, lambda at, address: write(at, address)),
        made(2, lambda *_: 0),
        made(3, lambda *_: 0),
        made(2, lambda _, at: write(at, state["capturing"], ctypes.c_int)),
        made(1, lambda at: write(at, state["context"])),
        made(3, Graph.set_kernel),
        made(2, Graph.launch),
        made(2, lambda _, at: write(at, hooks.get("stream", lambda: state["stream"])())),
    ]


class Device:
    """Stands for the GPU's kernels, zeros and runtime."""

    def __init__(self) -> None:
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        runtime = SimpleNamespace(memsetAsync=nothing, eventRecord=nothing, streamWaitEvent=nothing)
        self.cuda = SimpleNamespace(runtime=runtime, driver=SimpleNamespace(launchKernel=nothing))
        self.prepared: list[PreparedOnCuda] = []
        self.faster: str | None = None

    def of(self, user: tuple[int, ...]) -> int:
        return 4096 * (1 + user[2])

    def sides(self, count: int) -> tuple[int, list[tuple[int, int]]]:
        return self.native_sides(count)

    def native_sides(self, count: int) -> tuple[int, list[tuple[int, int]]]:
        return 1, [(10 * n, n) for n in range(2, 2 + count)]

    def prepare(self, operation: str, tensors: Any, parameters: Any, *, wait: bool) -> Any:
        problem = problem_of(operation, tensors, parameters)
        if any(13 in spec.shape for spec in problem.outputs.values()):
            raise UnsupportedProblem("not with 13")
        kernels = Kernels.__new__(Kernels)
        kernels.__dict__.update(_cuda=self.cuda, function=lambda _: SimpleNamespace(ptr=1234))
        made: Any = self
        plan = plan_for(problem, H200, FAMILIES)
        self.prepared.append(PreparedOnCuda(problem, plan, kernels, made))
        self.prepared[-1].faster_peer = self.faster
        return self.prepared[-1]


def launch_on_cpu(prepared: Any, operation: Any, _: Any, channels_last: bool) -> Any:
    return _local.CudaLaunch(prepared, operation, torch.device("cuda:0"), channels_last)


def install(device: Device) -> list[Any]:
    """Put the native kernels in front of the overrides for the CPU."""
    tensor_maps._encoded = lambda _, address: address.to_bytes(tensor_maps.MAP_BYTES, "little")
    tensor_maps._replace_address = lambda: write
    tensor_maps._driver_version = lambda: tensor_maps.OLD_DRIVER + 1
    attributed_launch._launcher = lambda: lambda *_: 0
    launch_plan._current_context = lambda: CONTEXT
    patched: Any = launch_plan
    patched.LaunchGraph, patched._driver = Graph, lambda: None
    cuda.capture_id = lambda _: state["capturing"]
    _local.find_executor = lambda: lambda *_: device
    ours.Local.forward_devices = ("cpu",)
    _local._Launch, _local.ALIGNMENT_BYTES = launch_on_cpu, 16
    _front.ALIGNMENT_BYTES = 16
    _local._current_device, _local._current_stream = (lambda: 0), (lambda _: STREAM)
    _local.is_capturing = _front.is_capturing = lambda: bool(state["capturing"])
    _local._empty = torch._C._dynamo.guards._empty_strided_cpu
    kept = functions()
    kept.append(copier())
    addresses = [ctypes.cast(each, POINTER).value or 0 for each in kept]
    driver = launch_plan.Driver(*addresses[:9])
    own = _front._functions({})["aoti_torch_cpu_convolution_backward"]
    symbols = {
        "aoti_torch_get_current_cuda_stream": addresses[9],
        "aoti_torch_copy_": addresses[10],
        "aoti_torch_cuda_convolution_backward": ctypes.cast(own, POINTER).value or 0,
    }
    _use._override_once()
    front = _front.Front(load().handle, driver, "CPU", symbols)
    front.check()
    front.register(CHOICE.overrides["CPU"])
    CHOICE.front, CHOICE.tried = front, True
    return kept


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last)


def layer(size: int = 14) -> tuple[torch.Tensor, ...]:
    return draw(4, 64, size, size), draw(4, 64, size, size), draw(64, 64, 3, 3)


def backward(tensors: tuple[torch.Tensor, ...]) -> Any:
    return ATEN.convolution_backward(*tensors, [64], *REST)


def answered(call: Callable[[], Any]) -> tuple[Any, list[tuple[int, int]]]:
    """Return what a call returns, and the launches that native code made for it."""
    launched.clear()
    return call(), list(launched)


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def check_arguments(prepared: PreparedOnCuda, tensors: Any, results: Any, blocks: Any) -> None:
    """Native code fills in what Python would."""
    grad_output, input, weight = tensors
    given = {"grad_output": grad_output, "input": input, "weight": weight}
    given |= {"grad_input": results[0], "grad_weight": results[1]}
    zeros = {"zeros": 4096}
    steps = [step for step in prepared._plan.steps if isinstance(step, Launch)]
    assert len(steps) == len(blocks), (steps, blocks)
    for step, (stream, block) in zip(steps, blocks, strict=True):
        assert stream == state["stream"], stream
        if set(step.arguments.buffers) <= set(given):
            addresses = {name: tensor.data_ptr() for name, tensor in given.items()} | zeros
            wanted = bytes(step.arguments.fill(addresses))
            assert ctypes.string_at(block, len(wanted)) == wanted


def check_threads(tensors: tuple[torch.Tensor, ...]) -> None:
    """Each thread's launches are on its own stream, with its own tensors, at the same time."""
    here, wrong, seen, ready = threading.local(), [], [0] * 4, threading.Barrier(4)

    def launch(config: int, _: int, arguments: int, __: int) -> int:
        block = POINTER.from_address(arguments).value or 0
        found = ctypes.string_at(block, 384)  # where the launch's pointers and maps start
        stream = launch_plan.LaunchConfig.from_address(config).stream
        others = (each for number, own in owned.items() if number != here.number for each in own)
        if stream != here.stream or any(each.to_bytes(8, "little") in found for each in others):
            wrong.append((here.number, stream))
        if not any(each.to_bytes(8, "little") in found for each in owned[here.number]):
            wrong.append((here.number, "none of its tensors"))
        seen[here.number] += 1
        return 0

    mine = [tuple(each.clone() for each in tensors) for _ in range(4)]
    owned = {i: {each.data_ptr() for each in own} for i, own in enumerate(mine)}
    hooks.update(launch=launch, stream=lambda: here.stream)

    def work(number: int) -> None:
        here.number, here.stream = number, 100 + number
        ready.wait()
        for _ in range(50):
            backward(mine[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hooks.clear()
    assert not wrong, wrong[:5]
    assert all(count >= 2 * 49 for count in seen), seen


def check_copies(tensors: tuple[torch.Tensor, ...]) -> None:
    """Kernels read copies of arguments that are not aligned or not dense."""
    last = torch.channels_last
    moved = torch.randn(4 * 64 * 14 * 14 + 1, dtype=torch.bfloat16)[1:].view(4, 14, 14, 64)
    channels, one = draw(4, 192, 14, 14)[:, 64:128], draw(1, 1, 1, 1).expand(4, 64, 14, 14)
    for given, answers in ((moved.permute(0, 3, 1, 2), (1, 1)), (channels, (0, 1)), (one, (0, 1))):
        for answered_here in answers:
            copied.clear()
            call = partial(backward, (given, *tensors[1:]))
            blocks = answered(call)[1]
            assert bool(blocks) == bool(answered_here) == bool(copied)
            for address, content in copied:
                wanted = given.contiguous(memory_format=last).permute(0, 2, 3, 1).contiguous()
                assert content == bytes(wanted.view(torch.int16).numpy())
                found = [ctypes.string_at(block, 384) for _, block in blocks]
                assert all(address.to_bytes(8, "little") in each for each in found)


def check_pooling(indices: bool) -> None:
    """Both passes of a pooling are launched by native code, through autograd."""
    x = draw(4, 64, 16, 16).requires_grad_()
    pool = torch.nn.functional.max_pool2d
    for answers in (0, 1):
        output, blocks = answered(lambda: pool(x, 2, return_indices=indices))
        results = output if indices else (output,)
        assert len(blocks) == answers
        for _, block in blocks:
            found = ctypes.string_at(block, 384)
            for each in (x, *results):
                assert each.data_ptr().to_bytes(8, "little") in found
        gradient = partial(torch.autograd.grad, results[0], x, results[0])
        (grad,), blocks = answered(gradient)
        assert grad.shape == x.shape
        assert len(blocks) == answers


def main() -> None:
    device = Device()
    _kept = install(device)
    local = ours.Local()
    first, second = layer(), layer()
    own = backward(first)  # no backend: PyTorch's own
    with ours.use(local, fallback=False):
        _, blocks = answered(lambda: backward(first))
        assert not blocks, "the first call is Python's"
        for tensors in (first, second, first):
            set_anew.clear()
            results, blocks = answered(lambda tensors=tensors: backward(tensors))
            assert tensors is not second or set_anew == [1, 2], "both kernels' tensors moved"
            assert results[2] is None or not results[2].numel()
            check_arguments(device.prepared[0], tensors, results, blocks)
            assert [each.stride() for each in results[:2]] == [each.stride() for each in own[:2]]
        assert ours.report(reset=True).rows[0].calls == 4
        assert not ours.report().rows

        large = draw(16, 256, 28, 28), draw(16, 256, 28, 28), draw(256, 256, 3, 3)
        for answers in (0, 1):
            assert bool(answered(lambda: backward(large))[1]) == bool(answers)
        assert Graph.made[0].after == [None, 0]
        assert Graph.made[-1].after.count(None) == 2, "long kernels run side by side"
        _ = ours.report(reset=True)

        state["stream"] = 6  # another stream has zeros of its own, so it is remembered apart
        assert [len(answered(lambda: backward(first))[1]) for _ in range(2)] == [0, len(blocks)]
        state["stream"] = 5
        for name, value in (("capturing", 1), ("context", 78)):
            before, state[name] = state[name], value
            assert not answered(lambda: backward(first))[1], name
            state[name] = before
        same = layer(15)
        same = same[0], same[0], same[2]
        for _ in range(2):  # in another call they may be two tensors
            assert not answered(lambda: backward(same))[1]
        check_copies(first)
        check_threads(first)
        for indices in (False, True):
            check_pooling(indices)
        state["status"] = 700
        assert "CUDA error 700" in failure(lambda: backward(first))
        state["status"] = 0
        assert "UnsupportedProblem: not with 13" in failure(lambda: backward(layer(13)))
        x, w = (each.detach().requires_grad_() for each in first[1:])
        for _ in range(2):
            y = torch.nn.functional.conv2d(x, w, padding=1)
            launched.clear()
            torch.autograd.grad(y, (x, w), first[0])
        assert launched, "autograd's calls are answered alike"

    found, blocks = answered(lambda: backward(first))
    assert not blocks
    assert all(torch.equal(a, b) for a, b in zip(found[:2], own[:2], strict=True))
    device.faster = "PyTorch is faster"
    with ours.use(local):
        other = layer(16)
        _ = ours.report(reset=True)
        for _ in range(3):
            found, blocks = answered(lambda: backward(other))
            assert not blocks
        (row,) = ours.report().rows
        assert (row.computed_by, row.kernel, row.calls) == ("PyTorch", "PyTorch is faster", 3)
    ours.use(None)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], backward(other)[:2], strict=True))
    print("all right")


if __name__ == "__main__":
    main()
