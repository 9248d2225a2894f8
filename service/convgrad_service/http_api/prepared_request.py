"""A small request like one before it, over HTTP: from its head to its answer in one function.

What is new to the server, large, still on its way or in any way unusual is not for here:
`try_answer` says so before anything is done, and the endpoint answers it from the beginning.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, Protocol

from starlette.types import Scope

from convgrad.contract import Operation, Report
from convgrad_service.engine.admitted import Known, ResponseTemplate
from convgrad_service.engine.deadline import CancelScope, Deadline
from convgrad_service.engine.pipeline import SMALL_BYTES, Pipeline
from convgrad_service.engine.prepared_request import PreparedRequest, Span
from convgrad_service.engine.request import ComputeRequest
from convgrad_service.engine.scheduling.quotas import NO_LIMITS
from convgrad_service.http_api.connection import CONNECTION, Connection
from convgrad_service.http_api.context import RequestContext, told_headers
from convgrad_service.http_api.middleware import ClientGone
from convgrad_service.http_api.response import requested_timeout_s

__all__ = ["Asked", "Form", "Given", "Part", "PreparedRequests"]

Given = Mapping[bytes, bytes]
Part = bytes | memoryview


class Asked(NamedTuple):
    """What a body asks for: its `ComputeRequest.key`, where its data begins, and its id."""

    key: Hashable
    data_at: int
    id: bytes = b""


class Form(Protocol):
    """One form of bodies in which small requests may be asked and answered at once."""

    def asked(self, headers: Given, body: bytearray, owner: str) -> Asked | None:
        """What is asked, or None where that is not for here."""
        ...

    def spans(self, known: Known) -> Iterable[Span]:
        """Which bytes of the data are which input's."""
        ...

    def timeout_s(self, known: Known) -> float | None:
        """The time that the body itself allows."""
        ...

    def words(self, known: Known, report: Report) -> ResponseTemplate:
        """An answer's head, cut where it tells the seconds."""
        ...

    def answer(
        self, words: ResponseTemplate, compute_s: bytes, asked: Asked, work: PreparedRequest
    ) -> tuple[bytes, list[Part]]:
        """The lines of headers that are its own, and the body in parts."""
        ...


class PreparedRequests:
    """Answers those of one operation in one form."""

    def __init__(
        self, operation: Operation, form: Form, pipeline: Pipeline, longest_s: float
    ) -> None:
        self._operation, self._form = operation, form
        self._plane, self._longest_s = pipeline, longest_s

    async def try_answer(self, scope: Scope, context: RequestContext) -> bool:
        """Whether it was one, and is answered; if not, nothing has been done.

        Raises a ServiceError if it was one, and failed.
        """
        if context.caller.limits != NO_LIMITS:
            return False  # what it may is counted in the hub, which takes a question there and back
        connection: Connection | None = scope.get(CONNECTION)
        body = None if connection is None else connection.whole_body()
        headers: Given = dict(scope["headers"])
        if (
            connection is None
            or body is None
            or len(body) > SMALL_BYTES
            or len(headers) < len(scope["headers"])  # one of them twice
            or b"content-encoding" in headers
        ):
            return False
        form, plane, timings = self._form, self._plane, context.timings
        asked = form.asked(headers, body, context.owner)
        if asked is None:
            return False
        context.operation = self._operation.name
        deadline = Deadline.after(min(_timeout_s(headers), self._longest_s))
        call = ComputeRequest(
            self._operation, deadline, timings, key=asked.key, owner=context.owner
        )
        work = plane.at_once(call)
        if work is None:
            return False
        allowed_s = form.timeout_s(work.known)
        if allowed_s is not None and allowed_s < deadline.allowed_s:
            call.deadline = Deadline(timings.started_s + allowed_s, allowed_s)
        try:
            plane.admit()
            with memoryview(body) as view:
                work.fill(view[asked.data_at :], form.spans)
            timings.add("receive", 0.0)  # it has come, with its head
            timings.add("decode", timings.total_s)
            context.received_bytes = len(body)
            finished = work.computed_here()
            if finished is None:
                with CancelScope(call.deadline) as leash:
                    connection.watch(lambda: leash.cut(ClientGone()))
                    try:
                        finished = await work.computed()
                    finally:
                        connection.watch(None)
            with timings.stage("encode"):
                words = work.words(finished, form.words)
                compute_s = repr(finished.compute_s).encode()
                lines, answer = form.answer(words, compute_s, asked, work)
            context.status, context.sent_bytes = 200, sum(map(len, answer))
            told = (*told_headers(context), (b"content-length", b"%d" % context.sent_bytes))
            lines += b"".join([b"%s: %s\r\n" % header for header in told])
            await connection.answer(lines, answer)
        finally:
            work.lease.release()
        return True


def _timeout_s(headers: Given) -> float:
    given = headers.get(b"x-request-timeout")
    if given is None:
        return math.inf
    return requested_timeout_s(given.decode("latin-1")) or math.inf
