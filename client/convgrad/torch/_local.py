"""`Local`: runs the service's kernels in this process, on PyTorch's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from convgrad._bridges import find_executor
from convgrad.torch._backends import Operation, Runner
from convgrad.torch._tensors import (
    DTYPES,
    INDICES,
    contract_layout,
    contract_order,
    torch_order,
)

__all__ = ["ALIGNMENT_BYTES", "CudaLaunch", "Local", "is_capturing"]

ALIGNMENT_BYTES = 256
"""GPU kernels rely on this alignment; PyTorch aligns allocations to at least as much."""
_NAMES = {**DTYPES, **INDICES}


class Local:
    """Computes on the tensors' device, with the GPU kernels or the CPU kernels.

    Tensors are not copied. On a GPU, kernels are launched on PyTorch's current stream, outputs and
    workspace come from its allocator, and calls may be captured in a CUDA graph. The first call
    with new shapes plans the operation and compiles kernels that are not cached; later calls only
    launch.

    Parameters
    ----------
    wait : bool
        Wait until missing kernels are compiled. Otherwise they are compiled in the background, and
        until they are ready `use` leaves their layers to PyTorch.

    Raises
    ------
    convgrad.DeviceUnavailable
        The service is not installed; or, while computing, CuPy, NVRTC or the GPU is missing.
    """

    name = "local"
    forward_devices = ("cuda",)
    """The devices on which `use` gives it the forward passes of poolings too."""

    def __init__(self, *, wait: bool = True) -> None:
        self._wait = wait
        self._executor = find_executor()

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
        kind = CudaLaunch if device.type == "cuda" else _Launch
        return kind(prepared, operation, device, channels_last)

    def __eq__(self, other: object) -> bool:
        # Equal backends share what they have prepared, so `use(Local())` may be called in a loop.
        if type(self) is Local and type(other) is Local:
            return self._wait == other._wait
        return self is other

    def __hash__(self) -> int:
        return hash((Local, self._wait))

    def __repr__(self) -> str:
        return "Local()"


class _Launch:
    """Runs a prepared operation on PyTorch's memory. See `Runner`.

    Attributes
    ----------
    prepared : Prepared
        The service's operation.
    inputs, order : list of int
        The indices of its tensors and results among the runner's.
    """

    def __init__(
        self, prepared: Any, operation: Operation, device: torch.device, channels_last: bool
    ) -> None:
        self._launch, self._device, self._last = prepared.launch, device, channels_last
        self.prepared = prepared
        # An operation need not read all of its tensors: grad_bias alone needs no input.
        names = list(operation.inputs)
        self.inputs = [names.index(name) for name in prepared.inputs]
        specs = [prepared.outputs[name] for name in operation.outputs]
        self._outputs = [_place(spec, channels_last) for spec in specs]
        self.order = [list(operation.outputs).index(name) for name in prepared.outputs]

    @property
    def kernel(self) -> str:
        return str(self.prepared.kernel)

    @property
    def faster_peer(self) -> str | None:
        found: str | None = self.prepared.faster_peer
        return found

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        # Allocated in PyTorch's order of dimensions, since permuting each would double the time.
        results = [
            torch.empty_strided(size, strides, dtype=dtype, device=self._device)
            for size, strides, dtype in self._outputs
        ]
        addresses = [tensors[index].data_ptr() for index in self.inputs]
        addresses += [results[index].data_ptr() for index in self.order]
        self._launch(addresses, 0, 0)
        return results


class CudaLaunch(_Launch):
    """Launches on a GPU, on PyTorch's current stream."""

    def __init__(
        self, prepared: Any, operation: Operation, device: torch.device, channels_last: bool
    ) -> None:
        super().__init__(prepared, operation, device, channels_last)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        workspace = prepared.workspace_bytes
        self._workspace = ((workspace,), (1,), torch.uint8) if workspace else None

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        index = self._index
        if _current_device() != index:
            with torch.cuda.device(index):
                return self(tensors)
        results = [_empty(*place) for place in self._outputs]
        addresses = [tensors[index].data_ptr() for index in self.inputs]
        moved = []  # keeps the copies alive until the launch
        for place, address in enumerate(addresses):
            if address % ALIGNMENT_BYTES:  # a view into another tensor
                moved.append(tensors[self.inputs[place]].clone())
                addresses[place] = moved[-1].data_ptr()
        addresses += [results[index].data_ptr() for index in self.order]
        stream, capturing = _current_stream(index), is_capturing()
        if self._workspace is None:
            self._launch(addresses, 0, stream, capturing=capturing)
        else:
            memory = _empty(*self._workspace)
            self._launch(addresses, memory.data_ptr(), stream, capturing=capturing)
        return results


def _place(spec: Any, channels_last: bool) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return a result's size and strides, in PyTorch's order of dimensions, and its dtype."""
    blank = torch_order(torch.empty(spec.shape, device="meta"), channels_last)
    return tuple(blank.shape), blank.stride(), getattr(torch, spec.dtype.value)


def _empty_on_current_device(
    size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


# What a launch asks of PyTorch, by the functions that inductor's generated code calls where there
# are such: the public ones take up to ten times as long.
_C: Any = torch._C
_current_device: Callable[[], int] = getattr(_C, "_cuda_getDevice", torch.cuda.current_device)
is_capturing: Callable[[], bool] = getattr(
    _C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
_current_stream: Callable[[int], int] = getattr(
    _C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
_empty: Callable[..., torch.Tensor] = getattr(
    _C._dynamo.guards, "_empty_strided_cuda", _empty_on_current_device
)
