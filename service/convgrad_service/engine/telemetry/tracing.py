"""OpenTelemetry tracing: a span per request, in the caller's trace, with a child span per stage.

Off by default. The caller's trace comes in the W3C header ``traceparent``; spans are exported over
OTLP in batches, by a background thread. The caller decides whether its trace is sampled; requests
without a trace follow OpenTelemetry's ``OTEL_TRACES_SAMPLER``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from convgrad import _version
from convgrad_service.engine.telemetry.record import RequestContext

SERVICE = "convgrad"
# How long the end of a server waits for a collector to take the last spans.
_FLUSH_S = 3.0


class TracingUnavailable(RuntimeError):
    """The packages that tracing needs are not installed."""


@lru_cache(maxsize=1)
def traces_to(endpoint: str) -> Traces:
    """Return the exporter of this process, which all of its transports share."""
    return Traces(endpoint)


class Traces:
    """Exports spans to the OTLP collector at ``endpoint`` (``http://host:4318/v1/traces``).

    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` apply.

    Raises
    ------
    TracingUnavailable
        convgrad[otel] is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )
        except ImportError as missing:
            raise TracingUnavailable(
                f"tracing needs {missing.name}; expected convgrad[otel] to be installed"
            ) from missing
        ours = Resource({"service.name": SERVICE, "service.version": _version.__version__})
        resource = Resource.create(ours.merge(OTELResourceDetector().detect()).attributes)
        self._users = 0
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE, _version.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._within = set_span_in_context

    def begin(self, context: RequestContext) -> None:
        """Start a request's span early, so that its response and log lines can name it."""
        parent = self._propagator.extract(context.trace)
        context.span = self._tracer.start_span(
            "request", context=parent, kind=self._server, start_time=time.time_ns()
        )
        if context.span.is_recording():
            context.timings.intervals = []

    def end(
        self, context: RequestContext, name: str, attributes: Mapping[str, Any], *, failed: bool
    ) -> None:
        """End the span and add one per stage; spans without an operation are dropped.

        ``failed`` marks failures that are the server's fault.
        """
        span, intervals = context.span, context.timings.intervals
        if span is None or intervals is None or context.operation is None:
            return
        began_ns, timings = span.start_time, context.timings
        span.update_name(name)
        span.set_attributes(attributes)
        span.set_attributes(
            {
                "convgrad.operation": context.operation,
                "convgrad.request_id": context.request_id,
                "convgrad.flops": timings.flops,
                **({"convgrad.key": context.owner} if context.owner else {}),
            }
        )
        if context.code != "ok":
            span.set_attribute("error.type", context.code)
        if failed:
            span.set_status(self._error, context.code)
        within = self._within(span)
        for stage, stage_began_s, seconds in intervals:
            start_ns = began_ns + round((stage_began_s - timings.started_s) * 1e9)
            part = self._tracer.start_span(stage, context=within, start_time=start_ns)
            part.end(start_ns + round(seconds * 1e9))
        span.end(began_ns + round(timings.total_s * 1e9))

    def open(self) -> None:
        """Count a transport that uses it; each awaits `close` after its last request."""
        self._users += 1

    async def close(self) -> None:
        """After the last transport's last request, export pending spans and shut down.

        Spans that the collector does not take within a few seconds are lost.
        """
        self._users -= 1
        if self._users == 0:
            traces_to.cache_clear()  # a server that starts later in this process needs another
            # In a thread that is left behind if the collector does not answer.
            exporting = threading.Thread(target=self._provider.shutdown, daemon=True)
            exporting.start()
            await asyncio.to_thread(exporting.join, _FLUSH_S)
