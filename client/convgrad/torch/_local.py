"""`Local`: the service's plans and kernels in this process, on PyTorch's own memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import torch

from convgrad.errors import DeviceUnavailable
from convgrad.torch._backends import Operation
from convgrad.torch._tensors import DTYPES, contract_layout, contract_order, torch_order

__all__ = ["Local"]

# What kernels may rely on; PyTorch's allocations start at multiples of more.
_ALIGNMENT_BYTES = 256


class _Launchable(NamedTuple):
    """A prepared operation, and what to allocate for it."""

    prepared: Any
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    workspace_bytes: int


class Local:
    """Computes on the tensors' own device: CUDA tensors by the GPU kernels, CPU tensors by the
    CPU's.

    Nothing is copied. On a GPU, work goes to PyTorch's current stream, outputs and workspace come
    from its allocator, and calls may be captured in a CUDA graph. The first call with new
    shapes plans, and compiles kernels that are not cached; later ones only launch.

    Parameters
    ----------
    wait : bool
        Wait for kernels that have to be compiled first. Otherwise they are compiled in the
        background, and until they are there `use` leaves their layers to PyTorch.

    Raises
    ------
    convgrad.DeviceUnavailable
        The service is not installed here; or, while computing, there is no CuPy, no compiler, or
        no such GPU.
    """

    name = "local"

    def __init__(self, *, wait: bool = True) -> None:
        self._wait = wait
        self._executor = _find_executor()
        self._launchables: dict[Any, _Launchable] = {}

    def run(
        self, operation: Operation, tensors: Mapping[str, torch.Tensor], *, channels_last: bool
    ) -> tuple[dict[str, torch.Tensor], str]:
        """See `Backend.run`."""
        given = [tensors[ours] for ours in operation.inputs.values()]
        device = given[0].device
        key = (operation, channels_last, device, *((t.shape, t.dtype) for t in given))
        launchable = self._launchables.get(key)
        if launchable is None:
            launchable = self._launchables[key] = self._prepare(operation, tensors, channels_last)
        prepared, inputs, outputs, workspace_bytes = launchable
        results = [torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in outputs]
        sources = [_aligned(tensors[ours]) for ours in inputs]
        addresses = [tensor.data_ptr() for tensor in (*sources, *results)]
        workspace, stream = 0, 0
        if device.type == "cuda":
            if workspace_bytes:
                memory = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
                workspace = memory.data_ptr()
            stream = torch.cuda.current_stream(device).cuda_stream
        prepared.launch(addresses, workspace, stream)
        named = zip(outputs, results, strict=True)
        found = {ours: torch_order(result, channels_last) for (ours, _, _), result in named}
        return found, prepared.kernel

    def _prepare(
        self, operation: Operation, tensors: Mapping[str, torch.Tensor], channels_last: bool
    ) -> _Launchable:
        any_tensor = next(iter(tensors.values()))
        device = any_tensor.device
        specs = {
            name: (
                tuple(contract_order(tensors[ours], channels_last).shape),
                DTYPES[tensors[ours].dtype],
            )
            for name, ours in operation.inputs.items()
        }
        layout = contract_layout(any_tensor.dim(), channels_last)
        executor = self._executor(device.type, device.index or 0)
        prepared = executor.prepare(
            operation.name, specs, {**operation.parameters, **layout}, wait=self._wait
        )
        outputs = tuple(
            (operation.outputs[name], tuple(spec.shape), getattr(torch, spec.dtype.value))
            for name, spec in prepared.outputs.items()
        )
        inputs = tuple(operation.inputs[name] for name in prepared.inputs)
        return _Launchable(prepared, inputs, outputs, prepared.workspace_bytes)

    def __repr__(self) -> str:
        return "Local()"


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it is a view that starts at an odd address."""
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


@lru_cache(maxsize=1)
def _find_executor() -> Any:
    for entry in entry_points(group="convgrad.executors"):
        return entry.load()
    raise DeviceUnavailable(
        "Local computes in this process and needs the service, which is not installed here: "
        "pip install 'convgrad[service]' (and 'convgrad[cuda13]' for a GPU), or call "
        "convgrad.torch.use(convgrad.torch.Remote(url))"
    )
