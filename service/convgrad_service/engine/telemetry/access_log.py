"""A log line for every exchange, over any transport: text, or fields for whoever writes JSON."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from convgrad_service.engine.telemetry.request_context import RequestContext

__all__ = ["ExchangeLine", "access", "log_exchange"]

access = logging.getLogger("convgrad.access")


def log_exchange(level: int, context: RequestContext, asked: Mapping[str, str | int]) -> None:
    """Log an exchange that has ended; ``asked`` are the transport's own fields."""
    access.log(level, ExchangeLine(context, asked))


class ExchangeLine:
    """The message of such a log record."""

    __slots__ = ("_asked", "_context", "_total_s")

    def __init__(self, context: RequestContext, asked: Mapping[str, str | int]) -> None:
        self._context, self._asked = context, asked
        self._total_s = context.timings.total_s

    def fields(self) -> dict[str, str | int | float]:
        """By name, in the order of the text."""
        context, stages_s = self._context, self._context.timings.stages_s
        key, trace_id = context.owner, context.trace_id
        return {
            "request_id": context.request_id,
            **({"key": key} if key else {}),
            **self._asked,
            "code": context.code,
            "received_bytes": context.received_bytes,
            "sent_bytes": context.sent_bytes,
            "client": context.client,
            **({"trace_id": trace_id} if trace_id else {}),
            "total_s": round(self._total_s, 6),
            **{f"{stage}_s": round(seconds, 6) for stage, seconds in stages_s.items()},
        }

    def __str__(self) -> str:
        """``name=value`` pairs."""
        # A line a request: written out, because a small request notices anything slower.
        context = self._context
        key = f" key={context.owner}" if context.owner else ""
        asked = " ".join([f"{name}={_shown(value)}" for name, value in self._asked.items()])
        trace = f" trace_id={trace_id}" if (trace_id := context.trace_id) else ""
        stages = "".join(
            [f" {stage}_s={seconds:.6f}" for stage, seconds in context.timings.stages_s.items()]
        )
        return (
            f"request_id={_shown(context.request_id)}{key} {asked} code={context.code} "
            f"received_bytes={context.received_bytes} sent_bytes={context.sent_bytes} "
            f"client={context.client}{trace} total_s={self._total_s:.6f}{stages}"
        )


def _shown(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    # A path or an id with spaces or quotes must not be able to forge other fields of the line.
    return value if value.isprintable() and not set(' "=') & set(value) else repr(value)
