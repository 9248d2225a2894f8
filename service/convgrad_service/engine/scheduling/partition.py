"""A large problem in parts: computed one by one or side by side, and sent as they are finished.

How a problem is cut follows from its sizes alone. Where its parts then run, on one device or on
several, and in what order, changes no bit of the answer. An output that is a sum over the parts,
as a weight's gradient, is added up when all have left their shares, in float32 or wider and in the
order of the parts. So only being cut at all can change its last bits, and that is the same for
every request of these sizes, on however many devices.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from convgrad_service.engine.scheduling.finished import Finished
from convgrad_service.problems import Piece, Problem
from convgrad_service.problems.base import TensorSpec

__all__ = [
    "PART_BYTES",
    "Cut",
    "OnPartDone",
    "Shares",
    "TaskGroup",
    "cut_of",
    "joined",
    "parts_of",
    "pieces_of",
    "shares_of",
]

_log = logging.getLogger("convgrad.parts")

PART_BYTES = 64 * 2**20
"""Inputs and outputs of a part, about: what a GPU computes and moves at its full rate, and short
enough that the first of several is on its way to the client while the others are computed."""
_MOST_PARTS = 64

# Parts of a sum are so many times as large. None can be sent early: it is cut only for what several
# devices gain, half or more of the time that its inputs take over the bus.
_SUM_PART_FACTOR = 2
# All shares of a sum together may be this part of the inputs. Two devices save half of an upload at
# 55 GB/s, 9 ms for each GB. A GB of shares takes 18 ms to download and 68 ms to add up (four of
# them, on one core: tests/perf/results/sums.jsonl): with a 32nd of the inputs, 2.7 ms for each GB
# of those.
_SHARES_OF_INPUTS = 32

OnPartDone = Callable[[int, Finished], None]
"""Called with the number of a part that is finished, and how it was computed."""


class Cut(NamedTuple):
    """In how many parts a problem is computed; where that is one, why it is not more."""

    parts: int
    why_not: str | None = None


def parts_of(problem: Problem) -> int:
    """See `Cut`; of a large problem that is computed whole the log says why."""
    parts, why_not = cut_of(problem)
    if why_not is not None and problem.memory_bytes >= 2 * PART_BYTES:
        _log.debug("%s is computed whole: %s", problem.operation, why_not)
    return parts


def cut_of(problem: Problem) -> Cut:
    """How a problem is cut, by its sizes alone: the number of devices would change a sum's bits."""
    size_bytes = problem.memory_bytes
    parts = min(size_bytes // PART_BYTES, _MOST_PARTS)
    if parts < 2:
        return Cut(1, f"{size_bytes:,} bytes of tensors are no two parts of {PART_BYTES:,}")
    pieces = pieces_of(problem, parts)
    if len(pieces) == 1:
        return Cut(1, "there is nothing along which it could be cut")
    shares = {
        name: spec.size_bytes
        for piece in pieces
        for name, spec in piece.problem.outputs.items()
        if piece.combine[name] == "sum"
    }
    return _cut_of_sum(problem, sum(shares.values())) if shares else Cut(parts)


def _cut_of_sum(problem: Problem, share_bytes: int) -> Cut:
    if getattr(problem, "split_k", None) is not None:
        return Cut(1, "split_k says in how many parts it is to be added up")
    part_bytes = _SUM_PART_FACTOR * PART_BYTES
    size_bytes = problem.memory_bytes
    input_bytes = sum(spec.size_bytes for spec in problem.inputs.values())
    large = min(size_bytes // part_bytes, _MOST_PARTS)
    if large < 2:
        return Cut(1, f"{size_bytes:,} bytes of tensors are no two parts of {part_bytes:,}")
    worth = input_bytes // (_SHARES_OF_INPUTS * share_bytes)
    if worth < 2:
        return Cut(
            1,
            f"adding up two shares of {share_bytes:,} bytes would take longer than is gained on "
            f"{input_bytes:,} bytes of inputs",
        )
    return Cut(min(large, worth))


@lru_cache(maxsize=64)
def pieces_of(problem: Problem, parts: int) -> tuple[Piece, ...]:
    """`Problem.split`, remembered; there may be a few pieces more than ``parts``."""
    return problem.split(parts)


class Shares(NamedTuple):
    """The shares of an output that is a sum: one tensor for all, with one more dimension in front,
    and for each piece that has one, by its number, where there."""

    spec: TensorSpec
    places: Mapping[int, int]


@lru_cache(maxsize=64)
def shares_of(problem: Problem, parts: int) -> Mapping[str, Shares]:
    """The outputs that are sums over a problem's pieces."""
    pieces = pieces_of(problem, parts)
    found: dict[str, Shares] = {}
    for name in problem.outputs:
        having = [number for number, piece in enumerate(pieces) if piece.combine.get(name) == "sum"]
        if having:
            spec = pieces[having[0]].problem.outputs[name]
            found[name] = Shares(
                TensorSpec((len(having), *spec.shape), spec.dtype),
                {number: place for place, number in enumerate(having)},
            )
    return found


class _Task(Protocol):
    """What a `TaskGroup` knows of its tasks; see `scheduler.Task`."""

    done: asyncio.Future[Finished]
    started_s: float | None

    @property
    def waited_s(self) -> float | None: ...


T = TypeVar("T", bound=_Task)


class TaskGroup(Generic[T]):
    """A job whose parts are tasks of their own: like a task to whoever waits for all of it.

    ``cancel`` is called with what still waits or runs once one of them has failed. ``last`` begins
    a task that needs all the others' results; it is called once they are there.
    """

    def __init__(
        self,
        tasks: Sequence[T],
        told: OnPartDone | None,
        cancel: Callable[[T], None],
        last: Callable[[], T] | None = None,
    ) -> None:
        self.tasks = list(tasks)
        self.wanted = True
        self.done: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._told, self._cancel, self._last = told, cancel, last
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
        if self._left > 0 or self.done.done():
            return
        if self._last is None or self._error is not None or not self.wanted:
            self._end()
        else:
            self._begin_last(self._last)

    def _begin_last(self, last: Callable[[], T]) -> None:
        self._last = None
        self._left = 1
        task = last()
        task.done.add_done_callback(partial(self._ended, len(self.tasks)))
        self.tasks.append(task)

    def _end(self) -> None:
        if self._error is None and self._last is None:
            started_s = min(task.started_s or math.inf for task in self.tasks)
            parts = [self._finished[number] for number in sorted(self._finished)]
            self.done.set_result(joined(parts, time.monotonic() - started_s))
        elif self._error is None or isinstance(self._error, asyncio.CancelledError):
            self.done.cancel()  # nobody wants it any more
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
