"""Spans at a real collector: a request's under its caller's trace, its stages' under its own."""

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
from opentelemetry.sdk.trace import TracerProvider

import convgrad
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


def spans_of(spans: list[Any]) -> tuple[list[Any], dict[bytes, list[Any]]]:
    """The requests' spans in the order in which they began, and those of each one's stages."""
    by_parent: dict[bytes, list[Any]] = {}
    for span in spans:
        by_parent.setdefault(span.parent_span_id, []).append(span)
    requests = sorted(
        (span for span in spans if span.kind == span.SPAN_KIND_SERVER),
        key=lambda span: span.start_time_unix_nano,
    )
    return requests, by_parent


def test_a_span_a_request_and_one_for_each_of_its_stages(
    collector: tuple[str, list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, spans = collector
    trace = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with (
        serving_oip(CpuBackend(threads=1), otlp_endpoint=endpoint) as server,
        caplog.at_level("INFO", logger="convgrad.access"),
    ):
        url = f"http://{server.http}"
        headers = {"content-type": JSON, "x-request-id": "one"}
        answer = httpx.post(f"{url}/conv_bwd_data", content=EXAMPLE, headers=headers | trace)
        assert answer.is_success
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
    (good, refused, grpc), by_parent = spans_of(spans)
    assert good.name == refused.name == "POST /conv_bwd_data"
    assert grpc.name == "inference.GRPCInferenceService/ModelInfer"
    for span in (good, grpc):
        assert span.trace_id.hex() == TRACE
        assert span.parent_span_id.hex() == PARENT
        stages = by_parent[span.span_id]
        assert {"receive", "decode", "queue", "compute", "encode"} == {one.name for one in stages}
        for stage in stages:
            assert stage.trace_id == span.trace_id
            assert span.start_time_unix_nano <= stage.start_time_unix_nano
            assert stage.start_time_unix_nano <= stage.end_time_unix_nano
            assert stage.end_time_unix_nano <= span.end_time_unix_nano
    found = attributes(good)
    assert found["convgrad.request_id"] == "one"
    assert found["http.request.method"] == "POST"
    assert found["http.route"] == found["url.path"] == "/conv_bwd_data"
    assert found["http.response.status_code"] == 200
    assert found["http.request.body.size"] == len(EXAMPLE)
    assert found["client.address"] == "127.0.0.1"
    found = attributes(grpc)
    assert (found["rpc.system"], found["rpc.method"]) == ("grpc", "ModelInfer")
    assert found["rpc.grpc.status_code"] == 0
    assert found["convgrad.operation"] == "conv_fwd"
    assert found["client.address"] == "127.0.0.1"
    # Its caller's fault is no error of the server's span.
    assert refused.trace_id.hex() != TRACE
    assert attributes(refused)["error.type"] == "malformed-request"
    assert refused.status.code == 0
    # The answer and the log name the span.
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{good.span_id.hex()}-01"
    assert wrong.headers["traceresponse"].split("-")[1] == refused.trace_id.hex()
    assert f"trace_id={TRACE}" in caplog.text
    assert f"trace_id={refused.trace_id.hex()}" in caplog.text


def test_a_caller_decides_whether_its_trace_is_kept(collector: tuple[str, list[Any]]) -> None:
    endpoint, spans = collector
    with serving_oip(CpuBackend(threads=1), otlp_endpoint=endpoint) as server:
        headers = {"content-type": JSON, "traceparent": f"00-{TRACE}-{PARENT}-00"}
        url = f"http://{server.http}/conv_bwd_data"
        assert httpx.post(url, content=EXAMPLE, headers=headers, timeout=60).is_success
    assert spans == []


def test_the_sdk_sends_the_trace_that_its_caller_is_in(
    collector: tuple[str, list[Any]],
) -> None:
    endpoint, spans = collector
    tracer = TracerProvider().get_tracer("a training script")
    ones = np.ones((1, 1, 1, 1), np.float32)
    with serving_oip(CpuBackend(threads=1), otlp_endpoint=endpoint) as server:
        url = f"http://{server.http}"
        with convgrad.Client(url) as client, tracer.start_as_current_span("a step") as step:
            client.conv_bwd_data(ones, ones)
        # One that a caller names itself is left alone, and outside of a span there is none.
        named = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        with convgrad.Client(url, headers=named) as client, tracer.start_as_current_span("other"):
            client.conv_bwd_data(ones, ones)
        with convgrad.Client(url) as client:
            client.conv_bwd_data(ones, ones)
    (within, as_named, alone), _ = spans_of(spans)
    assert within.trace_id.hex() == f"{step.get_span_context().trace_id:032x}"
    assert within.parent_span_id.hex() == f"{step.get_span_context().span_id:016x}"
    assert as_named.parent_span_id.hex() == PARENT
    assert not alone.parent_span_id


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector"])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="begins with http"):
        Settings(otlp_endpoint=url)
