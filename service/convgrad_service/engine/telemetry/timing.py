"""Where one request's time went, stage by stage, in seconds."""

from __future__ import annotations

import time

__all__ = ["STAGES", "Timings"]

STAGES = ("receive", "decode", "queue", "upload", "compute", "download", "encode")


class Timings:
    """Seconds spent in each stage of `STAGES` so far.

    ``flops`` and ``compulsory_bytes`` are the problem's, once it has been computed. ``intervals``
    are the stages one by one, with when each began and how long it took; None where nobody asks.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.stages_s: dict[str, float] = {}
        self.intervals: list[tuple[str, float, float]] | None = None
        self.flops = self.compulsory_bytes = 0

    def add(self, stage: str, seconds: float, began_s: float | None = None) -> None:
        """Count ``seconds`` towards ``stage``, which began then; without, it ends now."""
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds
        if self.intervals is not None:
            if began_s is None:
                began_s = time.monotonic() - seconds
            self.intervals.append((stage, began_s, seconds))

    def stage(self, stage: str) -> Stage:
        """Count what runs inside towards ``stage``, whether or not it succeeds."""
        return Stage(self, stage)

    @property
    def total_s(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self.started_s


class Stage:
    """See `Timings.stage`. A class: a generator would take as long as a small request's stage."""

    __slots__ = ("_began_s", "_name", "_timings")

    def __init__(self, timings: Timings, name: str) -> None:
        self._timings, self._name = timings, name

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._timings.add(self._name, time.monotonic() - self._began_s, self._began_s)
