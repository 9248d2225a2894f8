"""One request on its way through the dataplane: what is known of it, and its place in the arena."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Report, Request
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad_service.engine.hub import JobHandle
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.memory.placement import names_elements
from convgrad_service.engine.memory.problem_size import ProblemSize
from convgrad_service.engine.memory.tensor_layout import TensorLayout
from convgrad_service.engine.request import ComputeRequest, Result
from convgrad_service.engine.scheduling.partition import OnPartDone
from convgrad_service.engine.scheduling.progress import Progress
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.telemetry.timing import Timings
from convgrad_service.engine.workers.execute import Finished, Job

if TYPE_CHECKING:
    from convgrad_service.engine.pipeline import Pipeline

__all__ = [
    "SMALL_BYTES",
    "Alike",
    "Filler",
    "Known",
    "ResponseTemplate",
    "Source",
    "Work",
    "blank",
    "finished_job",
    "report_of",
]

Arrays = Mapping[str, NDArray[Any]]
Parts = Mapping[str, RegionPart]
Filler = Callable[[NDArray[Any]], None]
"""Writes a tensor to the place that it is called with."""
Source = NDArray[Any] | Filler

_NOTHING: Parts = MappingProxyType({})

SMALL_BYTES = 64 * 1024
"""What is decoded, copied or encoded where it stands: a thread would take longer to be told."""


class ResponseTemplate(NamedTuple):
    """What stands around the two things that differ between answers: the seconds they took, and
    the bytes of the outputs."""

    before: bytes
    after: bytes
    outputs: tuple[tuple[bytes, int, int], ...] = ()
    """For each output what stands before it, where in the place it begins, and its size."""


class Alike:
    """What requests of one key share on their way in and out; found out by the first at once."""

    __slots__ = ("copies", "words")

    def __init__(self) -> None:
        self.copies: tuple[tuple[int, int, int], ...] | None = None
        """Where in its place each input begins, and where in the data its bytes do and end."""
        self.words: dict[Hashable, ResponseTemplate] = {}
        """By how they were computed."""


class Known(NamedTuple):
    """What is the same for every request with the same key of `ComputeRequest`.

    ``parts`` is the shared memory that it needs, in the arrangement's order.
    """

    request: Request
    layout: TensorLayout
    parts: tuple[RegionPart, ...]
    notes: tuple[Any, ...]
    alike: Alike


class Work:
    """One request that has its place in the arena.

    ``inputs`` are writable; `compute` may be called once they hold the request's data. What it
    returns lies in the arena too, and is valid until the block of `Pipeline.begin` ends. Inputs
    in shared memory are not among them, and of outputs there only shape and dtype are returned.
    """

    def __init__(
        self,
        plane: Pipeline,
        call: ComputeRequest,
        known: Known,
        lease: Lease,
        kept: Parts = _NOTHING,
    ) -> None:
        self.request, self.layout, self.lease = known.request, known.layout, lease
        self.is_stored = False
        self._plane, self._call, self._kept = plane, call, kept
        self._job = Job.of(known.layout, lease.offset, lease.regions)
        self._ending: asyncio.Future[Result] | None = None
        arena, base = plane.engine.arena, lease.offset
        self.inputs = {
            name: arena.array(base + offset, spec)
            for name, spec, offset, region in self.layout.inputs
            if offset is not None and region is None
        }
        self._outputs = {
            name: blank(spec.shape, spec.dtype, name=name)
            if offset is None
            else arena.array(base + offset, spec)
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
        await self._plane.in_thread(write, self.lease, holds, inline=small <= SMALL_BYTES)

    async def compute(self, *, streamed: bool = False) -> Result:
        """Wait for a worker to compute it, or, of a large answer that may be ``streamed``, for the
        first of its parts.

        If the caller goes away (the task is cancelled), waiting work is dropped and running work
        is asked to stop.
        """
        layout = self.layout
        if not streamed or self._job.tasks == 1 or self._kept or _ends_at_once(layout):
            return await self._computed(None)
        progress = Progress(layout.problem, layout.sizes.parts, self._call.deadline)
        self._ending = await progress.first(self._computed(progress.told))
        if self._ending.done():
            return self._ending.result()
        report = report_of(self._plane, layout, progress.so_far)
        return Result(self.request, self._outputs, report, progress)

    def stop(self) -> None:
        """Ask what still computes to stop."""
        if self._ending is not None:
            self._ending.cancel()

    async def _computed(self, told: OnPartDone | None) -> Result:
        sizes = self.layout.sizes
        finished = await finished_job(self._plane, self._call, sizes, self._job, self.lease, told)
        if self._kept:
            await self._plane.stored.commit(self._call.owner, self._kept)
            self.is_stored = True
        report = report_of(self._plane, self.layout, finished)
        return Result(self.request, self._outputs, report)


async def finished_job(
    plane: Pipeline,
    call: ComputeRequest,
    sizes: ProblemSize,
    job: Job,
    lease: Lease,
    told: OnPartDone | None = None,
) -> Finished:
    """How a worker computed what lies in a lease. See `Work.compute`."""
    engine, timings = plane.engine, call.timings
    running = engine.compute(lease, job, call.deadline.at_s, told)
    submitted_s = time.monotonic()
    moved_s = 0.0
    try:
        finished = await _undisturbed(running.done)
        moved_s = finished.upload_s + finished.download_s
        if moved_s:
            timings.add("upload", finished.upload_s)
            timings.add("download", finished.download_s)
    except asyncio.CancelledError:
        engine.cancel(running)
        raise
    finally:
        _count_waiting(timings, running, time.monotonic() - submitted_s, moved_s)
    timings.flops += sizes.flops
    timings.compulsory_bytes += sizes.compulsory_bytes
    return finished


async def _undisturbed(done: asyncio.Future[Finished]) -> Finished:
    """The result of a future that says when memory is free, which a caller who leaves cannot.

    As asyncio.shield, for which small requests wait longer.
    """
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    done.add_done_callback(wake)
    await waiter
    return done.result()


def _count_waiting(timings: Timings, running: JobHandle, spent_s: float, moved_s: float) -> None:
    # Of a problem that is given up the start is known all the same, if it had one.
    waited_s = spent_s if running.waited_s is None else min(running.waited_s, spent_s)
    timings.add("queue", waited_s)
    timings.add("compute", spent_s - waited_s - moved_s)


def report_of(plane: Pipeline, layout: TensorLayout, finished: Finished) -> Report:
    """How a problem was computed, as its caller is told."""
    return Report(
        backend=plane.engine.backend,
        kernel=finished.kernel,
        flops=layout.sizes.flops,
        bytes=layout.sizes.compulsory_bytes,
        compute_s=finished.compute_s,
        pieces=finished.pieces,
        workspace_bytes=finished.workspace_bytes,
    )


def _ends_at_once(layout: TensorLayout) -> bool:
    """Whether nothing of an answer may leave before all of it is computed.

    Of what names elements of others it is known at the end whether it was right to, and of sums
    nothing is final before.
    """
    sums = {tensor.name for tensor in layout.shares}
    return names_elements(layout.sizes) or sums >= layout.sizes.outputs.keys()


def blank(shape: tuple[int, ...], dtype: DType, *, name: str) -> NDArray[Any]:
    """A tensor that is known by shape and dtype alone: it has no data and takes no memory."""
    try:
        return np.broadcast_to(np.empty((), dtype.numpy), shape)
    except ValueError:
        # More elements than NumPy can count.
        raise MalformedRequest(f"{name}: shape {shape} is too large") from None
