"""``POST /<operation>``: the transport of every operation of the contract."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache

from convgrad_service.engine.execution import Execution
from convgrad_service.engine.request import SMALL_BYTES, Decoded, Result
from convgrad_service.http_api.codecs import ANSWER_FORMS, BODY_FORMS, AnswerForm, BodyForm
from convgrad_service.http_api.negotiation import choose_accepted, match_content_type
from convgrad_service.http_api.transport import BodyTransport

__all__ = ["OperationTransport"]


class OperationTransport(BodyTransport):
    """A body of any `BodyForm`, and an answer of any `AnswerForm`."""

    def _choose_forms(self, content_type: str | None, accept: str) -> BodyForm:
        came_in, self._form_out = _forms(content_type, accept)
        self.streams = self._form_out.streams
        return came_in

    async def head(self) -> Hashable | None:
        key = await super().head()
        return None if key is None else (key, self._form_out.media_type)

    def decode(self) -> Decoded:
        return replace(super().decode(), refuse=self._form_out.refuse)

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


@lru_cache(maxsize=256)
def _forms(content_type: str | None, accept: str) -> tuple[BodyForm, AnswerForm]:
    came_in = BODY_FORMS[match_content_type(content_type, tuple(BODY_FORMS))]
    return came_in, ANSWER_FORMS[choose_accepted(accept, tuple(ANSWER_FORMS), came_in.answered)]
