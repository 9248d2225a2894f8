"""Timing on the host by its clock: runs, flushed caches, and the machine's peak rates."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from convgrad.contract.timing import Clocks

__all__ = ["HostStopwatch", "measured_rates", "processor_name"]

# More than the last-level caches of most machines.
_FLUSH_BYTES = 64 * 2**20
# A product of this size takes milliseconds, so that some of the repeats are not interrupted.
_COPY_BYTES, _MATRIX = 64 * 2**20, 512
_REPEATS = 20


class HostStopwatch:
    """See `Stopwatch`."""

    predicted_s = None

    def __init__(self, tensors: Mapping[str, Any], run: Callable[[], Any]) -> None:
        self.tensors, self._run = tensors, run
        self._dirty = np.zeros(_FLUSH_BYTES // 8)
        self._clean = np.zeros(_FLUSH_BYTES // 8)

    def cold(self) -> float:
        """See `Stopwatch.cold`: what is read last must not be written back."""
        self._dirty += 1.0
        self._clean.sum()
        return self.warm()

    def warm(self) -> float:
        """See `Stopwatch.warm`."""
        return self.run_of(1)

    def run_of(self, count: int) -> float:
        """See `Stopwatch.run_of`."""
        began_s = time.perf_counter()
        for _ in range(count):
            self._run()
        return time.perf_counter() - began_s

    def like(self, run: Callable[[], Any]) -> HostStopwatch:
        """See `Stopwatch.like`. The memory that flushes caches is shared."""
        other = copy(self)
        other._run = run
        return other

    def others(self) -> Iterator[Any]:
        """See `Stopwatch.others`: there is one engine for each problem."""
        return iter(())

    def clocks(self) -> Clocks | None:
        """Return the mean of all cores' clocks, if the system reports them."""
        try:
            text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        lines = (line for line in text.splitlines() if line.startswith("cpu MHz"))
        found = [float(line.partition(":")[2]) for line in lines]
        return Clocks(sm_hz=1e6 * sum(found) / len(found)) if found else None


@lru_cache(maxsize=1)
def processor_name() -> str:
    """Return the system's name of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measured_rates(dtype: str) -> tuple[float, float, float, str]:
    """Return FLOP/s of a matrix product, bytes/s of a copy, 0 for a launch, and the method.

    16-bit types are computed in float32.
    """
    kind = np.float64 if dtype == "float64" else np.float32
    a = np.ones((_MATRIX, _MATRIX), kind)
    product_s = _least_s(lambda: a @ a)
    source = np.ones(_COPY_BYTES // 8)
    target = np.empty_like(source)
    copy_s = _least_s(lambda: np.copyto(target, source))
    method = f"measured: NumPy's {np.dtype(kind).name} matrix product, and a copy of 64 MiB"
    return 2.0 * _MATRIX**3 / product_s, 2.0 * _COPY_BYTES / copy_s, 0.0, method


def _least_s(run: Callable[[], Any]) -> float:
    run()
    least = float("inf")
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - began_s)
    return least
