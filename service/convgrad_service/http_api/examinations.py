"""``/verify``, ``/time`` and ``/plan``: examine operations, and answer with a JSON report."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from convgrad.contract import Operation, Request
from convgrad.contract.base import parse_field, refuse_unknown
from convgrad.contract.verification import Earlier
from convgrad.errors import MalformedRequest, Overloaded, ProblemTooLarge, ServiceError
from convgrad.wire.sentences import shown
from convgrad.wire.strict_json import dumps
from convgrad_service.engine.engine import call_hub
from convgrad_service.engine.execution import Execution, Result
from convgrad_service.engine.request import Decoded, blank
from convgrad_service.engine.scheduling.quotas import Caller, KeyLimits, Ticket
from convgrad_service.engine.scheduling.task import JobHandle
from convgrad_service.engine.submissions import Submissions
from convgrad_service.http_api.codecs import JSON, OperationTransport
from convgrad_service.http_api.content_types import choose_accepted
from convgrad_service.http_api.problem_details import problem_details
from convgrad_service.http_api.transport import Content, HttpTransport
from convgrad_service.oip.fields import SharedMemory
from convgrad_service.oip.request import Region
from convgrad_service.problems import Problem
from convgrad_service.problems.examinations import TimeIt, Verify

EVENT_STREAM = "text/event-stream"
# How often a waiting client is sent its queue position, if that has changed.
_POSITION_S = 0.2
# How often it is sent something, so that no proxy closes the connection.
_KEEP_ALIVE_S = 10.0
# Bytes per element of a sample: values, magnitudes, their operands, and what is compared.
_REFERENCE_BYTES = 128
_JSON_HEADERS = [(b"content-type", b"application/json"), (b"vary", b"accept")]


class _ExaminationTransport(OperationTransport):
    """A body of any `BodyForm`, and an answer in JSON."""

    decodes_inline = False  # parsing a layer's notation takes a thread

    def answers(self) -> tuple[str, ...]:
        return (JSON,)

    async def head(self) -> None:
        await super().head()
        # No key: the answer depends on more than the head.

    def refuse(self, request: Request, problem: Problem) -> None:
        """Refuse a problem that would take too long, before anything is computed."""

    async def send(self, execution: Execution, result: Result) -> None:
        content = json.loads(result.job_result.words)
        await self.respond(_JSON_HEADERS, [dumps(content["answer"])])


class VerifyTransport(_ExaminationTransport):
    """``POST /verify/<operation>``."""

    def decode(self) -> Decoded:
        decoded = super().decode()
        named = "shared_memory"
        if named not in decoded.fields:
            return decoded
        shared = parse_field(self.operation.request, named, decoded.fields[named])
        for name in shared:
            if name not in self.operation.tensors or name in decoded.fields:
                raise MalformedRequest(
                    f"{named} names {shown(name)}; expected a tensor that is not also sent: "
                    f"{', '.join(self.operation.tensors)}"
                )
        blanks = {name: blank(each.shape, each.dtype, name=name) for name, each in shared.items()}
        regions = {
            name: Region(each.region, each.offset, each.size_bytes) for name, each in shared.items()
        }
        memory = SharedMemory(self.pipeline.engine, self._settings)
        return replace(
            decoded,
            fields={**decoded.fields, **blanks},
            regions=memory.parts(self.owner, regions),
        )

    def refuse(self, request: Request, problem: Problem) -> None:
        assert isinstance(problem, Verify)  # noqa: S101
        needed = _REFERENCE_BYTES * problem.sample_elements
        if needed > self.pipeline.engine.limit_bytes:
            raise ProblemTooLarge(
                f"the float64 reference of one sample takes some {needed:,} bytes, and this server "
                f"has {self.pipeline.engine.limit_bytes:,}; `convgrad.check.bounded` verifies on "
                "your own machine"
            )
        most, flops = self._settings.max_verify_flops, problem.flops
        if flops > most:
            raise ProblemTooLarge(
                f"the float64 reference of this problem takes {flops:.3g} floating-point "
                f"operations, and this server allows {most:.3g} for one (CONVGRAD_MAX_VERIFY_FLOPS)"
                f"{_smaller(problem, most / flops)}; `convgrad.check.bounded` verifies on your own "
                "machine"
            )

    async def send(self, execution: Execution, result: Result) -> None:
        content = json.loads(result.job_result.words)
        answer = content["answer"]
        results = {name: (each[0], tuple(each[1])) for name, each in content["results"].items()}
        request_id = self._context.request_id
        earlier = await call_hub(
            self.pipeline.engine, Submissions.add, self.owner, content["key"], request_id, results
        )
        for name, found in earlier.items():
            described = Earlier(
                equal=found[0],
                request_id=found[1],
                seconds_ago=found[2],
                first_difference=found[3],
            )
            answer["outputs"][name]["bits"]["earlier"] = described.json_values()
        await self.respond(_JSON_HEADERS, [dumps(answer)])


def _smaller(problem: Verify, share: float) -> str:
    """Suggest a smaller problem that would fit: one with fewer samples."""
    fits = int(problem.batch * share)
    return f"; a batch of {fits} instead of {problem.batch} would fit" if fits >= 1 else ""


class TimeTransport(_ExaminationTransport):
    """``POST /time/<operation>``, answered at once or with events."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tickets: list[Ticket] = []
        self._timed: Any = None

    def answers(self) -> tuple[str, ...]:
        # Events have no Content-Length, so they are sent in chunks, which HTTP/1.0 does not have.
        return (JSON,) if self._scope["http_version"] == "1.0" else (JSON, EVENT_STREAM)

    async def head(self) -> None:
        await self._enter()
        await super().head()

    async def _enter(self) -> None:
        """Count this timing against the limits of the server and of its key."""
        settings = self._settings
        # Key names contain no slash, so this entry is distinct from the key's other usage.
        quotas = [("/timings", settings.max_timings, "")]
        if self.owner:
            quotas.append((f"{self.owner}/timings", settings.key_max_timings, " of this key's"))
        for name, most, whose in quotas:
            try:
                caller = Caller(name, KeyLimits(inflight=most))
                ticket = await self.pipeline.engine.acquire_ticket(caller)
            except Overloaded:
                raise Overloaded(
                    f"{most}{whose} timings are queued or running, the maximum", retry_after_s=5.0
                ) from None
            self._tickets.append(ticket)

    def refuse(self, request: Request, problem: Problem) -> None:
        assert isinstance(problem, TimeIt)  # noqa: S101
        most = self._settings.timing_budget_s
        if problem.budget_s > most:
            raise MalformedRequest(
                f"budget_s is {problem.budget_s:g}; this server times for at most {most:g} s "
                "(CONVGRAD_TIMING_BUDGET_S)"
            )

    def decode(self) -> Decoded:
        decoded = super().decode()
        # The default budget is the server's limit.
        fields = {"budget_s": self._settings.timing_budget_s, **decoded.fields}
        return replace(decoded, fields=fields)

    async def send(self, execution: Execution, result: Result) -> None:
        if self.answer == EVENT_STREAM:
            self._timed = json.loads(result.job_result.words)["answer"]
        else:
            await super().send(execution, result)

    async def run(self) -> None:
        if self.answer != EVENT_STREAM:
            await super().run()
            return
        queued: asyncio.Future[JobHandle] = asyncio.get_running_loop().create_future()
        self.request.submitted = queued.set_result
        running = asyncio.ensure_future(super().run())
        try:
            either: list[asyncio.Future[Any]] = [running, queued]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if queued.done():
                await self._send_events(queued.result(), running)
            else:
                await running  # which raises: the request was refused
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _send_events(self, job: JobHandle, running: asyncio.Future[None]) -> None:
        """Answer with the job's position in the queue, whenever it changes, and then its result.

        The answer has begun, so a ServiceError is an event too.
        """
        headers = [
            (b"content-type", EVENT_STREAM.encode()),
            (b"cache-control", b"no-store"),
            (b"vary", b"accept"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 202, "headers": headers})
        place: int | None = -1  # the one sent last; None while running
        silent_since_s = time.monotonic()
        while not running.done():
            position = await self.pipeline.engine.queue_position(job)
            if position != place:
                if position is None:
                    await self._event("running", {})
                else:
                    await self._event("queued", {"position": position})
                place, silent_since_s = position, time.monotonic()
            elif time.monotonic() - silent_since_s > _KEEP_ALIVE_S:
                await self._more(b": waiting\n\n")
                silent_since_s = time.monotonic()
            await asyncio.wait([running], timeout=_POSITION_S)
        try:
            running.result()
        except ServiceError as error:
            self._context.code = error.code
            _, _, body = problem_details(error, self._context.request_id)
            await self._event("error", json.loads(body))
        else:
            if place is not None:  # started and finished since the last check
                await self._event("running", {})
            await self._event("result", self._timed)
        await self._more(b"", more=False)

    async def _event(self, name: str, data: Any) -> None:
        await self._more(b"event: " + name.encode() + b"\ndata: " + dumps(data) + b"\n\n")

    async def _more(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.release()
        super().close()


class PlanTransport(HttpTransport):
    """``GET /plan/<operation>``, with the fields in the query."""

    decodes_inline, reads_query = False, True

    async def head(self) -> None:
        choose_accepted(self.headers.get(b"accept", ""), (JSON,), JSON)

    def decode(self) -> Decoded:
        query: bytes = self._scope["query_string"]
        return Decoded(query_fields(query, self.operation), notes=Content())

    async def send(self, execution: Execution, result: Result) -> None:
        await self.respond(_JSON_HEADERS, [dumps(json.loads(result.job_result.words)["answer"])])


def query_fields(query: bytes, operation: Operation) -> dict[str, Any]:
    """Return a request's fields from a query; values are JSON, or else plain text.

    Raises
    ------
    MalformedRequest
        The query cannot be parsed, or has a field without a name or twice.
    """
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, max_num_fields=64, errors="strict"
        )
    except ValueError:
        raise MalformedRequest("the query cannot be read") from None
    refuse_unknown(operation.request, (name for name, _ in pairs))
    fields: dict[str, Any] = {}
    for name, text in pairs:
        if name in fields:
            raise MalformedRequest(f'the query has "{name}" twice')
        fields[name] = text if name == "layer" else _value(text)
    return fields


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
