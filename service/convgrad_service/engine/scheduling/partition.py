"""Splitting of large problems into parts that run on one or several devices.

The split depends on the problem's sizes alone, so the number of devices and the order of execution
change no bit of the answer. Outputs that are sums over the parts (a weight's gradient) are added up
at the end from partial sums, in float32 or wider and in the order of the parts. Only being split at
all can change their last bits, and every request of the same sizes is split alike. The start of a
response is sent while the rest is computed, see `Progress`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from convgrad_service.engine.deadline import CancelScope, Deadline
from convgrad_service.problems import Piece, Problem
from convgrad_service.problems.base import TensorSpec

__all__ = [
    "PART_BYTES",
    "JobResult",
    "OnPartDone",
    "PartialSums",
    "Partition",
    "Progress",
    "count_parts",
    "merge_results",
    "partial_sums_of",
    "partition_of",
    "pieces_of",
]

_log = logging.getLogger("convgrad.parts")

PART_BYTES = 64 * 2**20
"""Approximate size of a part's inputs and outputs: enough for a GPU's full throughput, small enough
that the first part is on its way to the client while the others are computed."""
_MAX_PARTS = 64

# Parts of a sum are larger by this factor. They cannot be streamed early, so a split only pays off
# by using several devices, for which half or more of the time goes to uploading the inputs.
_SUM_PART_FACTOR = 2
# All partial sums together may take this fraction of the inputs. A second device saves half of an
# upload at 55 GB/s, 9 ms per GB. A GB of partial sums takes 18 ms to download and 68 ms to add up
# (four of them, one core: tests/perf/results/sums.jsonl), so a 32nd of the inputs costs 2.7 ms per
# GB of inputs.
_INPUTS_PER_PARTIAL_SUMS = 32
T = TypeVar("T")


class JobResult(NamedTuple):
    """How a job, or one part of it, was computed; see `Outcome`. The outputs are in its memory.

    ``words`` is the answer, as JSON, of problems that compute no tensor.
    """

    kernel: str
    compute_s: float
    pieces: int
    workspace_bytes: int
    upload_s: float
    download_s: float
    words: str = ""


OnPartDone = Callable[[int, JobResult], None]
"""Called with the number of a part that is done, and its result."""


class Partition(NamedTuple):
    """The number of parts of a problem; if that is one, the ``reason``."""

    parts: int
    reason: str | None = None


def count_parts(problem: Problem) -> int:
    """Return the number of parts, and log why a large problem is not split."""
    parts, reason = partition_of(problem)
    if reason is not None and problem.memory_bytes >= 2 * PART_BYTES:
        _log.debug("%s is not split: %s", problem.operation, reason)
    return parts


def partition_of(problem: Problem) -> Partition:
    """Decide how a problem is split."""
    size_bytes = problem.memory_bytes
    parts = min(size_bytes // PART_BYTES, _MAX_PARTS)
    if parts < 2:
        return Partition(1, f"{size_bytes:,} bytes of tensors are less than 2 x {PART_BYTES:,}")
    pieces = pieces_of(problem, parts)
    if len(pieces) == 1:
        return Partition(1, "it has no dimension to split")
    sums = {
        name: spec.size_bytes
        for piece in pieces
        for name, spec in piece.problem.outputs.items()
        if piece.combine[name] == "sum"
    }
    return _partition_of_sum(problem, sum(sums.values())) if sums else Partition(parts)


def _partition_of_sum(problem: Problem, sum_bytes: int) -> Partition:
    if getattr(problem, "split_k", None) is not None:
        return Partition(1, "split_k sets the number of partial sums")
    part_bytes = _SUM_PART_FACTOR * PART_BYTES
    size_bytes = problem.memory_bytes
    input_bytes = sum(spec.size_bytes for spec in problem.inputs.values())
    parts = min(size_bytes // part_bytes, _MAX_PARTS)
    if parts < 2:
        return Partition(1, f"{size_bytes:,} bytes of tensors are less than 2 x {part_bytes:,}")
    affordable = input_bytes // (_INPUTS_PER_PARTIAL_SUMS * sum_bytes)
    if affordable < 2:
        return Partition(
            1,
            f"adding up two partial sums of {sum_bytes:,} bytes would take longer than splitting "
            f"{input_bytes:,} bytes of inputs saves",
        )
    return Partition(min(parts, affordable))


@lru_cache(maxsize=64)
def pieces_of(problem: Problem, parts: int) -> tuple[Piece, ...]:
    """Return `Problem.split`, cached; there may be a few more pieces than ``parts``."""
    return problem.split(parts)


class PartialSums(NamedTuple):
    """The buffer for an output that is a sum over pieces.

    ``spec`` is the output's, with a leading dimension for the partial sums; ``positions`` maps the
    number of a piece to its position in that dimension.
    """

    spec: TensorSpec
    positions: Mapping[int, int]


@lru_cache(maxsize=64)
def partial_sums_of(problem: Problem, parts: int) -> Mapping[str, PartialSums]:
    """Return the outputs that are sums over a problem's pieces."""
    pieces = pieces_of(problem, parts)
    found: dict[str, PartialSums] = {}
    for name in problem.outputs:
        numbers = [n for n, piece in enumerate(pieces) if piece.combine.get(name) == "sum"]
        if numbers:
            spec = pieces[numbers[0]].problem.outputs[name]
            found[name] = PartialSums(
                TensorSpec((len(numbers), *spec.shape), spec.dtype),
                {number: position for position, number in enumerate(numbers)},
            )
    return found


def merge_results(results: Sequence[JobResult], elapsed_s: float = math.inf) -> JobResult:
    """Merge results of parts; if those ran in parallel, scale their times to ``elapsed_s``."""
    total_s = sum(part.compute_s + part.upload_s + part.download_s for part in results)
    scale = min(1.0, elapsed_s / total_s) if total_s > 0 else 1.0
    return JobResult(
        results[0].kernel,
        scale * sum(part.compute_s for part in results),
        sum(part.pieces for part in results),
        max(part.workspace_bytes for part in results),
        scale * sum(part.upload_s for part in results),
        scale * sum(part.download_s for part in results),
    )


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
