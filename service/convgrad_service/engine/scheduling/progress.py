"""How much of an answer is final while the rest of it is being computed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.scheduling.finished import Finished
from convgrad_service.engine.scheduling.partition import joined, pieces_of, shares_of
from convgrad_service.problems import Piece, Problem
from convgrad_service.problems.base import TensorSpec

__all__ = ["Progress"]

T = TypeVar("T")


class Progress:
    """Of each output of a problem in parts, how many bytes from its start are final.

    Parts may be finished in any order, and a part of the answer may lie in many places: what is
    sent in order waits for whatever comes before it. For the loop's thread.
    """

    def __init__(self, problem: Problem, parts: int, deadline: Deadline) -> None:
        pieces = pieces_of(problem, parts)
        sums = shares_of(problem, parts)
        self._deadline = deadline
        self._sizes = {name: spec.size_bytes for name, spec in problem.outputs.items()}
        self._starts = {
            name: _starts(pieces, name, spec, bool(sums)) for name, spec in problem.outputs.items()
        }
        self._pieces = len(pieces)
        self._missing = set(range(len(pieces) + bool(sums)))
        self._finished: list[Finished] = []
        self._changed = asyncio.Event()
        self._ending: asyncio.Future[Any]

    def told(self, part: int, finished: Finished) -> None:
        """A part is finished; see `parts.OnPartDone`."""
        self._missing.discard(part)
        self._finished.append(finished)
        self._changed.set()

    @property
    def so_far(self) -> Finished:
        """What is finished, as one, with as many pieces as there are going to be."""
        left = sum(part < self._pieces for part in self._missing)
        found = joined(self._finished)
        return found._replace(pieces=found.pieces + left)

    def final_bytes(self, name: str) -> int:
        """How many bytes from the start of an output will not change any more."""
        starts = self._starts[name]
        return min((starts[part] for part in self._missing), default=self._sizes[name])

    async def first(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Begin ``work``, which computes the parts and ends with them; return when one is done.

        Raises what ``work`` does until then.
        """
        ending = self._ending = asyncio.ensure_future(work)
        ending.add_done_callback(self._ended)
        try:
            while not self._finished and not ending.done():
                await self._change()
        except asyncio.CancelledError:
            ending.cancel()
            raise
        if ending.done():
            ending.result()
        return ending

    async def until(self, name: str, size_bytes: int) -> int:
        """How many bytes of an output are final, once so many are.

        Raises DeadlineExceeded, and what the work raises.
        """
        while (final := self.final_bytes(name)) < size_bytes:
            if self._ending.done():
                self._ending.result()
            async with self._deadline.enforced():
                await self._change()
        return final

    async def end(self) -> None:
        """Return when all is computed and counted. Raises as `until`."""
        async with self._deadline.enforced():
            await asyncio.shield(self._ending)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _ended(self, ending: asyncio.Future[Any]) -> None:
        if not ending.cancelled():
            ending.exception()  # whoever waits raises it
        self._changed.set()


def _starts(pieces: Sequence[Piece], name: str, spec: TensorSpec, sums: bool) -> list[int]:
    """For each piece, and last for what adds up their shares, from where on it writes an output."""
    is_sum = any(piece.combine.get(name) == "sum" for piece in pieces)
    starts = [
        _start_bytes(piece, name, spec) if name in piece.outputs and not is_sum else spec.size_bytes
        for piece in pieces
    ]
    return [*starts, 0 if is_sum else spec.size_bytes] if sums else starts


def _start_bytes(piece: Piece, name: str, spec: TensorSpec) -> int:
    """Where the first element of a piece lies in the whole, row by row."""
    corner = tuple(
        cut.indices(size)[0] for cut, size in zip(piece.outputs[name], spec.shape, strict=True)
    )
    return int(np.ravel_multi_index(corner, spec.shape)) * spec.dtype.itemsize
