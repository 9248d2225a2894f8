"""A small request like one before it: nothing of it is left to be waited for but its computing.

Nearly every request is: the same layer again, with other data. Then its head is the same bytes,
and all that follows from them is looked up: the problem, where its tensors lie, which bytes of the
message are whose, and the words around the answer's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from convgrad.contract import Report
from convgrad_service.engine.admitted import Known, ResponseTemplate, finished_job, report_of
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.request import ComputeRequest
from convgrad_service.engine.workers.execute import Finished, Job

if TYPE_CHECKING:
    from convgrad_service.engine.pipeline import Pipeline

__all__ = ["MARK_S", "PreparedRequest", "Span", "place_of", "words_around"]

MARK_S = 0.123456789
"""Stands for the seconds of an answer that is only made to be cut there."""
# Kernels that one problem may be answered by: one, unless its device has changed.
_MOST_WORDS = 4


class Span(NamedTuple):
    """The bytes of a message's data that are one input's."""

    name: str
    begin: int
    end: int


class PreparedRequest:
    """One such request, with its place in the arena: `fill` it, await `computed`, send `answer`.

    The caller releases its ``lease``.
    """

    __slots__ = ("_arena", "_call", "_plane", "known", "lease")

    def __init__(self, plane: Pipeline, call: ComputeRequest, known: Known, lease: Lease) -> None:
        self.known, self.lease = known, lease
        self._plane, self._call, self._arena = plane, call, plane.engine.arena

    def fill(self, data: memoryview, spans: Callable[[Known], Iterable[Span]]) -> None:
        """Copy each input to its place; ``spans`` says where they lie, asked once for all alike."""
        copies = self.known.alike.copies
        if copies is None:
            offsets = {
                tensor.name: tensor.offset
                for tensor in self.known.layout.inputs
                if tensor.offset is not None and tensor.region is None
            }
            # What is given and not needed (accumulate beside beta = 0) has no place.
            copies = tuple(
                (offsets[span.name], span.begin, span.end)
                for span in spans(self.known)
                if span.name in offsets
            )
            self.known.alike.copies = copies
        for offset, begin, end in copies:
            self._arena.view(self.lease.offset + offset, end - begin)[:] = data[begin:end]

    def computed_here(self) -> Finished | None:
        """How it was computed on the spot; None where it is to be `computed` by a worker."""
        inline_executor, lease = self._plane.engine.inline_executor, self.lease
        if inline_executor is None or lease.parts:
            return None
        timings, layout = self._call.timings, self.known.layout
        began_s = time.monotonic()
        if began_s >= self._call.deadline.at_s:
            return None  # where it waits for a worker it is told so
        finished = inline_executor.computed(layout, lease.offset, lease.regions)
        if finished is not None:
            timings.add("queue", 0.0)
            timings.add("compute", time.monotonic() - began_s)
            timings.flops += layout.sizes.flops
            timings.compulsory_bytes += layout.sizes.compulsory_bytes
        return finished

    async def computed(self) -> Finished:
        """Wait for a worker; as `Work.compute`."""
        layout, lease = self.known.layout, self.lease
        job = Job(layout, lease.offset, lease.regions)
        finished = await finished_job(self._plane, self._call, layout.sizes, job, lease)
        if (inline_executor := self._plane.engine.inline_executor) is not None:
            inline_executor.learn(layout, finished.compute_s)
        return finished

    def words(
        self, finished: Finished, made: Callable[[Known, Report], ResponseTemplate]
    ) -> ResponseTemplate:
        """The words of the answer, made once for all alike."""
        backend = self._plane.engine.backend
        key = backend, finished.kernel, finished.pieces, finished.workspace_bytes
        known = self.known.alike.words
        words = known.get(key)
        if words is None:
            if len(known) >= _MOST_WORDS:
                known.clear()
            report = report_of(self._plane, self.known.layout, finished._replace(compute_s=MARK_S))
            words = known[key] = made(self.known, report)
        return words

    def outputs(self, words: ResponseTemplate) -> list[bytes | memoryview]:
        """The outputs' own bytes, each after what stands before it."""
        parts: list[bytes | memoryview] = []
        for before, offset, size_bytes in words.outputs:
            parts += before, self._arena.view(self.lease.offset + offset, size_bytes)
        return parts


def words_around(text: bytes, mark: bytes) -> tuple[bytes, bytes]:
    """What stands before and after the mark in the text of an answer, which holds it once."""
    before, after = text.split(mark)
    return before, after


def place_of(known: Known, output: str) -> tuple[int, int]:
    """Where an output that is sent begins in its request's place, and its size."""
    for tensor in known.layout.outputs:
        if tensor.name == output and tensor.offset is not None:
            return tensor.offset, tensor.spec.size_bytes
    raise KeyError(output)
