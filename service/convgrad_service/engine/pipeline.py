"""The steps of a request, in the same order for every transport.

    wait in line → admit → head → decode → validate → limits → lease → fill → compute → send

`Pipeline.run` is the only place that knows the order. A transport reads bytes into the request and
writes its result out. Memory for all inputs and outputs is leased once their shapes are known, the
data is received or copied into it, a worker computes in it, and the response is sent from it. What
depends on a request's head alone is cached by its key: clients send the same layers again and
again, with other data.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from convgrad.contract import Operation, Request, validate
from convgrad.errors import DeviceUnavailable, Overloaded
from convgrad_service.engine.admission import (
    Admission,
    AdmissionGate,
    CancelScope,
    ClientDisconnected,
    Deadline,
    Limits,
)
from convgrad_service.engine.engine import Engine, call_hub
from convgrad_service.engine.execution import Execution, PreparedRequest, abandon
from convgrad_service.engine.memory.arena import Lease, out_of_memory
from convgrad_service.engine.memory.tensor_layout import (
    outputs_to_store,
    region_parts,
    tensor_layout_of,
)
from convgrad_service.engine.options import SMALL_REQUEST_BYTES
from convgrad_service.engine.request import ComputeRequest, Decoded, Fields, blank
from convgrad_service.engine.scheduling.quotas import Ticket
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.engine.shm.stored import TensorStore, stored_fields
from convgrad_service.problems import Problem, problem_from

T = TypeVar("T")
Parts = Mapping[str, RegionPart]

_MAX_PREPARED = 256
# Large bodies that may be received but not computed, in addition to two per worker slot.
_AHEAD = 6
# Least time after which to try again when there are too many in line.
_RETRY_AFTER_S = 1.0
# While draining, every request is refused, without waiting in line first.
_ROOM_WHILE_DRAINING = 1000


class Transport(Protocol):
    """What a transport does for one request. `Pipeline.run` calls the methods in this order."""

    enforces_deadline: bool
    """Whether `head` enforces the deadline itself, and must not be cancelled at it."""

    async def head(self) -> Hashable | None:
        """Receive everything before the tensors' data.

        Returns a key that is equal for requests that differ in their tensors' data alone, or None.
        What `decode` returns is cached by the key.
        """
        ...

    @property
    def body_lease(self) -> Lease | None:
        """The lease of what `decode` reads, if that is in the arena."""
        ...

    @property
    def decodes_inline(self) -> bool:
        """Whether `decode` is too short to be worth a thread."""
        ...

    def decode(self) -> Decoded:
        """Decode the head. May run in a thread; not called if the key is cached."""
        ...

    async def fill(self, execution: Execution) -> None:
        """Receive or decode the tensors' data into the inputs of ``execution``."""
        ...

    def watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """Call ``on_disconnect`` if the client disconnects; None stops that."""
        ...

    async def send(self, execution: Execution) -> None:
        """Encode and send the outputs; they must not be used afterwards."""
        ...


