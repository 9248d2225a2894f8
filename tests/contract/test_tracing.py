"""Spans at a real collector: one a request, under the caller's trace, over both transports."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.telemetry.tracing import traces_to
from convgrad_service.server.settings import Settings
from tests.support.http_server import EXAMPLE, JSON
from tests.support.oip_server import serving_oip

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the spans that are sent to it."""

    spans: list[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    spans: list[Any] = []
    handler = type("Handler", (Collector,), {"spans": spans})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
        server.shutdown()
        thread.join()
    traces_to.cache_clear()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_span_a_request(collector: tuple[str, list[Any]]) -> None:
    endpoint, spans = collector
    trace = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with serving_oip(CpuBackend(threads=1), otlp_endpoint=endpoint) as server:
        url = f"http://{server.http}"
        headers = {"content-type": JSON, "x-request-id": "one"}
        assert httpx.post(
            f"{url}/conv_bwd_data", content=EXAMPLE, headers=headers | trace
        ).is_success
        wrong = httpx.post(f"{url}/conv_bwd_data", content=b"{}", headers=headers, timeout=60)
        assert wrong.status_code == 400
        httpx.get(f"{url}/v2/health/live", timeout=60)
        x = triton_grpc.InferInput("input", [1, 1, 2, 2], "FP32")
        x.set_data_from_numpy(np.ones((1, 1, 2, 2), np.float32))
        w = triton_grpc.InferInput("weight", [1, 1, 1, 1], "FP32")
        w.set_data_from_numpy(np.ones((1, 1, 1, 1), np.float32))
        with triton_grpc.InferenceServerClient(server.grpc) as client:
            client.infer("conv_fwd", [x, w], headers=trace)
    # What waits is sent when the server ends.
    assert sorted(span.name for span in spans) == ["conv_bwd_data", "conv_bwd_data", "conv_fwd"]
    good, refused, grpc = sorted(spans, key=lambda span: (span.name, span.start_time_unix_nano))
    for span, transport in ((good, "http"), (grpc, "grpc")):
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == PARENT
        found = attributes(span)
        assert found["rpc.system"] == transport
        assert found["convgrad.code"] == "ok"
        spent_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert 0 < found["convgrad.compute_s"] < spent_s < 20
    assert attributes(good)["convgrad.request_id"] == "one"
    assert refused.trace_id.hex() != TRACE
    assert attributes(refused)["convgrad.code"] == "malformed-request"
    assert refused.status.code == 2


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector"])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="begins with http"):
        Settings(otlp_endpoint=url)
