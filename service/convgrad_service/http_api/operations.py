"""``POST /<operation>``: one endpoint for every operation of the contract."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

from starlette.types import Receive, Scope, Send

from convgrad.contract import Operation
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.memory.lease import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, Decoded, Result
from convgrad_service.http_api.codecs import ANSWER_FORMS, BODY_FORMS, AnswerForm, BodyForm
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.transport import HttpTransport
from convgrad_service.server.settings import Settings

__all__ = ["OperationEndpoint"]


class OperationEndpoint:
    """An ASGI application that answers requests for one operation."""

    def __init__(self, operation: Operation, pipeline: Pipeline, settings: Settings) -> None:
        self.operation, self.pipeline, self.settings = operation, pipeline, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        transport = _OperationTransport(
            self.operation, self.pipeline, self.settings, scope, receive, send
        )
        try:
            await self.pipeline.run(transport.request, transport)
        finally:
            transport.close()


class _OperationTransport(HttpTransport):
    """See `Transport`: a body of any `BodyForm`, and an answer of any `AnswerForm`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        headers = self.headers
        content_type = headers.get(b"content-type")
        self._form_in, self._form_out = _forms(content_type, headers.get(b"accept", ""))
        self.streams = self._form_out.streams
        self._reader = self._form_in.reader(content_type or "")

    async def head(self) -> Hashable | None:
        self._body = self.body(getattr(self._settings, self._form_in.limit))
        key = await self._reader.head(self._body, self.pipeline)
        return None if key is None else (key, self._form_out.media_type)

    @property
    def body_lease(self) -> Lease | None:  # type: ignore[override]
        return self._reader.body_lease

    @property
    def decodes_inline(self) -> bool:  # type: ignore[override]
        return self._reader.decodes_inline

    def decode(self) -> Decoded:
        fields, notes = self._reader.fields(self.operation)
        return Decoded(fields, refuse=self._form_out.refuse, notes=notes)

    async def fill(self, execution: Execution) -> None:
        await self._reader.fill(self._body, execution, self.request.timings)

    async def send(self, execution: Execution, result: Result) -> None:
        form = self._form_out
        with self.request.timings.stage("encode"):
            small = sum(tensor.spec.size_bytes for tensor in execution.layout.outputs)
            chunks = await self.pipeline.in_thread(
                lambda: form.encode(execution, result),
                execution.lease,
                inline=small <= SMALL_BYTES,
            )
        await self.respond([*form.headers(result), (b"vary", b"accept")], chunks)

    def close(self) -> None:
        """Release the body's memory."""
        self._reader.close()


@lru_cache(maxsize=256)
def _forms(content_type: str | None, accept: str) -> tuple[BodyForm, AnswerForm]:
    came_in = BODY_FORMS[match_content_type(content_type, tuple(BODY_FORMS))]
    return came_in, ANSWER_FORMS[choose_accepted(accept, tuple(ANSWER_FORMS), came_in.answered)]
