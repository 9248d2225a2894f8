"""Moving tensors to a GPU and back: one allocation, one copy for what fits a staging buffer."""

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
from convgrad_service.backends.cuda.pinned import Pinned
from convgrad_service.plans.cuda.program import ALIGNMENT, CudaPlan, ceil_div
from convgrad_service.problems.base import Problem

__all__ = ["Arena", "Lane", "Turns", "arena_of"]

STAGING_BYTES = 32 * 2**20
"""A pinned buffer; there are two, so that one is filled while the other travels."""

# One core copies at a fraction of what the memory and the bus allow, so more of them share a copy
# that is long enough to be worth telling them.
COPIERS = 4
SHARED_COPY_BYTES = 4 * 2**20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Arena:
    """Where each buffer lies in one allocation: inputs, then what comes back, then the rest."""

    offsets: Mapping[str, int]
    input_bytes: int
    returned_bytes: int
    """Where what comes back ends."""
    size_bytes: int

    def addresses(self, base: int) -> dict[str, int]:
        """Of every buffer, in an allocation at ``base``."""
        return {name: base + offset for name, offset in self.offsets.items()}


def arena_of(problem: Problem, plan: CudaPlan) -> Arena:
    """The arena of a problem: checks come back with the outputs."""
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


class Turns:
    """Has large uploads of several streams travel one after another, in the order they were asked.

    Side by side they would share the bus and all arrive late; so the first is computed, and its
    result on the way down, while the second travels. Safe to use from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None

    @contextmanager
    def taken(self, stream: Any, event: Any, size: int) -> Iterator[None]:
        """What is copied inside, ``size`` bytes, waits for its turn; ``event`` is the stream's."""
        if size < SHARED_COPY_BYTES:
            yield  # sooner there than its turn would come
            return
        with self._lock:
            if self._last is not None:
                stream.wait_event(self._last)
            yield
            event.record(stream)
            self._last = event


class Lane:
    """A stream with its staging buffers: what one request at a time computes on.

    ``copiers`` are at least `COPIERS` threads, which several lanes may share. What lies in
    ``pinned`` memory is copied from and to where it is, the rest by way of staging buffers. Lanes
    share ``turns``.
    """

    def __init__(
        self, copiers: Executor, pinned: Pinned | None = None, turns: Turns | None = None
    ) -> None:
        self._direct, self._turns = pinned, turns or Turns()
        self._cuda: Any = import_cupy().cuda
        self._copiers = copiers
        self.stream: Any = self._cuda.Stream(non_blocking=True)
        self._uploaded: Any = self._cuda.Event(disable_timing=True)
        self._pinned: list[Any] = []
        self._events: list[Any] = []

    def upload(self, tensors: Iterable[tuple[int, NDArray[Any]]], base: int) -> None:
        """Tensors to their offsets from ``base``, in rising order; returns before the copy ends."""
        given = list(tensors)
        size = sum(array.nbytes for _, array in given)
        with self._turns.taken(self.stream, self._uploaded, size):
            rest = self._copy_directly(given, base, to_host=False)
        if not rest:
            return
        places = [(offset, _flat(array)) for offset, array in given]
        first = places[0][0]
        size = max(offset + data.nbytes for offset, data in places) - first
        for turn, start, stop in _windows(size):
            staging = self._staging(turn, stop - start)
            for begin, end, data in _within(places, first + start, first + stop):
                self._put(staging[begin:end], data)
            self._copy(base + first + start, staging.ctypes.data, stop - start, to_host=False)
            self._events[turn].record(self.stream)

    def download_soon(
        self, tensors: Iterable[tuple[int, NDArray[Any]]], base: int
    ) -> list[tuple[int, NDArray[Any]]]:
        """Begin to copy what can be copied straight to its place; the others, for `download`."""
        return self._copy_directly(list(tensors), base, to_host=True)

    def download(self, tensors: Iterable[tuple[int, NDArray[Any]]], base: int) -> None:
        """From their offsets from ``base``, in rising order, into contiguous tensors; waits."""
        places = [(offset, _flat(array)) for offset, array in tensors]
        first = places[0][0]
        size = max(offset + data.nbytes for offset, data in places) - first
        waiting: tuple[int, int, int] | None = None
        for window in _windows(size):
            turn, start, stop = window
            staging = self._staging(turn, stop - start)
            self._copy(staging.ctypes.data, base + first + start, stop - start, to_host=True)
            self._events[turn].record(self.stream)
            if waiting is not None:
                self._unpack(places, first, *waiting)
            waiting = window
        if waiting is not None:
            self._unpack(places, first, *waiting)

    def _copy_directly(
        self, tensors: list[tuple[int, NDArray[Any]]], base: int, *, to_host: bool
    ) -> list[tuple[int, NDArray[Any]]]:
        """Begin copies that need no staging; what does need it (on the way up, all or nothing)."""
        if self._direct is None:
            return tensors
        found = [(item, self._direct.stretches(item[1])) for item in tensors]
        others = [item for item, stretches in found if stretches is None]
        if others and not to_host:
            return tensors  # staging fills the gaps between tensors too
        for (offset, _), stretches in found:
            device = base + offset
            for address, size in stretches or ():
                target, source = (address, device) if to_host else (device, address)
                self._copy(target, source, size, to_host=to_host)
                device += size
        return others

    def _unpack(
        self, places: list[tuple[int, Bytes]], first: int, turn: int, start: int, stop: int
    ) -> None:
        staging = self._staging(turn, stop - start)
        for begin, end, data in _within(places, first + start, first + stop):
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

    def _staging(self, turn: int, size: int) -> Bytes:
        """The start of a pinned buffer, once what it last carried has arrived."""
        if not self._pinned:
            self._pinned = [self._cuda.alloc_pinned_memory(STAGING_BYTES) for _ in range(2)]
            self._events = [self._cuda.Event(disable_timing=True) for _ in range(2)]
        self._events[turn].synchronize()
        return np.frombuffer(self._pinned[turn], np.uint8, size)

    def _copy(self, target: int, source: int, size: int, *, to_host: bool) -> None:
        runtime = self._cuda.runtime
        kind = runtime.memcpyDeviceToHost if to_host else runtime.memcpyHostToDevice
        runtime.memcpyAsync(target, source, size, kind, self.stream.ptr)


def _flat(array: NDArray[Any]) -> Bytes:
    """Its bytes, row by row: a view where it lies so, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _windows(size: int) -> Iterator[tuple[int, int, int]]:
    """(which staging buffer, start, stop) of each stretch of ``size`` bytes."""
    for index, start in enumerate(range(0, size, STAGING_BYTES)):
        yield index % 2, start, min(start + STAGING_BYTES, size)


def _within(
    places: Iterable[tuple[int, Bytes]], start: int, stop: int
) -> Iterator[tuple[int, int, Bytes]]:
    """What of the tensors lies in [start, stop): where, counted from start, and the bytes."""
    for offset, data in places:
        low, high = max(offset, start), min(offset + data.nbytes, stop)
        if low < high:
            yield low - start, high - start, data[low - offset : high - offset]
