"""A thread pool for kernels: the caller's thread and a few helper threads.

Threads claim a kernel's tasks through atomic counters in `Control`, without the GIL. A helper that
arrives late or never costs time but not correctness, and concurrent requests share the helpers.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any

from numpy.typing import NDArray

from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.base import Cancellation
from convgrad_service.backends.cpu.arguments import ALIGNMENT, Buffer, Control
from convgrad_service.backends.cpu.library import Kernel, team_function
from convgrad_service.problems.base import Piece, TensorSpec
from convgrad_service.process import lower_priority

__all__ = ["Rehearsal", "Workers", "Workspaces", "WrongIndices"]

CANCEL_POLL_S = 0.01
# `Team` in kernels/team.cpp: six words, then six for each slot.
TEAM_SLOTS = 16
TEAM_WORDS = 6 + 6 * TEAM_SLOTS
_size = itemgetter(2)


class WrongIndices(Exception):
    """A kernel has found fewer valid indices than it was given."""


class Workspaces:
    """A cache of workspace buffers, since fresh memory costs a page fault per 4 KiB.

    At most ``keep_bytes`` stay allocated while unused.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free: list[Buffer] = []  # by size
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Buffer:
        """Return a buffer of at least this many bytes."""
        with self._lock:
            index = bisect_left(self._free, size_bytes, key=_size)
            if index < len(self._free):
                buffer = self._free.pop(index)
                self._free_bytes -= buffer.size_bytes
                return buffer
        return Buffer.of(max(size_bytes, 1))

    @contextmanager
    def array(self, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        """Lend an uninitialised array in a buffer."""
        buffer = self.take(spec.size_bytes)
        try:
            memory = buffer.memory[: spec.size_bytes]
            yield memory.view(spec.dtype.numpy).reshape(spec.shape)
        finally:
            self.give(buffer)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the cache."""
        with self._lock:
            insort(self._free, buffer, key=_size)
            self._free_bytes += buffer.size_bytes
            while self._free_bytes > self._keep_bytes:
                # Evict the largest, to keep many small ones.
                self._free_bytes -= self._free.pop().size_bytes


class Workers:
    """The thread pool of one backend; ``threads`` includes the caller's thread.

    Helper threads wait in native code (``kernels/team.cpp``) and exit on `close`, or when this
    object is collected.
    """

    def __init__(self, threads: int, keep_bytes: int) -> None:
        self.threads = threads
        self.workspaces = Workspaces(keep_bytes)
        self._team = (ctypes.c_uint64 * TEAM_WORDS)()
        self._free_slots = list(range(TEAM_SLOTS))
        self._run = team_function("run", 7)
        self._wake = team_function("wake", 2)
        work, team = team_function("work", 1), self._team
        self._helpers = [
            # The thread's reference keeps the team alive after this object. Daemon, since it waits
            # in native code and does not return to the interpreter by itself.
            threading.Thread(target=_help, args=(work, team), name="convgrad-cpu", daemon=True)
            for _ in range(threads - 1)
        ]
        for helper in self._helpers:
            helper.start()
        self._stop = weakref.finalize(self, team_function("stop", 1), ctypes.addressof(team))

    def wake(self, helpers: int) -> None:
        """Wake at most ``helpers`` threads, for a launch that follows within 100 microseconds."""
        if (helpers := min(helpers, self.threads - 1)) > 0:
            self._wake(ctypes.addressof(self._team), helpers)

    def launch(
        self,
        kernel: Kernel,
        args: ctypes.Structure,
        *,
        scratch_bytes: int = 0,
        tasks: int | None = None,
        indices: int = 0,
        cancelled: threading.Event | None = None,
    ) -> Control:
        """Run a kernel on all threads and return its counters.

        Parameters
        ----------
        kernel, args
            The entry point and its argument structure.
        scratch_bytes : int
            Private scratch memory of each thread.
        tasks : int, optional
            The number of tasks, if known. No more threads than that are woken.
        indices : int
            The number of indices, of which the kernel counts the valid ones in ``done[1]``.
        cancelled : threading.Event, optional
            Cancels the launch when set. Another thread polls it.

        Raises
        ------
        DeadlineExceeded
            ``cancelled`` was set. The outputs are incomplete.
        WrongIndices
            Not all ``indices`` are valid.
        """
        threads = self.threads if tasks is None else max(1, min(self.threads, tasks))
        try:
            slot = self._free_slots.pop()
        except IndexError:
            slot, threads = None, 1  # all slots in use: enough launches to occupy the CPU
        control = Control.of(threads)
        of_each = -(-scratch_bytes // ALIGNMENT) * ALIGNMENT
        scratch = self.workspaces.take(of_each * threads)
        addresses = ctypes.addressof(args), ctypes.addressof(control)
        try:
            with _UNWATCHED if cancelled is None else _watching(cancelled, control):
                if slot is None or threads == 1:
                    kernel(*addresses, scratch.address)
                else:
                    team, first = ctypes.addressof(self._team), scratch.address
                    starts = (ctypes.c_void_p * threads)(
                        *[first + of_each * thread for thread in range(threads)]
                    )
                    self._run(team, slot, kernel, *addresses, starts, threads - 1)
        finally:
            if slot is not None:
                self._free_slots.append(slot)
            self.workspaces.give(scratch)
        if control.cancelled:
            raise DeadlineExceeded("the request was cancelled before its answer was ready")
        if indices and control.done[1] != indices:
            raise WrongIndices
        return control

    def to_run(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """See `Machine.to_run`."""
        return pieces

    def close(self) -> None:
        """Stop the helper threads. Launches in flight finish on their callers' threads."""
        self._stop()
        for helper in self._helpers:
            helper.join()


class Rehearsal(Workers):
    """A thread pool for dry runs, which launches nothing."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.workspaces = Workspaces(0)

    def launch(
        self,
        kernel: Kernel,
        args: ctypes.Structure,
        *,
        scratch_bytes: int = 0,
        tasks: int | None = None,
        indices: int = 0,
        cancelled: threading.Event | None = None,
    ) -> Control:
        return Control.of(1)

    def to_run(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return pieces[:1]

    def close(self) -> None:
        pass


def _help(work: Callable[..., None], team: ctypes.Array[ctypes.c_uint64]) -> None:
    lower_priority()
    work(ctypes.addressof(team))


_UNWATCHED = nullcontext()


@contextmanager
def _watching(cancelled: threading.Event, control: Control) -> Iterator[None]:
    """Poll ``cancelled`` every `CANCEL_POLL_S` and forward it to the kernel; report progress."""
    ended = threading.Event()

    def watch() -> None:
        seen = bytes(control)
        while not ended.wait(CANCEL_POLL_S):
            if isinstance(cancelled, Cancellation) and (counts := bytes(control)) != seen:
                seen = counts
                cancelled.advanced()
            if cancelled.is_set():
                control.cancelled = 1
                return

    watcher = threading.Thread(target=watch, name="convgrad-cpu-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
