"""Whether another process still answers: it is asked again and again, and may miss a few beats."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MOST_MISSED", "Heartbeat", "Ping", "Pong"]

MOST_MISSED = 8
"""Beats in a row that a process may leave unanswered. They are counted, not timed: if this process
is the one that was stopped, the answers that wait for it are read before the next beat."""


class Ping(NamedTuple):
    """To be answered at once, with a `Pong`."""


class Pong(NamedTuple):
    """The process is alive; of each task that it computes, by number, how far it has come."""

    progress: tuple[tuple[int, int], ...] = ()


class Heartbeat:
    """Of one process: how many times it was asked since it answered."""

    def __init__(self) -> None:
        self._asked = 0

    def missed(self) -> bool:
        """Count one more question; whether too many have no answer."""
        self._asked += 1
        return self._asked > MOST_MISSED

    def heard(self) -> None:
        """It has answered."""
        self._asked = 0
