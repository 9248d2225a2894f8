"""The access log: one line per exchange, as text or as fields for a JSON formatter."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from convgrad_service.engine.telemetry.request_context import RequestContext

__all__ = ["ExchangeLine", "access", "log_exchange"]

access = logging.getLogger("convgrad.access")


def log_exchange(
    level: int, context: RequestContext, transport_fields: Mapping[str, str | int]
) -> None:
    """Log a finished exchange; ``transport_fields`` are the transport's own, such as the path."""
    access.log(level, ExchangeLine(context, transport_fields))


class ExchangeLine:
    """The message of an access-log record; `str` gives the text, `fields` the JSON fields."""

    __slots__ = ("_context", "_total_s", "_transport_fields")

    def __init__(self, context: RequestContext, transport_fields: Mapping[str, str | int]) -> None:
        self._context, self._transport_fields = context, transport_fields
        self._total_s = context.timings.total_s

    def fields(self) -> dict[str, str | int | float]:
        """Return the fields in the order of the text."""
        context, stages_s = self._context, self._context.timings.stages_s
        key, trace_id = context.owner, context.trace_id
        return {
            "request_id": context.request_id,
            **({"key": key} if key else {}),
            **self._transport_fields,
            "code": context.code,
            "received_bytes": context.received_bytes,
            "sent_bytes": context.sent_bytes,
            "client": context.client,
            **({"trace_id": trace_id} if trace_id else {}),
            "total_s": round(self._total_s, 6),
            **{f"{stage}_s": round(seconds, 6) for stage, seconds in stages_s.items()},
        }

    def __str__(self) -> str:
        # Not built from `fields`: this runs for every request and would slow small ones down.
        context = self._context
        key = f" key={context.owner}" if context.owner else ""
        fields = " ".join(
            [f"{name}={_quoted(value)}" for name, value in self._transport_fields.items()]
        )
        trace = f" trace_id={trace_id}" if (trace_id := context.trace_id) else ""
        stages = "".join(
            [f" {stage}_s={seconds:.6f}" for stage, seconds in context.timings.stages_s.items()]
        )
        return (
            f"request_id={_quoted(context.request_id)}{key} {fields} code={context.code} "
            f"received_bytes={context.received_bytes} sent_bytes={context.sent_bytes} "
            f"client={context.client}{trace} total_s={self._total_s:.6f}{stages}"
        )


def _quoted(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    # A path or an id with spaces or quotes must not be able to forge other fields of the line.
    return value if value.isprintable() and not set(' "=') & set(value) else repr(value)
