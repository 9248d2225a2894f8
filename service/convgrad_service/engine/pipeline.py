"""The way of one request, the same for every transport.

    admit → head → decode → validate → limits → place → fill → compute → send

A transport reads bytes into a request and writes its result out; `Pipeline.run` is the one place
that knows the order. The place for all inputs and outputs is leased once their shapes are known,
the data is received or copied into it, a worker computes from place to place, and the answer is
sent from where it lies. What follows from a request's head alone is remembered by its key: clients
ask for the same layers again and again, with other data.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from convgrad.contract import Operation, Request, validate
from convgrad.errors import Overloaded
from convgrad_service.engine.admission_gate import AdmissionGate
from convgrad_service.engine.deadline import CancelScope, Deadline
from convgrad_service.engine.execution import Execution, Prepared
from convgrad_service.engine.hub import Engine
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory.lease import Lease, leased, out_of_memory
from convgrad_service.engine.memory.placement import shared_parts, to_store
from convgrad_service.engine.memory.problem_size import problem_size
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.request import (
    ClientGone,
    ComputeRequest,
    Decoded,
    Fields,
    blank,
)
from convgrad_service.engine.scheduling.quotas import NO_LIMITS, Ticket
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.shm.stored import TensorStoreClient, stored_fields
from convgrad_service.engine.telemetry.record import Record, Timings
from convgrad_service.engine.transport import Transport
from convgrad_service.problems import Problem, problem_from

__all__ = ["Pipeline"]

T = TypeVar("T")
Parts = Mapping[str, RegionPart]

_MAX_PREPARED = 256
# For requests that are all refused: the server is about to end, and nobody is to wait for that.
_AMPLE_ROOM = 1000


class Pipeline:
    """Takes requests from any transport to the engine and back."""

    def __init__(self, engine: Engine, *, limits: Limits, codec_threads: int = 2) -> None:
        self.engine = engine
        self.stored = TensorStoreClient(engine.stored)
        self.limits = limits
        self.draining = False
        self.gate = AdmissionGate(lambda: engine.room if not self.draining else _AMPLE_ROOM)
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._codecs = ThreadPoolExecutor(codec_threads, thread_name_prefix="codec")

    def require_live(self) -> None:
        """Raise DeviceUnavailable once the server had better be started anew."""
        self.engine.status.require_live()

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
        if self.draining:
            self.engine.status._replace(draining=True).admit()
        self.engine.admit()

    async def run(self, request: ComputeRequest, transport: Transport) -> None:
        """Answer one request.

        Raises
        ------
        ServiceError
            It is refused or has failed; nothing of an answer has been sent, unless it was streamed.
        ClientGone
            Nobody waits for the answer any more.
        """
        arrival = self.gate.enter()
        if arrival is None:
            arrival = await self._wait_in_line(request, transport)
        try:
            await self._run(request, transport, arrival)
        except Overloaded:
            if arrival is not None:
                await self.gate.refusal()
            raise
        except MemoryError:
            raise out_of_memory() from None

    async def _wait_in_line(self, request: ComputeRequest, transport: Transport) -> int | None:
        """See `AdmissionGate.turn`."""
        with CancelScope(request.deadline) as scope:
            transport.watch(lambda: scope.cancel(ClientGone()))
            try:
                return await self.gate.turn()
            finally:
                transport.watch(None)

    async def _run(
        self, request: ComputeRequest, transport: Transport, arrival: int | None
    ) -> None:
        ticket = None
        try:
            self.admit()
            if request.caller.limits != NO_LIMITS:
                ticket = await self.engine.enter(request.caller)
            with CancelScope() as scope:
                if request.counts_receiving and not transport.keeps_deadline:
                    scope.move(request.deadline)
                with request.timings.stage("receive"):
                    key = await transport.head()
                execution = await self._begin(
                    request,
                    transport.decode,
                    key=key,
                    holds=transport.holds,
                    inline=transport.quick,
                    ticket=ticket,
                )
                try:
                    if request.counts_receiving:
                        scope.move(request.deadline)
                    await transport.fill(execution)
                    if not request.counts_receiving:
                        request.deadline = Deadline.after(request.deadline.allowed_s)
                        scope.move(request.deadline)
                    transport.watch(lambda: scope.cancel(ClientGone()))
                    if arrival is not None:
                        self.gate.arrived(arrival)
                        arrival = None
                    try:
                        result = await execution.compute(streamed=transport.streams)
                    finally:
                        transport.watch(None)
                    # How fast an answer must be taken is the transport's to say.
                    scope.move(None)
                    await transport.send(execution, result)
                    if result.progress is not None:
                        await result.progress.end()
                finally:
                    await execution.end()
        finally:
            if arrival is not None:
                self.gate.arrived(arrival)
            if ticket is not None:
                ticket.leave()

    @asynccontextmanager
    async def begin(
        self,
        request: ComputeRequest,
        decode: Callable[[], Decoded],
        *,
        holds: Lease | None = None,
    ) -> AsyncIterator[Execution]:
        """The part of `run` before anything is computed, for whoever does the rest itself.

        ``holds`` is what ``decode`` reads, if that lies in the arena too. Raises as `run`.
        """
        execution = await self._begin(request, decode, holds=holds)
        try:
            yield execution
        finally:
            await execution.end()

    async def _begin(
        self,
        request: ComputeRequest,
        decode: Callable[[], Decoded],
        *,
        key: Hashable | None = None,
        holds: Lease | None = None,
        inline: bool = False,
        ticket: Ticket | None = None,
    ) -> Execution:
        """Make the problem that ``decode`` returns or the key is known for; lease its place."""
        kept: Parts = {}
        try:
            with request.timings.stage("decode"):
                prepared = None if key is None else self._known(request, key)
                if prepared is None:
                    decoded = await self.in_thread(decode, holds, inline=inline)
                    fields, regions = decoded.fields, decoded.regions
                    if named := "stored" in fields:
                        fields, regions = await self._find_stored(request, fields, regions)
                    validated, problem = await self.in_thread(
                        lambda: self._problem(request, fields, decoded), holds, inline=inline
                    )
                    if validated.store:
                        kept = await self._make_stored(validated, problem, regions)
                        outputs = {name: kept[validated.store[name]] for name in validated.store}
                        regions = {**regions, **outputs}
                    prepared = _prepared(validated, problem, regions, decoded)
                    if key is not None and decoded.repeatable and not (named or kept):
                        prepared = self._remember(request, key, prepared)
                _allow(request, prepared.timeout_s)
            lease = await self._place(request, prepared, ticket)
        except BaseException:
            if kept:
                await asyncio.shield(self.stored.abandon(kept.values()))
            raise
        return Execution(self.engine, request, prepared, lease, self.in_thread, self.stored, kept)

    def knows(self, operation: Operation, key: Hashable) -> bool:
        """Whether what follows from a key is remembered."""
        return (operation.name, key) in self._prepared

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
        self.engine.observe(Record(operation, transport, code, *spent, *moved, *done, key))

    def close(self) -> None:
        """Let the threads end."""
        self.draining = True
        self._codecs.shutdown(wait=False, cancel_futures=True)

    def _known(self, request: ComputeRequest, key: Hashable) -> Prepared | None:
        assert request.operation is not None  # noqa: S101 - its head has been read
        name = request.operation.name, key
        known = self._prepared.get(name)
        if known is not None:
            self._prepared.move_to_end(name)
        return known

    def _remember(self, request: ComputeRequest, key: Hashable, prepared: Prepared) -> Prepared:
        assert request.operation is not None  # noqa: S101 - its head has been read
        known = prepared._replace(templates={})
        self._prepared[request.operation.name, key] = known
        if len(self._prepared) > _MAX_PREPARED:
            self._prepared.popitem(last=False)
        return known

    def _problem(
        self, request: ComputeRequest, fields: Fields, decoded: Decoded
    ) -> tuple[Request, Problem]:
        assert request.operation is not None  # noqa: S101 - its head has been read
        validated = validate(request.operation.request, fields)
        problem = problem_from(request.operation.name, validated)
        for computed in problem.computes:
            self.limits.check(problem_size(computed))
        if decoded.refuse is not None:
            decoded.refuse(validated, problem)
        return validated, problem

    async def _find_stored(
        self, request: ComputeRequest, fields: Fields, regions: Parts
    ) -> tuple[Fields, Parts]:
        """The fields with blanks for those that name stored tensors, and where those lie."""
        assert request.operation is not None  # noqa: S101 - its head has been read
        named = stored_fields(request.operation, fields)
        found = await self.stored.find(request.owner, named.values())
        blanks = {
            field: blank(found[name].spec.shape, found[name].spec.dtype, name=field)
            for field, name in named.items()
        }
        parts = {field: found[name].part for field, name in named.items()}
        return {**fields, **blanks}, {**regions, **parts}

    async def _make_stored(self, request: Request, problem: Problem, regions: Parts) -> Parts:
        """Room for the outputs that are to be stored, by the names that they will have."""
        return await self.stored.make(to_store(request, problem_size(problem), regions))

    async def _place(
        self, request: ComputeRequest, prepared: Prepared, ticket: Ticket | None
    ) -> Lease:
        size_bytes = prepared.layout.size_bytes
        if ticket is not None:
            await ticket.hold(size_bytes, prepared.layout.sizes.flops)
        if prepared.layout.sizes.parts == 1:
            lease = self.engine.take(size_bytes, prepared.parts)
            if lease is not None:
                return lease
        started_s = time.monotonic()
        lease = await leased(self.engine.reserve(size_bytes, regions=prepared.parts))
        request.timings.add("queue", time.monotonic() - started_s)
        return lease


def _allow(request: ComputeRequest, timeout_s: float | None) -> None:
    """Shorten the deadline to what the request itself allows, from when it began."""
    if timeout_s is not None and timeout_s < request.deadline.allowed_s:
        request.deadline = Deadline(request.timings.started_s + timeout_s, timeout_s)
        request.counts_receiving = True


def _prepared(request: Request, problem: Problem, regions: Parts, decoded: Decoded) -> Prepared:
    shared = shared_parts(problem_size(problem), regions) if regions else {}
    layout = tensor_layout_of(problem, tuple(shared))
    parts = tuple(shared.values())
    return Prepared(request, layout, parts, decoded.timeout_s, decoded.notes, None)
