"""Where one request's time went, stage by stage, in seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STAGES", "Timings"]

STAGES = ("receive", "decode", "queue", "upload", "compute", "download", "encode")


class Timings:
    """Seconds spent in each stage of `STAGES` so far.

    ``accepted`` is set once the request was found to be a problem that this server takes; ``flops``
    and ``compulsory_bytes`` are the problem's, once it has been computed.
    """

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.stages_s: dict[str, float] = {}
        self.accepted = False
        self.flops = self.compulsory_bytes = 0

    def add(self, stage: str, seconds: float) -> None:
        """Count ``seconds`` towards ``stage``."""
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + seconds

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Count what runs inside towards ``stage``, whether or not it succeeds."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.add(stage, time.monotonic() - started_s)

    @property
    def total_s(self) -> float:
        """Seconds since the request began."""
        return time.monotonic() - self.started_s
