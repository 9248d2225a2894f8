"""Runs one kernel on several threads: the caller's own and a few that wait for work.

The kernels share their tasks through atomic counters in `Control`, and release the GIL while they
run. So a thread that comes late, or never, costs time but not correctness, and requests that run
side by side share the same few helpers.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import DeadlineExceeded, Internal
from convgrad_service.backends.cpu.arguments import Control, aligned_empty
from convgrad_service.backends.cpu.library import Kernel

__all__ = ["Workers", "Workspaces", "available_cores"]

CANCEL_POLL_S = 0.01


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workspaces:
    """Work buffers kept between launches, since fresh memory costs a page fault per 4 KiB.

    At most ``keep_bytes`` stay allocated while unused.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._free: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> NDArray[np.uint8]:
        """A buffer of at least this many bytes, 64-byte aligned, contents undefined."""
        with self._lock:
            fitting = [index for index, one in enumerate(self._free) if one.size >= size_bytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda index: self._free[index].size))
        return aligned_empty(max(size_bytes, 1))

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Hand a buffer back."""
        with self._lock:
            self._free.append(buffer)
            self._free.sort(key=lambda one: one.size)
            while sum(one.size for one in self._free) > self._keep_bytes:
                self._free.pop()  # the largest: that makes room for the many small ones


class Workers:
    """The threads of one backend; ``threads`` includes the caller's."""

    def __init__(self, threads: int, keep_bytes: int) -> None:
        self.threads = threads
        self.workspaces = Workspaces(keep_bytes)
        self._pool = ThreadPoolExecutor(max(threads, 1), thread_name_prefix="convgrad-cpu")

    def launch(
        self,
        kernel: Kernel,
        args: ctypes.Structure,
        *,
        scratch_bytes: int = 0,
        tasks: int | None = None,
        cancelled: threading.Event | None = None,
    ) -> Control:
        """Run a kernel on all threads and return its counters.

        ``scratch_bytes`` is what each thread gets for itself; ``tasks``, where known, keeps a
        launch with fewer tasks than threads from waking the others. Where there is ``cancelled``, a
        further thread watches it.

        Raises:
            DeadlineExceeded: ``cancelled`` was set; the outputs are incomplete.
        """
        control = Control()
        threads = self.threads if tasks is None else max(1, min(self.threads, tasks))
        addresses = ctypes.addressof(args), ctypes.addressof(control)
        buffers = [self.workspaces.take(scratch_bytes) for _ in range(threads)]

        def work(index: int) -> None:
            kernel(*addresses, buffers[index].ctypes.data)

        try:
            with _watching(cancelled, control):
                helpers = [self._pool.submit(work, index) for index in range(1, threads)]
                try:
                    work(0)
                finally:
                    _settle(helpers)
        finally:
            for buffer in buffers:
                self.workspaces.give(buffer)
        if control.cancelled:
            raise DeadlineExceeded("the request was cancelled before its answer was ready")
        return control

    def close(self) -> None:
        """End the threads; launches in flight finish first."""
        self._pool.shutdown(wait=True)


@contextmanager
def _watching(cancelled: threading.Event | None, control: Control) -> Iterator[None]:
    """Tell the kernel, within `CANCEL_POLL_S`, once the event is set."""
    if cancelled is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(CANCEL_POLL_S):
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


def _settle(futures: list[Future[Any]]) -> None:
    # A helper that has not begun has nothing left to do: the others took all tasks.
    running = [future for future in futures if not future.cancel()]
    for future in running:
        error = future.exception()
        if error is not None:
            raise Internal(f"a CPU kernel's thread failed: {error!r}") from error
