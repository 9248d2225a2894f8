"""Spans at a real collector: a request's under its caller's trace, its stages' under its own."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from opentelemetry.sdk.trace import TracerProvider

import convgrad
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.telemetry import tracing
from convgrad_service.engine.telemetry.record import RequestContext
from convgrad_service.engine.telemetry.tracing import traces_to
from convgrad_service.server.settings import Settings
from tests.support.http_server import EXAMPLE, JSON
from tests.support.oip_server import serving_oip
from tests.support.otlp_collector import Collected, attributes, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[Collected]:
    with collecting() as collected:
        yield collected
    traces_to.cache_clear()


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
    collector: Collected, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, spans, _ = collector
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


def test_a_caller_decides_whether_its_trace_is_kept(collector: Collected) -> None:
    endpoint, spans, _ = collector
    with serving_oip(CpuBackend(threads=1), otlp_endpoint=endpoint) as server:
        headers = {"content-type": JSON, "traceparent": f"00-{TRACE}-{PARENT}-00"}
        url = f"http://{server.http}/conv_bwd_data"
        assert httpx.post(url, content=EXAMPLE, headers=headers, timeout=60).is_success
    assert spans == []


def test_the_sdk_sends_the_trace_that_its_caller_is_in(
    collector: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gradients")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=convgrad-0")
    endpoint, spans, resources = collector
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
    named = {"service.name": "gradients", "k8s.pod.name": "convgrad-0"}
    assert all(named.items() <= one.items() for one in resources)


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_S", 0.2)

    async def end() -> int:
        traces, context = traces_to(f"http://127.0.0.1:{port}/v1/traces"), RequestContext.begin([])
        # HTTP's and gRPC's; the first to end leaves it to the other.
        traces.open()
        traces.open()
        await traces.close()
        context.operation = "conv_fwd"
        traces.begin(context)
        traces.end(context, "POST /conv_fwd", {}, failed=False)
        closing = asyncio.ensure_future(traces.close())
        turns = 0
        while not closing.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        began_s = time.monotonic()
        turns = asyncio.run(end())
    traces_to.cache_clear()
    assert time.monotonic() - began_s < 5, "an export may take 10 s"
    assert turns > 5, "others are served meanwhile"


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector"])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="begins with http"):
        Settings(otlp_endpoint=url)
