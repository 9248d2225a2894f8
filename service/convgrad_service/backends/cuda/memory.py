"""Moving tensors to a GPU and back: one allocation a problem, and pinned staging buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.backends.cuda.faults import alloc_or_none
from convgrad_service.backends.cuda.pinned import Pinned
from convgrad_service.plans.cuda.program import ALIGNMENT, CudaPlan, ceil_div
from convgrad_service.problems.base import Problem

__all__ = ["Arena", "Lane", "UploadQueue", "arena_of"]

STAGING_BYTES = 32 * 2**20
"""Size of each of two pinned buffers: one is filled while the other is transferred."""

# One core copies at a fraction of memory bandwidth, so several threads share a long copy.
COPIERS = 4
SHARED_COPY_BYTES = 4 * 2**20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets of all buffers in one allocation: inputs, outputs and checks, other workspace.

    ``returned_bytes`` is the end of what is downloaded: outputs and checks.
    """

    offsets: Mapping[str, int]
    input_bytes: int
    returned_bytes: int
    size_bytes: int

    def addresses(self, base: int) -> dict[str, int]:
        """Return the address of every buffer in an allocation at ``base``."""
        return {name: base + offset for name, offset in self.offsets.items()}


def arena_of(problem: Problem, plan: CudaPlan) -> Arena:
    """Lay out the buffers of a problem's plan."""
    checks = {check.buffer for check in plan.checks}
    sizes = {name: spec.size_bytes for name, spec in problem.inputs.items()}
    of_inputs = len(sizes)
    sizes |= {name: spec.size_bytes for name, spec in problem.outputs.items()}
    workspace = sorted(plan.workspace, key=lambda item: item.name not in checks)
    sizes |= {item.name: item.size_bytes for item in workspace}
    offsets, ends, end = {}, [0], 0
    for name, size in sizes.items():
        offsets[name] = end
        end += ceil_div(size, ALIGNMENT) * ALIGNMENT
        ends.append(end)
    return Arena(
        offsets, ends[of_inputs], ends[of_inputs + len(problem.outputs) + len(checks)], end
    )