class Pipeline:
    """Runs requests of any transport on an engine."""

    def __init__(self, engine: Engine, *, limits: Limits, codec_threads: int = 2) -> None:
        self.engine = engine
        self.limits = limits
        self.draining = False
        self.aborted = False
        """The server ends without waiting for its requests, whose connections it has closed."""
        self.gate = AdmissionGate(
            lambda: engine.room if not self.draining else _ROOM_WHILE_DRAINING,
            lambda: _AHEAD + 2 * engine.slots if not self.draining else _ROOM_WHILE_DRAINING,
            engine.report_waiting,
        )
        self._prepared: OrderedDict[tuple[str, Hashable | None], PreparedRequest] = OrderedDict()
        self._codecs = ThreadPoolExecutor(codec_threads, thread_name_prefix="codec")

    @property
    def leaving(self) -> bool:
        """Whether clients should send their next requests to another server."""
        return self.draining or self.engine.leaving

    def require_live(self) -> None:
        """Raise DeviceUnavailable if the server must be restarted."""
        self.engine.status.require_live()

    def require_ready(self) -> None:
        """Raise DeviceUnavailable unless a device works and the server is not shutting down."""
        self.engine.status._replace(draining=self.draining).require_ready()

    @property
    def unready_reason(self) -> str | None:
        """Why `require_ready` raises; None if it does not."""
        try:
            self.require_ready()
        except DeviceUnavailable as error:
            return error.detail
        return None

    def admit(self) -> None:
        """Raise if a request would be refused, before its body is read.

        Raises
        ------
        Overloaded
            The queue is full.
        DeviceUnavailable
            The server is shutting down, or its device has failed.
        """
        if self.draining:
            self.engine.status._replace(draining=True).admit()
        self.engine.admit()

    async def run(self, request: ComputeRequest, transport: Transport) -> None:
        """Answer one request.

        Raises
        ------
        ServiceError
            The request was refused or has failed; nothing was sent yet.
        ClientDisconnected
            The client has disconnected.
        """
        large = (request.body_bytes or 0) > SMALL_REQUEST_BYTES
        admission = self.gate.try_admit(large=large)
        if admission is None:
            admission = await self._wait_in_line(request, transport, large=large)
        try:
            await self._run(request, transport, admission)
        except Overloaded:
            await self.gate.wait_to_refuse()
            raise
        except MemoryError:
            raise out_of_memory() from None

    async def _wait_in_line(
        self, request: ComputeRequest, transport: Transport, *, large: bool
    ) -> Admission:
        """Wait until the request is admitted; raise Overloaded if it is refused instead."""
        began_s = time.monotonic()
        with CancelScope(request.deadline) as scope:
            transport.watch(lambda: scope.cancel(ClientDisconnected()))
            try:
                admission = await self.gate.admit(large=large)
            finally:
                transport.watch(None)
        if admission is None:
            self.admit()
            waited_s = time.monotonic() - began_s
            raise Overloaded(
                "the queue is full, and so is the line of requests in front of it",
                retry_after_s=max(waited_s, _RETRY_AFTER_S),
            )
        return admission

    async def _run(
        self, request: ComputeRequest, transport: Transport, admission: Admission
    ) -> None:
        ticket, timings = None, request.timings
        try:
            self.admit()
            ticket = await self.engine.acquire_ticket(request.caller)
            with CancelScope() as scope:
                if request.counts_receiving and not transport.enforces_deadline:
                    scope.set_deadline(request.deadline)
                timings.enter("receive")
                key = await transport.head()
                execution = await self.prepare(
                    request,
                    transport.decode,
                    key=key,
                    body_lease=transport.body_lease,
                    inline=transport.decodes_inline,
                    ticket=ticket,
                )
                try:
                    if request.counts_receiving:
                        scope.set_deadline(request.deadline)
                    await transport.fill(execution)
                    timings.enter(None)
                    if not request.counts_receiving:
                        request.deadline = Deadline.after(request.deadline.allowed_s)
                        scope.set_deadline(request.deadline)
                    transport.watch(lambda: scope.cancel(ClientDisconnected()))
                    admission.arrived()
                    try:
                        await execution.compute()
                    finally:
                        transport.watch(None)
                    admission.end()
                    # The transport has its own limits on slow readers.
                    scope.set_deadline(None)
                    await transport.send(execution)
                finally:
                    await execution.end()
        finally:
            timings.enter(None)
            admission.end()
            if ticket is not None:
                ticket.release()

    async def prepare(
        self,
        request: ComputeRequest,
        decode: Callable[[], Decoded],
        *,
        key: Hashable | None = None,
        body_lease: Lease | None = None,
        inline: bool = False,
        ticket: Ticket | None = None,
    ) -> Execution:
        """Decode and validate a request, unless its key is cached, and lease its memory.

        The caller must `end` the execution. Raises as `run`.
        """
        operation, to_store = request.operation, dict[str, RegionPart]()
        assert operation is not None  # noqa: S101 - its head has been read
        entry = operation.name, key
        try:
            request.timings.enter("decode")
            prepared = self._prepared.get(entry)
            if prepared is not None:
                self._prepared.move_to_end(entry)
            else:
                decoded = await self.in_thread(decode, body_lease, inline=inline)
                fields, regions = decoded.fields, decoded.regions
                if uses_stored := "stored" in fields:
                    named = stored_fields(operation, fields)
                    fields, regions = await self._find_stored(request, named, fields, regions)
                validated, problem = await self.in_thread(
                    lambda: self._validate(operation, fields, decoded), body_lease, inline=inline
                )
                if validated.store:
                    specs = outputs_to_store(validated, problem, regions)
                    to_store = await call_hub(self.engine, TensorStore.allocate, specs)
                    outputs = {name: to_store[validated.store[name]] for name in validated.store}
                    regions = {**regions, **outputs}
                prepared = _prepared(validated, problem, regions, decoded)
                if key is not None and decoded.repeatable and not (uses_stored or to_store):
                    prepared = self._prepared[entry] = prepared._replace(texts={})
                    if len(self._prepared) > _MAX_PREPARED:
                        self._prepared.popitem(last=False)
            if prepared.timeout_s is not None:
                _apply_timeout(request, prepared.timeout_s)
            if ticket is not None:
                await ticket.charge(prepared.layout.size_bytes, prepared.layout.flops)
            request.timings.enter("queue")
            lease = await self.engine.reserve(prepared.layout.size_bytes, regions=prepared.parts)
        except BaseException:
            if to_store:
                await abandon(self.engine, to_store)
            raise
        return Execution(self.engine, request, prepared, lease, self.in_thread, to_store)

    def knows(self, operation: Operation, key: Hashable) -> bool:
        """Return whether a key is cached."""
        return (operation.name, key) in self._prepared

    async def in_thread(
        self, function: Callable[[], T], *leases: Lease | None, inline: bool = False
    ) -> T:
        """Call a function in a codec thread or, with ``inline``, directly.

        If the caller is cancelled, the thread still finishes, and ``leases`` are held until then.
        """
        if inline:
            return function()
        future = asyncio.get_running_loop().run_in_executor(self._codecs, function)
        # A cancelled caller does not retrieve it, and asyncio would log it with its traceback.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        for lease in leases:
            if lease is not None:
                lease.retain()
                future.add_done_callback(lease.release)
        return await asyncio.shield(future)

    def close(self) -> None:
        """Refuse new requests and end the codec threads."""
        self.draining = True
        self._codecs.shutdown(wait=False, cancel_futures=True)

    def _validate(
        self, operation: Operation, fields: Fields, decoded: Decoded
    ) -> tuple[Request, Problem]:
        validated = validate(operation.request, fields)
        problem = problem_from(operation.name, validated)
        for computed in problem.computes:
            self.limits.check(computed)
        if decoded.refuse is not None:
            decoded.refuse(validated, problem)
        return validated, problem

    async def _find_stored(
        self, request: ComputeRequest, named: Mapping[str, str], fields: Fields, regions: Parts
    ) -> tuple[Fields, Parts]:
        """Add the stored tensors that fields name to the fields, as blanks, and regions."""
        found = await call_hub(self.engine, TensorStore.find, request.owner, list(named.values()))
        blanks = {
            field: blank(found[name].spec.shape, found[name].spec.dtype, name=field)
            for field, name in named.items()
        }
        parts = {field: found[name].part for field, name in named.items()}
        return {**fields, **blanks}, {**regions, **parts}


def _apply_timeout(request: ComputeRequest, timeout_s: float) -> None:
    """Shorten the deadline to the time limit in the request, counted from its beginning."""
    if timeout_s < request.deadline.allowed_s:
        request.deadline = Deadline(request.timings.started_s + timeout_s, timeout_s)
        request.counts_receiving = True


def _prepared(
    request: Request, problem: Problem, regions: Parts, decoded: Decoded
) -> PreparedRequest:
    shared = region_parts(problem, regions) if regions else {}
    layout = tensor_layout_of(problem, tuple(shared))
    parts = tuple(shared.values())
    return PreparedRequest(request, layout, parts, decoded.timeout_s, decoded.transport_data, None)
