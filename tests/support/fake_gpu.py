"""A fake GPU: memory that other processes open by a handle, and a CPU that computes.

What another process would allocate on a GPU is a file below /dev/shm here, and its handle the
file's name, padded to CUDA's 64 bytes.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cuda.residents import Residents, mirrored, places_of
from convgrad_service.problems import Problem
from convgrad_service.problems.base import Slices, TensorSpec

__all__ = ["FakeGpu", "Tensor", "allocated", "fake_gpu", "handle_of", "one_of_two"]

SHM = Path("/dev/shm")  # noqa: S108 - where the fake has its memory
HANDLE_BYTES = 64


def handle_of(name: str) -> bytes:
    return name.encode().ljust(HANDLE_BYTES, b"\0")


@contextmanager
def allocated(size_bytes: int) -> Iterator[tuple[bytes, NDArray[np.uint8]]]:
    """Memory that another process has allocated: its handle and its bytes."""
    name = f"fakegpu_{uuid.uuid4().hex}"
    path = SHM / name
    path.write_bytes(bytes(size_bytes))
    try:
        yield handle_of(name), np.memmap(path, np.uint8, "r+")
    finally:
        path.unlink(missing_ok=True)


class Tensor:
    """A tensor on the fake; no array, so that nobody takes it for one by accident."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __getitem__(self, cut: Slices) -> Tensor:
        return Tensor(self.array[cut])

    def fill(self, array: NDArray[Any]) -> None:
        self.array[...] = array

    def read(self, target: NDArray[Any]) -> None:
        target[...] = self.array


class Memory:
    """An allocation that was opened."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data

    def array(self, offset: int, spec: TensorSpec) -> Tensor:
        found = self._data[offset : offset + spec.size_bytes]
        return Tensor(found.view(spec.dtype.numpy).reshape(spec.shape))

    def close(self) -> None:
        del self._data


class FakeGpu(CpuBackend):
    """Computes as the CPU does; ``moved_bytes`` went between host and device, of which
    ``uploaded_bytes`` up. An outcome's ``workspace_bytes`` is what was uploaded for it."""

    def __init__(self, device: int = 0, devices: int = 1) -> None:
        super().__init__(threads=1)
        self.device_number, self.devices = device, devices
        self.moved_bytes = self.uploaded_bytes = 0
        self.opened: list[bytes] = []
        self.residents = Residents(self._upload, lambda like: Tensor(np.empty_like(like)))
        self._lock = threading.Lock()
        self._since = threading.local()

    def open_handle(self, handle: bytes, size_bytes: int) -> Memory:
        try:
            data = np.memmap(SHM / handle.rstrip(b"\0").decode(), np.uint8, "r+")
        except (OSError, ValueError) as error:
            raise InvalidProblem(f"the raw handle cannot be opened: {error}") from None
        if not 0 < size_bytes <= data.size:
            raise InvalidProblem(
                f"the CUDA allocation has {data.size:,} bytes; a region of {size_bytes:,} is not "
                "in it"
            )
        self.opened.append(handle)
        return Memory(data)

    def resident(self, key: int, version: int, array: NDArray[Any]) -> Any:
        return self.residents.of(key, version, array)

    def resident_place(self, key: int, version: int, array: NDArray[Any]) -> Any:
        return self.residents.place(key, version, array)

    def forget(self, key: int) -> None:
        self.residents.forget(key)

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, Any],
        cancelled: threading.Event | None = None,
        out: Mapping[str, Any] | None = None,
    ) -> Outcome:
        arrays = {name: self._moved(tensors[name]) for name in problem.inputs}
        found = super().run(problem, arrays, cancelled)
        places = places_of(problem, out or {})
        for name, place in places.items():
            if isinstance(place, Tensor):
                place.fill(found.outputs[name])
                continue
            self._count(down=found.outputs[name].nbytes)
            host = place if isinstance(place, np.ndarray) else place.host
            host[...] = found.outputs[name]
        for place in mirrored(places):
            place.device.fill(place.host)
            place.written()
        uploaded_bytes, self._since.bytes = self._uploaded_for_this, 0
        kernel = f"device {self.device_number}"
        return replace(found, outputs=places, kernel=kernel, workspace_bytes=uploaded_bytes)

    @property
    def _uploaded_for_this(self) -> int:
        """By this thread, since it last ran something: one request at a time is a thread's."""
        return getattr(self._since, "bytes", 0)

    def _moved(self, tensor: Any) -> NDArray[Any]:
        if isinstance(tensor, Tensor):
            return tensor.array
        array: NDArray[Any] = tensor
        self._count(up=array.nbytes)
        return array

    def _upload(self, array: NDArray[Any]) -> Tensor:
        self._count(up=array.nbytes)
        return Tensor(array.copy())

    def _count(self, up: int = 0, down: int = 0) -> None:
        self._since.bytes = self._uploaded_for_this + up
        with self._lock:
            self.moved_bytes += up + down
            self.uploaded_bytes += up


def fake_gpu(device: int) -> FakeGpu:
    """For a worker's process."""
    return FakeGpu()


def one_of_two(device: int) -> FakeGpu:
    """One of two, for a worker's process."""
    return FakeGpu(device, devices=2)