class UploadQueue:
    """Serializes large uploads of several streams, first come, first served.

    Concurrent uploads would share the bus and all end late; one after another, the first problem
    is computed while the second is uploaded. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None

    @contextmanager
    def entered(self, stream: Any, event: Any, size: int) -> Iterator[None]:
        """Make copies of ``size`` bytes, issued inside, wait for uploads of other streams.

        ``event`` belongs to the stream.
        """
        if size < SHARED_COPY_BYTES:
            yield  # a small copy is done sooner than the queue would be
            return
        with self._lock:
            if self._last is not None:
                stream.wait_event(self._last)
            yield
            event.record(stream)
            self._last = event


class Lane:
    """A stream with its staging buffers, used by one request at a time.

    ``copiers`` are at least `COPIERS` threads, and lanes may share them. Tensors in ``pinned``
    memory are copied directly, others through staging buffers. Lanes share one ``uploads`` queue.
    The stream's memory pool starts with a free block of ``pooled_bytes``, parts of which are
    allocated without a call of the driver: for one, other streams wait.
    """

    def __init__(
        self,
        copiers: Executor,
        pinned: Pinned | None = None,
        uploads: UploadQueue | None = None,
        pooled_bytes: int = 0,
    ) -> None:
        self._direct, self._uploads = pinned, uploads or UploadQueue()
        self._cuda: Any = import_cupy().cuda
        self._copiers = copiers
        self.stream: Any = self._cuda.Stream(non_blocking=True)
        self._uploaded: Any = self._cuda.Event(disable_timing=True)
        if pooled_bytes:
            with self.stream:
                # Freed at once, it stays in the pool.
                alloc_or_none(self._cuda.alloc, pooled_bytes)
        self._pinned: list[Any] = []
        self._events: list[Any] = []

    def upload(self, tensors: Iterable[tuple[int, NDArray[Any]]], base: int) -> None:
        """Start to copy tensors to offsets from ``base``, which must ascend."""
        items = list(tensors)
        size = sum(array.nbytes for _, array in items)
        with self._uploads.entered(self.stream, self._uploaded, size):
            rest = self._copy_directly(items, base, to_host=False)
        if not rest:
            return
        parts = [(offset, _flat(array)) for offset, array in items]
        first = parts[0][0]
        size = max(offset + data.nbytes for offset, data in parts) - first
        for index, start, stop in _chunks(size):
            staging = self._staging(index, stop - start)
            for begin, end, data in _overlaps(parts, first + start, first + stop):
                self._put(staging[begin:end], data)
            self._copy(base + first + start, staging.ctypes.data, stop - start, to_host=False)
            self._events[index].record(self.stream)

    def download_soon(
        self, tensors: Iterable[tuple[int, NDArray[Any]]], base: int
    ) -> list[tuple[int, NDArray[Any]]]:
        """Start to copy what needs no staging; return the rest, for `download`."""
        return self._copy_directly(list(tensors), base, to_host=True)

    def download(self, tensors: Iterable[tuple[int, NDArray[Any]]], base: int) -> None:
        """Copy from offsets from ``base``, which must ascend, into contiguous tensors, and wait."""
        parts = [(offset, _flat(array)) for offset, array in tensors]
        first = parts[0][0]
        size = max(offset + data.nbytes for offset, data in parts) - first
        pending: tuple[int, int, int] | None = None
        for chunk in _chunks(size):
            index, start, stop = chunk
            staging = self._staging(index, stop - start)
            self._copy(staging.ctypes.data, base + first + start, stop - start, to_host=True)
            self._events[index].record(self.stream)
            if pending is not None:
                self._unpack(parts, first, *pending)
            pending = chunk
        if pending is not None:
            self._unpack(parts, first, *pending)

    def _copy_directly(
        self, tensors: list[tuple[int, NDArray[Any]]], base: int, *, to_host: bool
    ) -> list[tuple[int, NDArray[Any]]]:
        """Start copies that need no staging; return the rest (of an upload, all or none)."""
        if self._direct is None:
            return tensors
        found = [(item, self._direct.stretches(item[1])) for item in tensors]
        others = [item for item, stretches in found if stretches is None]
        if others and not to_host:
            return tensors  # one staged copy covers all of them
        for (offset, _), stretches in found:
            device = base + offset
            for address, size in stretches or ():
                target, source = (address, device) if to_host else (device, address)
                self._copy(target, source, size, to_host=to_host)
                device += size
        return others

    def _unpack(
        self, parts: list[tuple[int, Bytes]], first: int, index: int, start: int, stop: int
    ) -> None:
        staging = self._staging(index, stop - start)
        for begin, end, data in _overlaps(parts, first + start, first + stop):
            self._put(data, staging[begin:end])

    def _put(self, target: Bytes, source: Bytes) -> None:
        if source.nbytes < SHARED_COPY_BYTES:
            target[...] = source
            return
        cuts = [source.nbytes * part // COPIERS for part in range(COPIERS + 1)]
        shares = [slice(*cut) for cut in pairwise(cuts)]
        futures = [
            self._copiers.submit(np.copyto, target[share], source[share]) for share in shares
        ]
        wait(futures)
        for future in futures:
            future.result()

    def _staging(self, index: int, size: int) -> Bytes:
        """Wait until a pinned buffer's last copy is done, and return its first bytes."""
        if not self._pinned:
            self._pinned = [self._cuda.alloc_pinned_memory(STAGING_BYTES) for _ in range(2)]
            self._events = [self._cuda.Event(disable_timing=True) for _ in range(2)]
        self._events[index].synchronize()
        return np.frombuffer(self._pinned[index], np.uint8, size)

    def _copy(self, target: int, source: int, size: int, *, to_host: bool) -> None:
        runtime = self._cuda.runtime
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)


def _flat(array: NDArray[Any]) -> Bytes:
    """Return the bytes of an array in row-major order: a view if it is contiguous, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _chunks(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (staging buffer, start, stop) of each chunk of ``size`` bytes."""
    for index, start in enumerate(range(0, size, STAGING_BYTES)):
        yield index % 2, start, min(start + STAGING_BYTES, size)


def _overlaps(
    parts: Iterable[tuple[int, Bytes]], start: int, stop: int
) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the parts of tensors in [start, stop): begin and end, relative to start, and bytes."""
    for offset, data in parts:
        low, high = max(offset, start), min(offset + data.nbytes, stop)
        if low < high:
            yield low - start, high - start, data[low - offset : high - offset]
