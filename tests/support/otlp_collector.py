"""An OpenTelemetry collector that keeps what it is sent over OTLP/HTTP."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collected", "attributes", "collecting"]


class Collected(NamedTuple):
    """Where to send spans, those received so far, and the attributes of who sent them."""

    endpoint: str
    spans: list[Any]
    resources: list[dict[str, Any]]


class _Handler(http.server.BaseHTTPRequestHandler):
    spans: list[Any]
    resources: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collecting() -> Iterator[Collected]:
    """Run a collector until the block ends."""
    spans: list[Any] = []
    resources: list[dict[str, Any]] = []
    handler = type("Handler", (_Handler,), {"spans": spans, "resources": resources})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Collected(
                f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans, resources
            )
        finally:
            server.shutdown()
            thread.join()


def attributes(described: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {
        one.key: getattr(one.value, one.value.WhichOneof("value")) for one in described.attributes
    }
