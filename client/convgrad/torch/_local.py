"""`Local`: the service's plans and kernels in this process, on PyTorch's own memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

import torch

from convgrad.errors import DeviceUnavailable
from convgrad.torch._backends import Operation, Runner
from convgrad.torch._tensors import (
    DTYPES,
    INDICES,
    contract_layout,
    contract_order,
    torch_order,
)

__all__ = ["Local"]

# What GPU kernels may rely on; PyTorch's allocations start at multiples of more.
_ALIGNMENT_BYTES = 256
_NAMES = {**DTYPES, **INDICES}


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

    def prepare(
        self, operation: Operation, tensors: Sequence[torch.Tensor], *, channels_last: bool
    ) -> Runner:
        """See `Backend.prepare`."""
        device = tensors[0].device
        specs = {
            name: (tuple(contract_order(tensor, channels_last).shape), _NAMES[tensor.dtype])
            for name, tensor in zip(operation.inputs, tensors, strict=True)
        }
        layout = contract_layout(tensors[0].dim(), channels_last)
        executor = self._executor(device.type, device.index or 0)
        prepared = executor.prepare(
            operation.name, specs, {**operation.parameters, **layout}, wait=self._wait
        )
        return _Launch(prepared, operation, device, channels_last)

    def __repr__(self) -> str:
        return "Local()"


class _Launch:
    """Launches a prepared operation on PyTorch's memory. See `Runner`."""

    def __init__(
        self, prepared: Any, operation: Operation, device: torch.device, channels_last: bool
    ) -> None:
        self._launch, self._device, self._last = prepared.launch, device, channels_last
        self._prepared = prepared
        # An operation need not read all that it was given: grad_bias no input, say.
        names = list(operation.inputs)
        self._inputs = [names.index(name) for name in prepared.inputs]
        specs = [prepared.outputs[name] for name in operation.outputs]
        self._outputs = [(tuple(spec.shape), getattr(torch, spec.dtype.value)) for spec in specs]
        self._order = [list(operation.outputs).index(name) for name in prepared.outputs]
        self._workspace_bytes = prepared.workspace_bytes
        self._cuda = device.type == "cuda"

    @property
    def kernel(self) -> str:
        return str(self._prepared.kernel)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        device = self._device
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._outputs]
        sources = [tensors[index] for index in self._inputs]
        addresses = [source.data_ptr() for source in sources]
        addresses += [results[index].data_ptr() for index in self._order]
        if self._cuda:
            for index, address in enumerate(addresses[: len(sources)]):
                if address % _ALIGNMENT_BYTES:  # a view that starts anywhere
                    sources[index] = sources[index].clone()
                    addresses[index] = sources[index].data_ptr()
            workspace = 0
            if self._workspace_bytes:
                memory = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=device)
                workspace = memory.data_ptr()
            stream = torch.cuda.current_stream(device).cuda_stream
            capturing = torch.cuda.is_current_stream_capturing()
            self._launch(addresses, workspace, stream, capturing=capturing)
        else:
            self._launch(addresses, 0, 0)
        return [torch_order(result, True) for result in results] if self._last else results


@lru_cache(maxsize=1)
def _find_executor() -> Any:
    for entry in entry_points(group="convgrad.executors"):
        return entry.load()
    raise DeviceUnavailable(
        "Local computes in this process and needs the service, which is not installed here: "
        "pip install 'convgrad[service]' (and 'convgrad[cuda13]' for a GPU), or call "
        "convgrad.torch.use(convgrad.torch.Remote(url))"
    )
