"""Times other installed libraries (PyTorch) on the same tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from convgrad_service.backends.base import Stopwatch
from convgrad_service.examination.torch_operators import NoOperator, torch_operator
from convgrad_service.problems import Problem

# What PyTorch does differently from the operation, in addition to its name.
_NOTES: Mapping[str, str] = {
    "grouped_conv_conv_fwd": "one operator after another",
    **{f"maxpool{ndim}d_bwd": "from indices" for ndim in (1, 2, 3)},
    "adaptive_max_pool_bwd": "from indices",
}


class PeerWatch(NamedTuple):
    """A peer's stopwatch, or the reason why it cannot be timed."""

    name: str
    watch: Stopwatch | None
    reason: str | None = None


def peers_for(watch: Stopwatch, problem: Problem, parameters: Mapping[str, Any]) -> list[PeerWatch]:
    """Return PyTorch, which uses cuDNN on a GPU and oneDNN on a CPU.

    ``parameters`` are those of the operation's request.
    """
    if importlib.util.find_spec("torch") is None:
        return [PeerWatch("PyTorch", None, "PyTorch is not installed with this server")]
    import torch

    name = f"PyTorch {torch.__version__.partition('+')[0]}"
    try:
        run = torch_operator(torch, problem, parameters, torch_tensors(torch, watch.tensors))
        if _on_gpu(watch):
            name += f", cuDNN {torch.backends.cudnn.version()}"
            torch.backends.cudnn.benchmark = True
            torch.backends.cudnn.allow_tf32 = getattr(problem, "precision", "highest") == "high"
            run = _recorded(torch, watch, run)
        else:
            run()
    except NoOperator as reason:
        return [PeerWatch(name, None, str(reason))]
    # A failure of a foreign library must not affect our own timing.
    except Exception as error:  # noqa: BLE001
        return [PeerWatch(name, None, f"PyTorch does not compute it: {error}"[:500])]
    if (note := _NOTES.get(problem.operation)) is not None:
        name += f", {note}"
    return [PeerWatch(name, watch.like(run))]


def _on_gpu(watch: Stopwatch) -> bool:
    return type(next(iter(watch.tensors.values()))).__module__.startswith("cupy")


def torch_tensors(torch: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return PyTorch tensors that share the arrays' memory."""
    found = {}
    for name, array in arrays.items():
        if array.dtype.name == "bfloat16":
            found[name] = _wrapped(torch, array.view("uint16")).view(torch.bfloat16)
        else:
            found[name] = _wrapped(torch, array)
    return found


def _wrapped(torch: Any, array: Any) -> Any:
    on_host = isinstance(array, np.ndarray)
    return torch.from_numpy(array) if on_host else torch.as_tensor(array, device="cuda")


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
