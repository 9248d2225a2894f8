"""Times other installed libraries (PyTorch) on the same tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from convgrad_service.backends.base import Stopwatch
from convgrad_service.problems import (
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    GroupedConvBwdWeight,
    MaxPoolFwd,
    Problem,
)

__all__ = ["PeerWatch", "peers_for"]


class PeerWatch(NamedTuple):
    """A peer's stopwatch, or the reason why it cannot be timed."""

    name: str
    watch: Stopwatch | None
    reason: str | None = None


def peers_for(watch: Stopwatch, problem: Problem, parameters: Mapping[str, Any]) -> list[PeerWatch]:
    """Return PyTorch, which uses cuDNN on a GPU and oneDNN on a CPU."""
    if importlib.util.find_spec("torch") is None:
        return [PeerWatch("PyTorch", None, "PyTorch is not installed beside this server")]
    import torch

    name = f"PyTorch {torch.__version__.partition('+')[0]}"
    if (reason := _why_not(problem)) is not None:
        return [PeerWatch(name, None, reason)]
    try:
        run = _RUNS[type(problem)](torch, watch, problem)
        cuda = next(iter(watch.tensors.values())).__class__.__module__.startswith("cupy")
        if cuda:
            name += f", cuDNN {torch.backends.cudnn.version()}"
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.allow_tf32 = getattr(problem, "precision", "highest") == "high"
            run = _recorded(torch, watch, run)
        else:
            run()
        return [PeerWatch(name, watch.like(run))]
    # A failure of a foreign library must not affect our own timing.
    except Exception as error:  # noqa: BLE001
        return [PeerWatch(name, None, f"PyTorch does not compute it: {error}"[:500])]


def _why_not(problem: Problem) -> str | None:
    if type(problem) not in _RUNS:
        return f"PyTorch is not timed for {problem.operation}"
    layout = getattr(problem, "layout", None)
    if layout is not None and layout.grouped:
        return f"PyTorch has no layout {layout.name}"
    conv = getattr(problem, "conv", None)
    if conv is not None and any(before != after for before, after in conv.padding):
        return "PyTorch pads both sides alike"
    epilogue = getattr(problem, "epilogue", None)
    if epilogue is not None and not epilogue.trivial:
        return "PyTorch's operator has no epilogue"
    if getattr(problem, "weight_dtype", problem.dtype) != problem.dtype:
        return "PyTorch's gradients have the inputs' type"
    return None


def _tensors(torch: Any, watch: Stopwatch, problem: Any) -> dict[str, Any]:
    """Return PyTorch tensors, channels first, that share the arrays' memory."""
    last = problem.layout.channels_last
    found = {}
    for name, array in watch.tensors.items():
        if array.dtype.name == "bfloat16":
            tensor = _wrapped(torch, array.view("uint16")).view(torch.bfloat16)
        else:
            tensor = _wrapped(torch, array)
        found[name] = torch.movedim(tensor, -1, 1) if last and tensor.ndim > 2 else tensor
    return found


def _wrapped(torch: Any, array: Any) -> Any:
    on_host = isinstance(array, np.ndarray)
    return torch.from_numpy(array) if on_host else torch.as_tensor(array, device="cuda")


def _steps(conv: Any) -> tuple[list[int], list[int], list[int], int]:
    padding = [before for before, _ in conv.padding]
    return list(conv.stride), padding, list(conv.dilation), conv.groups


def _forward(torch: Any, watch: Stopwatch, problem: ConvFwd) -> Callable[[], Any]:
    t = _tensors(torch, watch, problem)
    stride, padding, dilation, groups = _steps(problem.conv)
    none = [0] * len(stride)

    def run() -> Any:
        return torch.ops.aten.convolution(
            t["input"], t["weight"], t.get("bias"), stride, padding, dilation, False, none, groups
        )

    return run


def _backward(
    torch: Any, watch: Stopwatch, problem: Any, wanted: tuple[bool, bool, bool]
) -> Callable[[], Any]:
    t = _tensors(torch, watch, problem)
    stride, padding, dilation, groups = _steps(problem.conv)
    none = [0] * len(stride)
    # Only the shape of an operand that is not read matters.
    x, w = t.get("input", t.get("grad_input")), t.get("weight", t.get("grad_weight"))
    bias = [problem.conv.out_channels] if wanted[2] else None

    def run() -> Any:
        return torch.ops.aten.convolution_backward(
            t["grad_output"], x, w, bias, stride, padding, dilation, False, none, groups, wanted
        )

    return run


def _bwd_data(torch: Any, watch: Stopwatch, problem: ConvBwdData) -> Callable[[], Any]:
    return _backward(torch, watch, problem, (True, False, False))


def _bwd_weight(torch: Any, watch: Stopwatch, problem: GroupedConvBwdWeight) -> Callable[[], Any]:
    wanted = problem.wanted
    return _backward(torch, watch, problem, (False, "grad_weight" in wanted, "grad_bias" in wanted))


def _conv_backward(torch: Any, watch: Stopwatch, problem: ConvBackward) -> Callable[[], Any]:
    made = problem.outputs
    names = ("grad_input", "grad_weight", "grad_bias")
    first, second, third = (name in made for name in names)
    return _backward(torch, watch, problem, (first, second, third))


def _pool_forward(torch: Any, watch: Stopwatch, problem: MaxPoolFwd) -> Callable[[], Any]:
    t = _tensors(torch, watch, problem)
    pool = problem.pool
    ndim = len(pool.kernel_size)
    function = getattr(torch.nn.functional, f"max_pool{ndim}d")
    padding = [before for before, _ in pool.padding]
    if any(before != after for before, after in pool.padding):
        raise ValueError("it pads both sides alike")

    def run() -> Any:
        return function(
            t["input"], list(pool.kernel_size), list(pool.stride), padding, list(pool.dilation)
        )

    return run


_RUNS: Mapping[type[Problem], Callable[..., Callable[[], Any]]] = {
    ConvFwd: _forward,
    ConvBwdData: _bwd_data,
    GroupedConvBwdWeight: _bwd_weight,
    ConvBackward: _conv_backward,
    MaxPoolFwd: _pool_forward,
}


def _recorded(torch: Any, watch: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Record ``run`` as a CUDA graph; return a function that replays it on the watch's stream."""
    stream = torch.cuda.ExternalStream(watch.stream.ptr)
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return replay
