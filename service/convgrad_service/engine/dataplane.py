"""The way of one request, the same for every transport.

    decode → validate → Problem → limits → place in the arena → fill → queue → worker → encode

A transport brings its bytes as named fields, in which a tensor whose data is still on its way is
`blank`: known by shape and dtype alone. The place for all inputs and outputs is leased from those,
the data is received or copied into it, a worker computes from place to place, and the answer is
sent from where it lies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Report, Request, validate
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad_service.engine.arena import arranged
from convgrad_service.engine.call import Call, Result
from convgrad_service.engine.hub import Engine, Running
from convgrad_service.engine.jobs import Finished, Job
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory import Lease, leased, memory_errors_named
from convgrad_service.engine.pace import Pace
from convgrad_service.engine.parts import Told
from convgrad_service.engine.placement import arena_specs, names_elements, shared_parts, to_store
from convgrad_service.engine.progress import Progress
from convgrad_service.engine.records import Record
from convgrad_service.engine.regions import InRegion, RegionPart
from convgrad_service.engine.segments import Place
from convgrad_service.engine.sized import sized
from convgrad_service.engine.stored import StoredTensors, stored_fields
from convgrad_service.engine.timing import Timings
from convgrad_service.problems import Problem, problem_from

__all__ = ["SMALL_BYTES", "Call", "Dataplane", "Filler", "Result", "Source", "Work", "blank"]

T = TypeVar("T")
Fields = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]
Filler = Callable[[NDArray[Any]], None]
"""Writes a tensor to the place that it is called with."""
Source = NDArray[Any] | Filler

_MAX_KNOWN = 256

SMALL_BYTES = 64 * 1024
"""What is decoded, copied or encoded where it stands: a thread would take longer to be told."""


class Work:
    """One request that has its place in the arena.

    ``inputs`` are writable; `compute` may be called once they hold the request's data. What it
    returns lies in the arena too, and is valid until the block of `Dataplane.begin` ends. Inputs
    in shared memory are not among them, and of outputs there only shape and dtype are returned.
    """

    def __init__(
        self,
        plane: Dataplane,
        call: Call,
        request: Request,
        problem: Problem,
        lease: Lease,
        shared: Collection[str],
        kept: Mapping[str, RegionPart],
    ) -> None:
        self.request, self.problem, self.lease = request, problem, lease
        self._plane, self._call = plane, call
        self._kept = kept
        self.is_stored = False
        self._sized = sizes = sized(problem)
        regions = dict(zip(shared, lease.regions, strict=True))
        specs = arena_specs(sizes, shared)
        offsets, _ = arranged(specs.values())
        places: dict[str, Place] = {**regions}
        places.update(
            (name, lease.offset + offset) for name, offset in zip(specs, offsets, strict=True)
        )
        self._job = Job(
            problem,
            {name: places[name] for name in sizes.inputs},
            {name: places[name] for name in sizes.outputs},
            {name: place for name, place in regions.items() if name in specs},
            Pace.cost(sizes),
            sizes.parts,
        )
        self._ending: asyncio.Future[Result] | None = None
        arena = plane.engine.arena
        self.inputs = {
            name: arena.array(place, sizes.inputs[name])
            for name, place in self._job.inputs.items()
            if not isinstance(place, InRegion) and name not in regions
        }
        self._outputs = {
            name: blank(sizes.outputs[name].shape, sizes.outputs[name].dtype, name=name)
            if isinstance(place, InRegion)
            else arena.array(place, sizes.outputs[name])
            for name, place in self._job.outputs.items()
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
        job = self._job
        # Of what names elements of others it is known at the end whether it was right to.
        if not streamed or job.tasks == 1 or self._kept or names_elements(self._sized):
            return await self._computed(None)
        progress = Progress(job.problem, job.parts, self._call.deadline)
        self._ending = await progress.first(self._computed(progress.told))
        if self._ending.done():
            return self._ending.result()
        return Result(self.request, self._outputs, self._report(progress.so_far), progress)

    def stop(self) -> None:
        """Ask what still computes to stop."""
        if self._ending is not None:
            self._ending.cancel()

    async def _computed(self, told: Told | None) -> Result:
        engine, timings = self._plane.engine, self._call.timings
        running = engine.compute(self.lease, self._job, self._call.deadline.at_s, told)
        submitted_s = time.monotonic()
        moved_s = 0.0
        try:
            # Shielded: `done` says when the memory is free, which a caller who leaves cannot.
            finished = await asyncio.shield(running.done)
            moved_s = finished.upload_s + finished.download_s
            if moved_s:
                timings.add("upload", finished.upload_s)
                timings.add("download", finished.download_s)
        except asyncio.CancelledError:
            engine.cancel(running)
            raise
        finally:
            _count_waiting(timings, running, time.monotonic() - submitted_s, moved_s)
        timings.flops += self._sized.flops
        timings.compulsory_bytes += self._sized.compulsory_bytes
        if self._kept:
            await self._plane.stored.commit(self._call.owner, self._kept)
            self.is_stored = True
        return Result(self.request, self._outputs, self._report(finished))

    def _report(self, finished: Finished) -> Report:
        return Report(
            backend=self._plane.engine.status.backend,
            kernel=finished.kernel,
            flops=self._sized.flops,
            bytes=self._sized.compulsory_bytes,
            compute_s=finished.compute_s,
            pieces=finished.pieces,
            workspace_bytes=finished.workspace_bytes,
        )


class Dataplane:
    """Takes calls from any transport to the engine and back."""

    def __init__(self, engine: Engine, *, limits: Limits, codec_threads: int = 2) -> None:
        self.engine = engine
        self.stored = StoredTensors(engine.stored)
        self.limits = limits
        self.draining = False
        self._known: dict[Hashable, tuple[Request, Problem, tuple[Any, ...]]] = {}
        self._codecs = ThreadPoolExecutor(codec_threads, thread_name_prefix="codec")

    def require_ready(self) -> None:
        """Raise DeviceUnavailable unless a device works and the server is to go on."""
        self.engine.status._replace(draining=self.draining).require_ready()

    def admit(self) -> None:
        """Refuse, before its body is read, a request that could not be queued now.

        Raises
        ------
        Overloaded
            As many problems wait as may.
        DeviceUnavailable
            The server is about to stop, or its device has failed for good.
        """
        status = self.engine.status
        status._replace(draining=status.draining or self.draining).admit()

    @asynccontextmanager
    async def begin(
        self,
        call: Call,
        decode: Callable[[], Fields],
        *,
        holds: Lease | None = None,
        regions: Mapping[str, RegionPart] = MappingProxyType({}),
    ) -> AsyncIterator[Work]:
        """Make the problem of the fields that ``decode`` returns, and lease its place.

        ``holds`` is what ``decode`` reads, if that lies in the arena too. ``regions`` are the
        tensors, inputs and outputs, that lie in shared memory.

        Raises
        ------
        ServiceError
            Any of the table that knows no transport.
        """
        async with memory_errors_named():
            with call.timings.stage("decode"):
                known = (
                    None if call.key is None else self._known.get((call.operation.name, call.key))
                )
                if known is None:
                    fields = await self.in_thread(decode, holds, inline=call.small)
                    if "stored" in fields:
                        fields, regions = await self._found(call, fields, regions)
                        call.key = None
                    request, problem = await self.in_thread(
                        lambda: self._prepare(call, fields), holds, inline=call.small
                    )
                    self._remember(call, request, problem)
                else:
                    request, problem, call.notes[:] = known
            call.timings.accepted = True
            sizes = sized(problem)
            kept: Mapping[str, RegionPart] = {}
            if request.store:
                kept = await self.stored.make(to_store(request, sizes, regions))
                regions = {**regions, **{name: kept[request.store[name]] for name in request.store}}
            stored = False
            try:
                shared = shared_parts(sizes, regions) if regions else {}
                _, size_bytes = arranged(arena_specs(sizes, shared).values())
                if call.ticket is not None:
                    await call.ticket.hold(size_bytes)
                started_s = time.monotonic()
                lease = await leased(self.engine.reserve(size_bytes, regions=list(shared.values())))
                call.timings.add("queue", time.monotonic() - started_s)
                try:
                    work = Work(self, call, request, problem, lease, shared, kept)
                    try:
                        yield work
                    finally:
                        work.stop()
                    stored = work.is_stored
                finally:
                    lease.release()
            finally:
                if kept and not stored:
                    await asyncio.shield(self.stored.abandon(kept.values()))

    async def answer(
        self, call: Call, decode: Callable[[], Fields], encode: Callable[[Result], T]
    ) -> T:
        """Compute one request whose tensors are all at hand; both functions run in threads.

        What ``encode`` returns must hold no view of the result's arrays, whose memory is another
        request's as soon as this returns.
        """
        fields: Fields = {}

        def decoded() -> Fields:
            nonlocal fields
            fields = decode()
            return fields

        async with call.deadline.enforced(), self.begin(call, decoded) as work:
            with call.timings.stage("decode"):
                await work.fill(work.request.tensors())
            result = await work.compute()
            with call.timings.stage("encode"):
                return await self.in_thread(lambda: encode(result), work.lease)

    async def in_thread(
        self, function: Callable[[], T], *leases: Lease | None, inline: bool = False
    ) -> T:
        """Call a function in a codec thread, or at once where it is ``inline``.

        A thread goes on after its caller has given up, and so do the leases it works on.
        """
        if inline:
            return function()
        future = asyncio.get_running_loop().run_in_executor(self._codecs, function)
        for lease in leases:
            if lease is not None:
                lease.retain()
                future.add_done_callback(lease.release)
        return await asyncio.shield(future)

    def observe(
        self,
        operation: str,
        transport: str,
        code: str,
        timings: Timings,
        *,
        received_bytes: int,
        sent_bytes: int,
        key: str = "",
    ) -> None:
        """Count one request of a known operation; ``code`` is "ok" or how it failed, ``key`` the
        name of the API key that it came with."""
        spent = timings.total_s, timings.stages_s
        moved = received_bytes, sent_bytes
        done = timings.flops, timings.compulsory_bytes
        self.engine.observe(
            Record(operation, transport, code, *spent, *moved, timings.accepted, *done, key)
        )

    def close(self) -> None:
        """Let the threads end."""
        self.draining = True
        self._codecs.shutdown(wait=False, cancel_futures=True)

    def _remember(self, call: Call, request: Request, problem: Problem) -> None:
        """The same layer is asked for again and again, with other data."""
        if call.key is not None:
            if len(self._known) >= _MAX_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[call.operation.name, call.key] = request, problem, tuple(call.notes)

    async def _found(
        self, call: Call, fields: Fields, regions: Mapping[str, RegionPart]
    ) -> tuple[Fields, Mapping[str, RegionPart]]:
        """The fields with blanks for those that name stored tensors, and where those lie."""
        named = stored_fields(call.operation, fields)
        found = await self.stored.find(call.owner, named.values())
        blanks = {
            field: blank(found[name].spec.shape, found[name].spec.dtype, name=field)
            for field, name in named.items()
        }
        parts = {field: found[name].part for field, name in named.items()}
        return {**fields, **blanks}, {**regions, **parts}

    def _prepare(self, call: Call, fields: Fields) -> tuple[Request, Problem]:
        request = validate(call.operation.request, fields)
        problem = problem_from(call.operation.name, request)
        self.limits.check(sized(problem))
        if call.refuse is not None:
            call.refuse(request, problem)
        return request, problem


def blank(shape: tuple[int, ...], dtype: DType, *, name: str) -> NDArray[Any]:
    """A tensor that is known by shape and dtype alone: it has no data and takes no memory."""
    try:
        return np.broadcast_to(np.empty((), dtype.numpy), shape)
    except ValueError:
        # More elements than NumPy can count.
        raise MalformedRequest(f"{name}: shape {shape} is too large") from None


def _count_waiting(timings: Timings, running: Running, spent_s: float, moved_s: float) -> None:
    # Of a problem that is given up the start is known all the same, if it had one.
    waited_s = spent_s if running.waited_s is None else min(running.waited_s, spent_s)
    timings.add("queue", waited_s)
    timings.add("compute", spent_s - waited_s - moved_s)
