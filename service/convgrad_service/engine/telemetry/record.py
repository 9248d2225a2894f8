"""What is measured of one request: its stages while it runs, one record once it has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["STAGES", "Record", "Timings"]

STAGES = ("receive", "decode", "queue", "upload", "compute", "download", "encode")


class Record(NamedTuple):
    """One finished request; ``code`` is "ok" or the code of its error.

    ``flops`` and ``compulsory_bytes`` are 0 if nothing was computed. ``key`` is the name of the
    request's API key, "" without one.
    """

    operation: str
    transport: str
    code: str
    total_s: float
    stages_s: Mapping[str, float]
    received_bytes: int
    sent_bytes: int
    flops: int = 0
    compulsory_bytes: int = 0
    key: str = ""


class Timings:
    """Seconds spent in each of `STAGES` so far.

    ``flops`` and ``compulsory_bytes`` are set once the problem has been computed. ``intervals``
    lists (stage, start, seconds) for tracing, and is None if the request is not traced.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.stages_s: dict[str, float] = {}
        self.intervals: list[tuple[str, float, float]] | None = None
        self.flops = self.compulsory_bytes = 0

    def add(self, stage: str, seconds: float, began_s: float | None = None) -> None:
        """Add ``seconds`` to ``stage``; by default the interval ends now."""
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds
        if self.intervals is not None:
            if began_s is None:
                began_s = time.monotonic() - seconds
            self.intervals.append((stage, began_s, seconds))

    def stage(self, stage: str) -> _Stage:
        """Return a context manager that adds the time of its block to ``stage``."""
        return _Stage(self, stage)

    @property
    def total_s(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self.started_s


class _Stage:
    """A class because a generator would take as long as a small request's whole stage."""

    __slots__ = ("_began_s", "_name", "_timings")

    def __init__(self, timings: Timings, name: str) -> None:
        self._timings, self._name = timings, name

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._timings.add(self._name, time.monotonic() - self._began_s, self._began_s)
