"""`Local`: runs the service's kernels in this process, on PyTorch's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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

__all__ = ["Local"]

# GPU kernels rely on this alignment; PyTorch aligns allocations to at least as much.
_ALIGNMENT_BYTES = 256
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
        # An operation need not read all of its tensors: grad_bias alone needs no input.
        names = list(operation.inputs)
        self._inputs = [names.index(name) for name in prepared.inputs]
        specs = [prepared.outputs[name] for name in operation.outputs]
        self._outputs = [_place(spec, channels_last) for spec in specs]
        self._order = [list(operation.outputs).index(name) for name in prepared.outputs]
        self._workspace = (prepared.workspace_bytes,)
        self._stream = _stream_of(device) if device.type == "cuda" else None

    @property
    def kernel(self) -> str:
        return str(self._prepared.kernel)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        like = tensors[0]
        # Allocated in PyTorch's order of dimensions, since permuting each would double the time.
        results = [
            like.new_empty_strided(size, strides, dtype=dtype)
            for size, strides, dtype in self._outputs
        ]
        addresses = [tensors[index].data_ptr() for index in self._inputs]
        if self._stream is None:
            addresses += [results[index].data_ptr() for index in self._order]
            self._launch(addresses, 0, 0)
            return results
        moved = []  # keeps the copies alive until the launch
        for place, address in enumerate(addresses):
            if address % _ALIGNMENT_BYTES:  # a view into another tensor
                moved.append(tensors[self._inputs[place]].clone())
                addresses[place] = moved[-1].data_ptr()
        addresses += [results[index].data_ptr() for index in self._order]
        workspace = 0
        if self._workspace[0]:
            memory = like.new_empty(self._workspace, dtype=torch.uint8)
            workspace = memory.data_ptr()
        capturing = torch.cuda.is_current_stream_capturing()
        self._launch(addresses, workspace, self._stream(), capturing=capturing)
        return results


def _place(spec: Any, channels_last: bool) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return a result's size and strides, in PyTorch's order of dimensions, and its dtype."""
    blank = torch_order(torch.empty(spec.shape, device="meta"), channels_last)
    return tuple(blank.shape), blank.stride(), getattr(torch, spec.dtype.value)


def _stream_of(device: torch.device) -> Callable[[], int]:
    """Return a function that gives a CUDA device's current stream.

    It avoids ``torch.cuda.current_stream``, which takes ten times as long.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    direct = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if direct is not None:
        return partial(direct, index)
    return lambda: torch.cuda.current_stream(device).cuda_stream
