"""The way of one request, the same for every transport.

    decode → validate → Problem → limits → memory → queue → backend → report → encode

A transport brings two functions: one that turns its bytes into named fields, one that turns named
arrays into its bytes. Both run in threads, as does the backend: the event loop only waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from convgrad.contract import Operation, Report, Request, validate
from convgrad.errors import DeviceOutOfMemory, DeviceUnavailable
from convgrad_service.backends.base import Backend, Outcome
from convgrad_service.engine.deadline import Deadline
from convgrad_service.engine.limits import Limits
from convgrad_service.engine.memory import MemoryBudget, Reservation
from convgrad_service.engine.queue import ComputeQueue, Ticket
from convgrad_service.engine.timing import Timings
from convgrad_service.problems import Problem, problem_from

__all__ = ["Call", "Dataplane", "Result"]

T = TypeVar("T")
Fields = Mapping[str, Any]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """What a transport encodes: the request it answers, the arrays, and how they came to be."""

    request: Request
    outputs: Arrays
    report: Report


@dataclass(frozen=True, slots=True)
class Call:
    """One request as its transport hands it over.

    ``reservation`` already covers the body; ``decoded_bytes`` is what decoding it will allocate,
    and ``encoded_share`` what encoding allocates for each byte of output (0 if it copies nothing).
    ``refuse``, where there is one, raises where the transport could not encode the answer.
    """

    operation: Operation
    reservation: Reservation
    deadline: Deadline
    timings: Timings
    decoded_bytes: int = 0
    encoded_share: float = 0.0
    refuse: Callable[[Request, Problem], None] | None = None


class Dataplane:
    """Takes calls from any transport to a backend and back."""

    def __init__(
        self,
        backend: Backend,
        *,
        limits: Limits,
        queue: ComputeQueue,
        memory: MemoryBudget,
        codec_threads: int = 2,
    ) -> None:
        self.backend = backend
        self.limits = limits
        self.queue = queue
        self.memory = memory
        self.draining = False
        self._codecs = ThreadPoolExecutor(codec_threads, thread_name_prefix="codec")

    def require_ready(self) -> None:
        """Return if new work is taken.

        Raises
        ------
        DeviceUnavailable
            The server is about to stop, or its device has failed for good.
        """
        if self.draining:
            raise DeviceUnavailable("the server is shutting down", retry_after_s=5.0)
        if self.backend.fault is not None:
            raise DeviceUnavailable(f"the device has failed: {self.backend.fault}")

    def admit(self) -> None:
        """Refuse, before its body is read, a request that could not be queued now.

        Raises
        ------
        Overloaded
            As many problems wait as may.
        DeviceUnavailable
            The server is about to stop, or its device has failed for good.
        """
        self.require_ready()
        self.queue.require_room()

    async def answer(
        self, call: Call, decode: Callable[[], Fields], encode: Callable[[Result], T]
    ) -> T:
        """Compute one request; ``decode`` and ``encode`` are called in threads.

        If the caller goes away (the task is cancelled) or the deadline passes, waiting work is
        dropped and running work is asked to stop.

        Raises
        ------
        ServiceError
            Any of the table that knows no transport.
        """
        async with call.deadline.enforced(), _memory_errors_named():
            with call.timings.stage("decode"):
                call.reservation.grow(call.decoded_bytes)
                request, problem = await self._codec(call, self._prepare, call, decode)
            output_bytes = sum(spec.size_bytes for spec in problem.outputs.values())
            call.reservation.grow(round(output_bytes * (1 + call.encoded_share)))
            outcome = await self._compute(call, problem, request.tensors())
            report = Report(
                backend=self.backend.name,
                kernel=outcome.kernel,
                flops=problem.flops,
                bytes=problem.compulsory_bytes,
                compute_s=outcome.compute_s,
                pieces=outcome.pieces,
                workspace_bytes=outcome.workspace_bytes,
            )
            with call.timings.stage("encode"):
                result = Result(request, outcome.outputs, report)
                return await self._codec(call, encode, result)

    def close(self) -> None:
        """Drop what waits and let the threads end."""
        self.draining = True
        self.queue.close()
        self._codecs.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, call: Call, decode: Callable[[], Fields]) -> tuple[Request, Problem]:
        request = validate(call.operation.request, decode())
        problem = problem_from(call.operation.name, request)
        self.limits.check(problem)
        if call.refuse is not None:
            call.refuse(request, problem)
        return request, problem

    async def _compute(self, call: Call, problem: Problem, tensors: Arrays) -> Outcome:
        def work(cancelled: threading.Event) -> Outcome:
            return self.backend.run(problem, tensors, cancelled)

        ticket: Ticket[Outcome] = self.queue.submit(
            work, cost=self.queue.pace.cost(problem), deadline_s=call.deadline.at_s
        )
        _hold_until_done(call.reservation, ticket.future)
        submitted_s = time.monotonic()
        moved_s = 0.0
        try:
            outcome = await asyncio.wrap_future(ticket.future)
            moved_s = outcome.upload_s + outcome.download_s
            if moved_s:
                call.timings.add("upload", outcome.upload_s)
                call.timings.add("download", outcome.download_s)
        except asyncio.CancelledError:
            self.queue.cancel(ticket)
            raise
        finally:
            spent_s = time.monotonic() - submitted_s
            # Of a problem that is given up the start is known all the same, if it had one.
            waited_s = spent_s if ticket.waited_s is None else min(ticket.waited_s, spent_s)
            call.timings.add("queue", waited_s)
            call.timings.add("compute", spent_s - waited_s - moved_s)
        return outcome

    async def _codec(self, call: Call, function: Callable[..., T], *arguments: Any) -> T:
        future = self._codecs.submit(function, *arguments)
        _hold_until_done(call.reservation, future)
        return await asyncio.wrap_future(future)


@asynccontextmanager
async def _memory_errors_named() -> AsyncIterator[None]:
    # The budget bounds what requests hold; that the machine has it to give is another matter.
    try:
        yield
    except MemoryError:
        raise DeviceOutOfMemory(
            "the server could not allocate the memory for this request", retry_after_s=1.0
        ) from None


def _hold_until_done(reservation: Reservation, future: Future[Any]) -> None:
    # A thread goes on after its caller has given up, and so does the memory it works on.
    reservation.retain()
    future.add_done_callback(lambda _: reservation.release())
