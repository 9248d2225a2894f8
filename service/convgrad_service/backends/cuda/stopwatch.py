"""Timing on a GPU: replays of a plan's graph between two events, on tensors in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from convgrad.contract.timing import Clocks
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.backends.cuda.nvml import clocks_of

__all__ = ["CudaStopwatch", "Flusher"]

# Larger than any L2. Reading a clean buffer last evicts the lines that writing left dirty.
_FLUSH_BYTES = 256 * 2**20

Others = Callable[[], Iterator[tuple[str, AbstractContextManager["CudaStopwatch"]]]]


class Flusher:
    """Flushes a GPU's L2 cache."""

    def __init__(self) -> None:
        cupy = import_cupy()
        self._dirty = cupy.zeros(_FLUSH_BYTES // 4, cupy.float32)
        self._clean = cupy.zeros(_FLUSH_BYTES // 4, cupy.float32)

    def __call__(self) -> None:
        """Write, then read, on the current stream."""
        self._dirty.fill(1)
        self._clean.sum()


class CudaStopwatch:
    """See `Stopwatch`. ``run`` enqueues one run on ``stream``; ``uuid`` is the GPU's."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        run: Callable[[], Any],
        stream: Any,
        flush: Flusher,
        uuid: str,
        predicted_s: float | None,
        others: Others,
    ) -> None:
        self.tensors, self.stream, self.predicted_s = tensors, stream, predicted_s
        self._run, self._flush, self._uuid, self._others = run, flush, uuid, others
        self._cuda = import_cupy().cuda

    def cold(self) -> float:
        """See `Stopwatch.cold`."""
        return self._timed(self._flush, 1)

    def warm(self) -> float:
        """See `Stopwatch.warm`."""
        return self.run_of(1)

    def run_of(self, count: int) -> float:
        """See `Stopwatch.run_of`."""
        return self._timed(self._run, count)

    def _timed(self, before: Callable[[], Any], count: int) -> float:
        """Time runs after ``before``, which keeps the GPU busy while the host launches them."""
        with self.stream:
            before()
            begin, end = self._cuda.Event(), self._cuda.Event()
            begin.record(self.stream)
            for _ in range(count):
                self._run()
            end.record(self.stream)
            end.synchronize()
        return float(self._cuda.get_elapsed_time(begin, end)) / 1e3

    def like(self, run: Callable[[], Any]) -> CudaStopwatch:
        """See `Stopwatch.like`."""
        return CudaStopwatch(
            self.tensors, run, self.stream, self._flush, self._uuid, None, lambda: iter(())
        )

    def others(self) -> Iterator[tuple[str, AbstractContextManager[CudaStopwatch]]]:
        """See `Stopwatch.others`."""
        return self._others()

    def clocks(self) -> Clocks | None:
        """See `Stopwatch.clocks`."""
        return clocks_of(self._uuid)
