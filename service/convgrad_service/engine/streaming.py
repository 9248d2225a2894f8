"""Results that are sent while the rest of the problem is computed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from convgrad_service.engine.admission import CancelScope, Deadline
from convgrad_service.engine.memory.tensor_layout import partial_sums_of, pieces_of
from convgrad_service.engine.scheduling.job import JobResult, merge_results
from convgrad_service.problems import Piece, Problem
from convgrad_service.problems.base import TensorSpec

T = TypeVar("T")


class Progress:
    """How many bytes from the start of each output are final.

    Parts may finish in any order and may write several ranges of an output; bytes are final once
    every part that writes before them is done. For the event loop's thread.
    """

    def __init__(self, problem: Problem, parts: int, deadline: Deadline) -> None:
        pieces = pieces_of(problem, parts)
        has_sums = bool(partial_sums_of(problem, parts))
        self._deadline = deadline
        self._sizes = {name: spec.size_bytes for name, spec in problem.outputs.items()}
        self._starts = {
            name: _starts(pieces, name, spec, has_sums) for name, spec in problem.outputs.items()
        }
        self._pieces = len(pieces)
        self._pending = set(range(len(pieces) + has_sums))
        self._results: list[JobResult] = []
        self._changed = asyncio.Event()
        self._work: asyncio.Future[Any]

    def part_done(self, part: int, result: JobResult) -> None:
        """Record a finished part; an `OnPartDone`."""
        self._pending.discard(part)
        self._results.append(result)
        self._changed.set()

    @property
    def so_far(self) -> JobResult:
        """The merged result of the finished parts, with the final number of pieces."""
        pending = sum(part < self._pieces for part in self._pending)
        merged = merge_results(self._results)
        return merged._replace(pieces=merged.pieces + pending)

    def final_bytes(self, name: str) -> int:
        """Return how many bytes from the start of an output are final."""
        starts = self._starts[name]
        return min((starts[part] for part in self._pending), default=self._sizes[name])

    async def first(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start ``work``, which computes all parts, and return it once the first part is done.

        Raises what ``work`` raises before that.
        """
        self._work = running = asyncio.ensure_future(work)
        running.add_done_callback(self._work_done)
        try:
            while not self._results and not running.done():
                await self._change()
        except asyncio.CancelledError:
            running.cancel()
            raise
        if running.done():
            running.result()
        return running

    async def until(self, name: str, size_bytes: int) -> int:
        """Wait until ``size_bytes`` of an output are final; return how many are.

        Raises DeadlineExceeded, and what the work raises.
        """
        while (final := self.final_bytes(name)) < size_bytes:
            if self._work.done():
                self._work.result()
            with CancelScope(self._deadline):
                await self._change()
        return final

    async def end(self) -> None:
        """Wait until the work is done. Raises as `until`."""
        with CancelScope(self._deadline):
            await asyncio.shield(self._work)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _work_done(self, work: asyncio.Future[Any]) -> None:
        if not work.cancelled():
            work.exception()  # mark it as retrieved: `until` and `end` raise it
        self._changed.set()


def _starts(pieces: Sequence[Piece], name: str, spec: TensorSpec, has_sums: bool) -> list[int]:
    """Return the first byte of an output that each part writes; the last adds up partial sums."""
    is_sum = any(piece.combine.get(name) == "sum" for piece in pieces)
    starts = [
        _start_bytes(piece, name, spec) if name in piece.outputs and not is_sum else spec.size_bytes
        for piece in pieces
    ]
    return [*starts, 0 if is_sum else spec.size_bytes] if has_sums else starts


def _start_bytes(piece: Piece, name: str, spec: TensorSpec) -> int:
    """Return the offset of a piece's first element in the whole output."""
    corner = tuple(
        cut.indices(size)[0] for cut, size in zip(piece.outputs[name], spec.shape, strict=True)
    )
    return int(np.ravel_multi_index(corner, spec.shape)) * spec.dtype.itemsize
