"""OpenTelemetry: a span for each request, under the caller's trace. Off unless asked for.

The caller's trace comes in the W3C header ``traceparent``; the span goes to a collector over OTLP,
from a thread of its own, in batches. What a request's stages took are attributes of its span.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from convgrad import _version
from convgrad_service.engine.telemetry.request_context import RequestContext

__all__ = ["Traces", "TracingUnavailable", "traces_to"]

SERVICE = "convgrad"


class TracingUnavailable(RuntimeError):
    """The packages that tracing needs are not installed."""


@lru_cache(maxsize=1)
def traces_to(endpoint: str) -> Traces:
    """The traces of this process, which all of its transports share."""
    return Traces(endpoint)


class Traces:
    """Sends spans to the OTLP collector at ``endpoint`` (``http://host:4318/v1/traces``).

    Raises:
        TracingUnavailable: convgrad[otel] is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError as missing:
            raise TracingUnavailable(
                f"tracing needs {missing.name}; expected convgrad[otel] to be installed"
            ) from missing
        resource = Resource.create(
            {"service.name": SERVICE, "service.version": _version.__version__}
        )
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE, _version.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._closed = False

    def record(self, context: RequestContext, transport: str) -> None:
        """The span of a request that has ended now; one of no operation (health, metadata) has
        none."""
        if context.operation is None or self._closed:
            return
        timings = context.timings
        ended_ns = time.time_ns()
        attributes: dict[str, Any] = {
            "rpc.system": transport,
            "convgrad.request_id": context.request_id,
            "convgrad.code": context.code,
            "convgrad.received_bytes": context.received_bytes,
            "convgrad.sent_bytes": context.sent_bytes,
            **{f"convgrad.{stage}_s": spent for stage, spent in timings.stages_s.items()},
        }
        if context.owner:
            attributes["convgrad.key"] = context.owner
        span = self._tracer.start_span(
            context.operation,
            context=self._propagator.extract(context.trace),
            kind=self._server,
            start_time=ended_ns - round(timings.total_s * 1e9),
            attributes=attributes,
        )
        if context.code != "ok":
            span.set_status(self._error, context.code)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what waits, and end; once, however many transports share this."""
        if not self._closed:
            self._closed = True
            self._provider.shutdown()
