"""``/verify``, ``/time`` and ``/plan``: examine operations, and answer with a JSON report."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Hashable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl

from convgrad.contract import Operation, Request
from convgrad.contract.base import parse_field, refuse_unknown
from convgrad.contract.verification import Earlier
from convgrad.errors import MalformedRequest, Overloaded, ProblemTooLarge, ServiceError
from convgrad.wire.sentences import shown
from convgrad_service.engine.engine import call_hub
from convgrad_service.engine.execution import Execution, Result
from convgrad_service.engine.request import Decoded, blank
from convgrad_service.engine.scheduling.quotas import Caller, KeyLimits, Ticket
from convgrad_service.engine.scheduling.task import JobHandle
from convgrad_service.engine.submissions import Submissions
from convgrad_service.http_api.codecs import JSON, BodyForm, BodyTransport
from convgrad_service.http_api.middleware import context_of
from convgrad_service.http_api.problem_details import problem_details
from convgrad_service.http_api.transport import HttpTransport, choose_accepted
from convgrad_service.long_json import dumps
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


class _ExaminationTransport(BodyTransport):
    """A body of any `BodyForm`, and an answer in JSON."""

    decodes_inline = False  # parsing a layer's notation takes a thread

    def _choose_forms(self, content_type: str | None, accept: str) -> BodyForm:
        form = super()._choose_forms(content_type, accept)
        self._choose_answer(accept)
        return form

    def _choose_answer(self, accept: str) -> None:
        choose_accepted(accept, (JSON,), JSON)

    async def head(self) -> Hashable | None:
        await super().head()
        return None  # not cacheable: the answer depends on more than the head

    def decode(self) -> Decoded:
        return replace(super().decode(), refuse=self._refuse, repeatable=False)

    def _refuse(self, request: Request, problem: Problem) -> None:
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

    def _refuse(self, request: Request, problem: Problem) -> None:
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
            answer["outputs"][name]["bits"]["earlier"] = described.model_dump(mode="json")
        await self.respond(_JSON_HEADERS, [dumps(answer)])


def _smaller(problem: Verify, share: float) -> str:
    """Suggest a smaller problem that would fit: one with fewer samples."""
    fits = int(problem.batch * share)
    return f"; a batch of {fits} instead of {problem.batch} would fit" if fits >= 1 else ""


class TimeTransport(_ExaminationTransport):
    """``POST /time/<operation>``, answered at once or with events."""

    _has_begun = False
    # Whether the answer's status has been sent: what goes wrong from then on is an event.

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tickets: list[Ticket] = []
        self._sending_events: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        # The queue position last sent; None while running.
        self._place: int | None = -1
        if self._streams_events:
            self.request.submitted = self._submitted

    def _choose_answer(self, accept: str) -> None:
        # Events have no Content-Length, so they are sent in chunks, which HTTP/1.0 does not have.
        forms = (JSON,) if self._scope["http_version"] == "1.0" else (JSON, EVENT_STREAM)
        self._streams_events = choose_accepted(accept, forms, JSON) == EVENT_STREAM

    async def head(self) -> Hashable | None:
        await self._enter()
        return await super().head()

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

    def _refuse(self, request: Request, problem: Problem) -> None:
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

    def _submitted(self, job: JobHandle) -> None:
        self._has_begun = True
        self._sending_events = asyncio.ensure_future(self._send_events(job))

    async def _send_events(self, job: JobHandle) -> None:
        """Begin the answer, and send the job's queue position whenever it changes."""
        try:
            await self._send(
                {
                    "type": "http.response.start",
                    "status": 202,
                    "headers": [
                        (b"content-type", EVENT_STREAM.encode()),
                        (b"cache-control", b"no-store"),
                        (b"vary", b"accept"),
                        (b"x-accel-buffering", b"no"),
                    ],
                }
            )
        finally:
            self._begun.set()
        loop = asyncio.get_running_loop()
        silent_since_s = loop.time()
        while True:
            position = await self.pipeline.engine.queue_position(job)
            if position != self._place:
                if position is None:
                    await self._event("running", {})
                else:
                    await self._event("queued", {"position": position})
                self._place, silent_since_s = position, loop.time()
            elif loop.time() - silent_since_s > _KEEP_ALIVE_S:
                await self._more(b": waiting\n\n")
                silent_since_s = loop.time()
            await asyncio.sleep(_POSITION_S)

    async def _event(self, name: str, data: Any) -> None:
        await self._more(b"event: " + name.encode() + b"\ndata: " + dumps(data) + b"\n\n")

    async def _more(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _stop_events(self) -> None:
        if self._sending_events is not None:
            await self._begun.wait()  # events need a status first
            self._sending_events.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sending_events
            self._sending_events = None

    async def send(self, execution: Execution, result: Result) -> None:
        if not self._streams_events:
            await super().send(execution, result)
            return
        await self._stop_events()
        if self._place is not None:  # started and finished since the last check
            await self._event("running", {})
        await self._event("result", json.loads(result.job_result.words)["answer"])
        await self._more(b"", more=False)

    async def fail(self, error: ServiceError) -> None:
        """Raise an error, or report it as an event once the answer has begun."""
        if not self._has_begun:
            raise error
        await self._stop_events()
        context = context_of(self._scope)
        context.code = error.code
        _, _, body = problem_details(error, context.request_id)
        await self._event("error", json.loads(body))
        await self._more(b"", more=False)

    def close(self) -> None:
        if self._sending_events is not None:
            self._sending_events.cancel()
        for ticket in self._tickets:
            ticket.release()
        super().close()


class PlanTransport(HttpTransport):
    """``GET /plan/<operation>``, with the fields in the query."""

    decodes_inline, reads_query = False, True

    async def head(self) -> Hashable | None:
        accept = self.headers.get(b"accept", "")
        choose_accepted(accept, (JSON,), JSON)
        self._query: bytes = self._scope.get("query_string", b"")
        return None

    def decode(self) -> Decoded:
        return Decoded(query_fields(self._query, self.operation), repeatable=False)

    async def fill(self, execution: Execution) -> None:
        await execution.fill({})

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
