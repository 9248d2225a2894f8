"""One request that has its place in the arena: its inputs are filled, it is computed, and read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Report, Request
from convgrad_service.engine.hub import Engine, JobHandle
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.memory.placement import names_elements
from convgrad_service.engine.memory.tensor_layout import TensorLayout
from convgrad_service.engine.request import SMALL_BYTES, ComputeRequest, Result, blank
from convgrad_service.engine.scheduling.partition import OnPartDone
from convgrad_service.engine.scheduling.progress import Progress
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.shm.stored import TensorStoreClient
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.engine.workers.execute import Finished, Job

__all__ = ["Execution", "Filler", "Prepared", "ResponseTemplate", "Source", "split_at"]

Parts = Mapping[str, RegionPart]
Filler = Callable[[NDArray[Any]], None]
"""Writes a tensor to the place that it is called with."""
Source = NDArray[Any] | Filler

_NOTHING: Parts = MappingProxyType({})

# Stands for the seconds of an answer that is only made to be split there.
_MARK_S = 0.123456789
# Kernels that one problem may be answered by: one, unless its device has changed.
_MAX_TEMPLATES = 4


class ResponseTemplate(NamedTuple):
    """An answer but for what differs between requests: the seconds it took and the outputs' bytes.

    For each output, ``outputs`` has what stands before it, where in the request's place it begins,
    and its size.
    """

    before: bytes
    after: bytes
    outputs: tuple[tuple[bytes, int, int], ...] = ()


class Prepared(NamedTuple):
    """What is the same for every request with the same key, and remembered by it.

    ``parts`` is the shared memory that it needs, in the layout's order. ``templates`` are by how
    its answers were computed; None where the request is not remembered.
    """

    request: Request
    layout: TensorLayout
    parts: tuple[RegionPart, ...]
    timeout_s: float | None
    notes: Any
    templates: dict[Hashable, ResponseTemplate] | None


class InThread(Protocol):
    """See `Pipeline.in_thread`."""

    def __call__(
        self, function: Callable[[], None], *leases: Lease | None, inline: bool = False
    ) -> Awaitable[None]: ...


class Execution:
    """See the module.

    ``inputs`` are writable; `compute` may be called once they hold the request's data. What it
    returns lies in the arena too, and is valid until `end`. Inputs in shared memory are not among
    them.
    """

    def __init__(
        self,
        engine: Engine,
        request: ComputeRequest,
        prepared: Prepared,
        lease: Lease,
        in_thread: InThread,
        stored: TensorStoreClient,
        kept: Parts = _NOTHING,
    ) -> None:
        self.request, self.layout, self.lease = prepared.request, prepared.layout, lease
        self.notes = prepared.notes
        self.is_stored = False
        self._engine, self._call, self._prepared = engine, request, prepared
        self._in_thread, self._stored, self._kept = in_thread, stored, kept
        self._job = Job.of(prepared.layout, lease.offset, lease.regions)
        self._ending: asyncio.Future[Result] | None = None

    def input_views(self) -> dict[str, memoryview]:
        """The bytes of the inputs that the request brings, by name."""
        view, base = self._engine.arena.view, self.lease.offset
        return {
            name: view(base + offset, spec.size_bytes)
            for name, spec, offset, region in self.layout.inputs
            if offset is not None and region is None
        }

    @cached_property
    def inputs(self) -> dict[str, NDArray[Any]]:
        """The same as arrays."""
        return {
            name: self._engine.arena.array(self.lease.offset + offset, spec)
            for name, spec, offset, region in self.layout.inputs
            if offset is not None and region is None
        }

    @cached_property
    def outputs(self) -> dict[str, NDArray[Any]]:
        """What it computes; of what goes to shared memory shape and dtype alone."""
        return {
            name: blank(spec.shape, spec.dtype, name=name)
            if offset is None
            else self._engine.arena.array(self.lease.offset + offset, spec)
            for name, spec, offset, _ in self.layout.outputs
        }

    async def fill(self, sources: Mapping[str, Source], *, holds: Lease | None = None) -> None:
        """Write inputs: an array is copied, a function is called with the place to write to.

        ``holds`` is what they read, if that lies in the arena too.
        """

        def write() -> None:
            for name, source in sources.items():
                if name not in self.inputs:
                    continue  # given, and not needed: accumulate beside beta = 0
                if callable(source):
                    source(self.inputs[name])
                else:
                    np.copyto(self.inputs[name], source, casting="no")

        small = sum(self.inputs[name].nbytes for name in sources if name in self.inputs)
        await self._in_thread(write, self.lease, holds, inline=small <= SMALL_BYTES)

    async def compute(self, *, streamed: bool = False) -> Result:
        """Compute it, or, of a large answer that may be ``streamed``, the first of its parts.

        If the caller goes away (the task is cancelled), waiting work is dropped and running work
        is asked to stop.
        """
        layout = self.layout
        if not streamed or self._job.tasks == 1 or self._kept or _is_final_at_its_end(layout):
            return await self._computed(None)
        progress = Progress(layout.problem, layout.sizes.parts, self._call.deadline)
        self._ending = await progress.first(self._computed(progress.told))
        if self._ending.done():
            return self._ending.result()
        return _Result(self, progress.so_far, progress)

    async def end(self) -> None:
        """Ask what still computes to stop, and give the place back."""
        if self._ending is not None:
            self._ending.cancel()
        self.lease.release()
        if self._kept and not self.is_stored:
            await asyncio.shield(self._stored.abandon(self._kept.values()))

    def template(
        self, finished: Finished, make: Callable[[Report], ResponseTemplate]
    ) -> ResponseTemplate | None:
        """The answer's template, made once for all requests with the same key; None without one.

        ``make`` is called with a report whose seconds are to be cut out, see `split_at`.
        """
        templates = self._prepared.templates
        if templates is None:
            return None
        key = self._engine.backend, finished.kernel, finished.pieces, finished.workspace_bytes
        template = templates.get(key)
        if template is None:
            if len(templates) >= _MAX_TEMPLATES:
                templates.clear()
            report = self.report(finished._replace(compute_s=_MARK_S))
            template = templates[key] = make(report)
        return template

    def output_bytes(self, template: ResponseTemplate) -> list[bytes | memoryview]:
        """The outputs' own bytes, each after what stands before it."""
        parts: list[bytes | memoryview] = []
        for before, offset, size_bytes in template.outputs:
            parts += before, self._engine.arena.view(self.lease.offset + offset, size_bytes)
        return parts

    def place_of(self, output: str) -> tuple[int, int]:
        """Where an output that is sent begins in the request's place, and its size."""
        for tensor in self.layout.outputs:
            if tensor.name == output and tensor.offset is not None:
                return tensor.offset, tensor.spec.size_bytes
        raise KeyError(output)

    async def _computed(self, on_part_done: OnPartDone | None) -> Result:
        finished = self._computed_inline() or await self._computed_by_worker(on_part_done)
        sizes, timings = self.layout.sizes, self._call.timings
        timings.flops += sizes.flops
        timings.compulsory_bytes += sizes.compulsory_bytes
        if self._kept:
            await self._stored.commit(self._call.owner, self._kept)
            self.is_stored = True
        return _Result(self, finished)

    def _computed_inline(self) -> Finished | None:
        """How it was computed on the event loop; None where that is for a worker."""
        inline, lease = self._engine.inline_executor, self.lease
        if inline is None or lease.parts or self._kept or self._job.tasks > 1:
            return None
        began_s = time.monotonic()
        if began_s >= self._call.deadline.at_s:
            return None  # the scheduler says so
        finished = inline.computed(self.layout, lease.offset, lease.regions)
        if finished is not None:
            self._call.timings.add("queue", 0.0, began_s)
            self._call.timings.add("compute", time.monotonic() - began_s, began_s)
        return finished

    async def _computed_by_worker(self, on_part_done: OnPartDone | None) -> Finished:
        engine, timings = self._engine, self._call.timings
        # Before it is submitted: a worker may be done before this task goes on.
        submitted_s = time.monotonic()
        handle = engine.compute(self.lease, self._job, self._call.deadline.at_s, on_part_done)
        if self._call.submitted is not None:
            self._call.submitted(handle)
        upload_s = download_s = 0.0
        try:
            finished = await _unshielded(handle.done)
            upload_s, download_s = finished.upload_s, finished.download_s
        except asyncio.CancelledError:
            engine.cancel(handle)
            raise
        finally:
            _count_stages(timings, handle, submitted_s, upload_s, download_s)
        if engine.inline_executor is not None:
            engine.inline_executor.learn(self.layout, finished.compute_s)
        return finished

    def report(self, finished: Finished) -> Report:
        """How the problem was computed, for its caller."""
        return Report(
            backend=self._engine.backend,
            kernel=finished.kernel,
            flops=self.layout.sizes.flops,
            bytes=self.layout.sizes.compulsory_bytes,
            compute_s=finished.compute_s,
            pieces=finished.pieces,
            workspace_bytes=finished.workspace_bytes,
        )


