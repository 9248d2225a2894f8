"""A large problem in parts: computed one by one or side by side, and sent as they are finished.

How a problem is cut follows from its sizes alone. Where its parts then run, on one device or on
several, and in what order, changes no bit of the answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Generic, Protocol, TypeVar

from convgrad_service.engine.finished import Finished
from convgrad_service.problems import Piece, Problem

__all__ = ["PART_BYTES", "Parted", "Told", "joined", "parts_of", "pieces_of"]

PART_BYTES = 64 * 2**20
"""Inputs and outputs of a part, about: what a GPU computes and moves at its full rate, and short
enough that the first of several is on its way to the client while the others are computed."""
_MOST_PARTS = 64

Told = Callable[[int, Finished], None]
"""Called with the number of a part that is finished, and how it was computed."""


def parts_of(problem: Problem) -> int:
    """In how many parts a problem is computed: 1 for what is small, or is a sum over its parts."""
    parts = min(problem.memory_bytes // PART_BYTES, _MOST_PARTS)
    if parts < 2:
        return 1
    pieces = pieces_of(problem, parts)
    sums = any("sum" in piece.combine.values() for piece in pieces)
    return 1 if sums or len(pieces) == 1 else parts


@lru_cache(maxsize=64)
def pieces_of(problem: Problem, parts: int) -> tuple[Piece, ...]:
    """`Problem.split`, remembered; there may be a few pieces more than ``parts``."""
    return problem.split(parts)


class _Task(Protocol):
    """What a `Parted` knows of its tasks; see `schedule.Task`."""

    done: asyncio.Future[Finished]
    started_s: float | None

    @property
    def waited_s(self) -> float | None: ...


T = TypeVar("T", bound=_Task)


class Parted(Generic[T]):
    """A job whose parts are tasks of their own: like a task to whoever waits for all of it.

    ``cancel`` is called with what still waits or runs once one of them has failed.
    """

    def __init__(
        self,
        tasks: Sequence[T],
        told: Told | None,
        cancel: Callable[[T], None],
    ) -> None:
        self.tasks = tasks
        self.done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._told, self._cancel = told, cancel
        self._finished: dict[int, Finished] = {}
        self._left = len(tasks)
        self._error: BaseException | None = None
        for number, task in enumerate(tasks):
            task.done.add_done_callback(partial(self._ended, number))

    @property
    def waited_s(self) -> float | None:
        """How long its first part waited to start; None while it does."""
        waits = [task.waited_s for task in self.tasks if task.waited_s is not None]
        return min(waits, default=None)

    def _ended(self, number: int, done: asyncio.Future[Finished]) -> None:
        self._left -= 1
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            self._finished[number] = done.result()
            if self._told is not None and self._error is None:
                self._told(number, done.result())
        elif self._error is None:
            self._error = error
            for task in self.tasks:
                if not task.done.done():
                    self._cancel(task)
        if self._left == 0 and not self.done.done():
            self._end()

    def _end(self) -> None:
        if self._error is None:
            started_s = min(task.started_s or math.inf for task in self.tasks)
            parts = [self._finished[number] for number in sorted(self._finished)]
            self.done.set_result(joined(parts, time.monotonic() - started_s))
        elif isinstance(self._error, asyncio.CancelledError):
            self.done.cancel()
        else:
            self.done.set_exception(self._error)
            self.done.exception()  # whoever asked may have left


def joined(parts: Sequence[Finished], spent_s: float = math.inf) -> Finished:
    """Parts as one: the seconds of what ran side by side are its share of ``spent_s``."""
    total_s = sum(part.compute_s + part.upload_s + part.download_s for part in parts)
    share = min(1.0, spent_s / total_s) if total_s > 0 else 1.0
    return Finished(
        parts[0].kernel,
        share * sum(part.compute_s for part in parts),
        sum(part.pieces for part in parts),
        max(part.workspace_bytes for part in parts),
        share * sum(part.upload_s for part in parts),
        share * sum(part.download_s for part in parts),
    )
