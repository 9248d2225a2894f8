"""A backend whose calls are timed, for `report`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from convgrad.torch._backends import Backend, Operation, Runner

__all__ = ["timed"]

# Calls of one runner whose end on the GPU is not awaited before others are made.
_MOST_PENDING = 256


@lru_cache(maxsize=64)
def timed(backend: Backend) -> Backend:
    """Return a backend that computes with the given one and times its calls.

    The same backend gets the same one each time, so that its passes are prepared once.
    """
    return _Timed(backend)


class _Timed:
    def __init__(self, backend: Backend) -> None:
        self._backend, self.name = backend, backend.name
        self.forward_devices = getattr(backend, "forward_devices", ())

    def prepare(
        self, operation: Operation, tensors: Sequence[torch.Tensor], *, channels_last: bool
    ) -> Runner:
        """See `Backend.prepare`."""
        return _TimedRunner(self._backend.prepare(operation, tensors, channels_last=channels_last))


class _TimedRunner:
    """Computes by another runner; see `Runner`. Thread-safe if that one is.

    On a GPU a call's time is that between events before and after it on PyTorch's current stream.
    Calls that are captured in a graph have none.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.faster_peer: str | None = getattr(runner, "faster_peer", None)
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds, self._calls = 0.0, 0
        self._lock = threading.Lock()

    @property
    def kernel(self) -> str:
        return self._runner.kernel

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not tensors[0].is_cuda:
            started = time.perf_counter()
            results = self._runner(tensors)
            with self._lock:
                self._add(time.perf_counter() - started)
            return results
        if torch.cuda.is_current_stream_capturing():
            return self._runner(tensors)
        with torch.cuda.device(tensors[0].device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            results = self._runner(tensors)
            end.record()
        with self._lock:
            self._pending.append((begin, end))
            self._collect(_MOST_PENDING)
        return results

    def _add(self, seconds: float) -> None:
        self._seconds += seconds
        self._calls += 1

    def _collect(self, left: int) -> None:
        """Wait for all but the last few calls that are pending."""
        while len(self._pending) > left:
            begin, end = self._pending.popleft()
            end.synchronize()
            self._add(begin.elapsed_time(end) / 1e3)

    def take_seconds(self, reset: bool) -> tuple[float, int]:
        """Return the sum of the calls' times, and how many were timed, since the last reset."""
        with self._lock:
            self._collect(0)
            found = self._seconds, self._calls
            if reset:
                self._seconds, self._calls = 0.0, 0
        return found