class _Result:
    """See `Result`. What a template stands for is not made."""

    __slots__ = ("_execution", "finished", "progress")

    def __init__(
        self, execution: Execution, finished: Finished, progress: Progress | None = None
    ) -> None:
        self._execution, self.finished, self.progress = execution, finished, progress

    @property
    def request(self) -> Request:
        return self._execution.request

    @property
    def outputs(self) -> Mapping[str, NDArray[Any]]:
        return self._execution.outputs

    @property
    def report(self) -> Report:
        return self._execution.report(self.finished)


def split_at(text: bytes, spelt: Callable[[float], bytes]) -> tuple[bytes, bytes]:
    """What stands before and after the seconds in an answer made by `Execution.template`.

    ``spelt`` writes a number as the answer has it.
    """
    before, after = text.split(spelt(_MARK_S))
    return before, after


async def _unshielded(done: asyncio.Future[Finished]) -> Finished:
    """The result of a future that a caller who leaves must not cancel: it says when memory is free.

    Like asyncio.shield(), with half the work.
    """
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    done.add_done_callback(wake)
    await waiter
    return done.result()


def _count_stages(
    timings: Timings, handle: JobHandle, submitted_s: float, upload_s: float, download_s: float
) -> None:
    """Count what a job that has ended now waited, computed, and was moved."""
    spent_s = time.monotonic() - submitted_s
    # Of a problem that is given up the start is known all the same, if it had one.
    waited_s = spent_s if handle.waited_s is None else min(handle.waited_s, spent_s)
    compute_s = max(spent_s - waited_s - upload_s - download_s, 0.0)
    timings.add("queue", waited_s, submitted_s)
    began_s = submitted_s + waited_s
    if upload_s + download_s:
        timings.add("upload", upload_s, began_s)
        timings.add("download", download_s, began_s + upload_s + compute_s)
    timings.add("compute", compute_s, began_s + upload_s)


def _is_final_at_its_end(layout: TensorLayout) -> bool:
    """Whether no part of an answer may leave before all of it is computed.

    Where an input says which elements to write, it can be found wrong until the end; and a sum is
    not known before all its parts are.
    """
    sums = {tensor.name for tensor in layout.shares}
    return names_elements(layout.sizes) or sums >= layout.sizes.outputs.keys()
