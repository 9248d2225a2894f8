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
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from convgrad.contract import Request, validate
from convgrad_service.engine.admitted import (
    SMALL_BYTES,
    Alike,
    Filler,
    Known,
    Source,
    Work,
    blank,
)
from convgrad_service.engine.hub import Engine
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory.lease import Lease, leased, memory_errors_named
from convgrad_service.engine.memory.placement import shared_parts, to_store
from convgrad_service.engine.memory.problem_size import problem_size
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.prepared_request import PreparedRequest
from convgrad_service.engine.request import ComputeRequest, Result
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.shm.stored import TensorStoreClient, stored_fields
from convgrad_service.engine.telemetry.record import Record
from convgrad_service.engine.telemetry.timing import Timings
from convgrad_service.problems import Problem, problem_from

__all__ = [
    "SMALL_BYTES",
    "ComputeRequest",
    "Filler",
    "Pipeline",
    "Result",
    "Source",
    "Work",
    "blank",
]

T = TypeVar("T")
Fields = Mapping[str, Any]

_MAX_KNOWN = 256


class Pipeline:
    """Takes calls from any transport to the engine and back."""

    def __init__(self, engine: Engine, *, limits: Limits, codec_threads: int = 2) -> None:
        self.engine = engine
        self.stored = TensorStoreClient(engine.stored)
        self.limits = limits
        self.draining = False
        self._known: OrderedDict[Hashable, Known] = OrderedDict()
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
        if self.draining:
            self.engine.status._replace(draining=True).admit()
        self.engine.admit()

    @asynccontextmanager
    async def begin(
        self,
        call: ComputeRequest,
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
            kept: Mapping[str, RegionPart] = {}
            with call.timings.stage("decode"):
                known = self._like(call)
                if known is None:
                    fields = await self.in_thread(decode, holds, inline=call.small)
                    if "stored" in fields:
                        fields, regions = await self._found(call, fields, regions)
                        call.key = None
                    request, problem = await self.in_thread(
                        lambda: self._prepare(call, fields), holds, inline=call.small
                    )
            call.timings.accepted = True
            stored = False
            try:
                if known is None:
                    if request.store:
                        kept = await self.stored.make(
                            to_store(request, problem_size(problem), regions)
                        )
                        outputs = {name: kept[request.store[name]] for name in request.store}
                        regions = {**regions, **outputs}
                        call.key = None
                    known = self._remembered(call, request, problem, regions)
                size_bytes = known.layout.size_bytes
                if call.ticket is not None:
                    await call.ticket.hold(size_bytes)
                started_s = time.monotonic()
                lease = await leased(self.engine.reserve(size_bytes, regions=known.parts))
                call.timings.add("queue", time.monotonic() - started_s)
                try:
                    work = Work(self, call, known, lease, kept)
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

    def at_once(self, call: ComputeRequest) -> PreparedRequest | None:
        """A call like one before it, if its place is free now; else None, and it is for `begin`.

        Raises
        ------
        NotFound, InvalidProblem
            The shared memory that it names is not there any more.
        """
        known = self._like(call)
        if known is None or known.layout.sizes.parts > 1:
            return None
        lease = self.engine.take(known.layout.size_bytes, known.parts)
        if lease is None:
            return None
        call.timings.accepted = True
        return PreparedRequest(self, call, known, lease)

    async def answer(
        self, call: ComputeRequest, decode: Callable[[], Fields], encode: Callable[[Result], T]
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

    def _like(self, call: ComputeRequest) -> Known | None:
        """What is known of a call from one like it: clients ask for the same layer again and again,
        with other data."""
        key = call.operation.name, call.key
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            call.notes[:] = known.notes
        return known

    def _remembered(
        self,
        call: ComputeRequest,
        request: Request,
        problem: Problem,
        regions: Mapping[str, RegionPart],
    ) -> Known:
        shared = shared_parts(problem_size(problem), regions) if regions else {}
        layout = tensor_layout_of(problem, tuple(shared))
        known = Known(request, layout, tuple(shared.values()), tuple(call.notes), Alike())
        if call.key is not None:
            self._known[call.operation.name, call.key] = known
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return known

    async def _found(
        self, call: ComputeRequest, fields: Fields, regions: Mapping[str, RegionPart]
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

    def _prepare(self, call: ComputeRequest, fields: Fields) -> tuple[Request, Problem]:
        request = validate(call.operation.request, fields)
        problem = problem_from(call.operation.name, request)
        self.limits.check(problem_size(problem))
        if call.refuse is not None:
            call.refuse(request, problem)
        return request, problem
