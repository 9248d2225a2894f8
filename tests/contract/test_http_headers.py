"""Headers that every answer has."""

from __future__ import annotations

import re

import pytest

from tests.support.http_server import JSON, LiveServer
from tests.support.tree_server import until

PATHS = {
    "/v2/health/live": 200,
    "/v2/health/ready": 200,
    "/operations": 200,
    "/metrics": 200,
    "/openapi.json": 200,
    "/docs": 200,
    "/docs/assets/swagger-ui.css": 200,
    "/docs/assets/nothing.css": 404,
    "/nothing": 404,
    "/conv_bwd_data": 405,
    "/conv_bwd_data/": 404,
    "/%00%ff": 404,
}


@pytest.mark.parametrize(("path", "status"), PATHS.items())
def test_every_answer_has_an_id_and_timings(live: LiveServer, path: str, status: int) -> None:
    answer = live.get(path, {"X-Request-Id": "this one"})
    assert answer.status_code == status
    assert answer.headers["x-request-id"] == "this one"
    assert re.search(r"\btotal;dur=\d+\.\d+", answer.headers["server-timing"])
    if status >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["request_id"] == "this one"


def test_stages_are_timed(live: LiveServer) -> None:
    timing = live.post().headers["server-timing"]
    stages = re.findall(r"(\w+);dur=", timing)
    assert stages == ["receive", "decode", "queue", "compute", "encode", "total"]


@pytest.mark.parametrize("given", ["a", "x" * 128, '~ !"#', "550e8400-e29b-41d4"])
def test_a_printable_id_is_kept(live: LiveServer, given: str) -> None:
    assert live.get("/nothing", {"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "caf\u00e9", "a\tb"])
def test_any_other_id_is_replaced(live: LiveServer, given: str) -> None:
    answer = live.get("/nothing", {"X-Request-Id": given.encode("latin-1")})  # type: ignore[dict-item]
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_405_says_what_is_allowed(live: LiveServer) -> None:
    answer = live.get("/conv_bwd_data")
    assert answer.headers["allow"] == "POST"
    assert answer.json()["code"] == "method-not-allowed"
    assert live.post(path="/v2/health/live").status_code == 405
    answer = live.post(path="/tensors/x")
    assert set(answer.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD", "PUT"}
    assert answer.json()["detail"] == "/tensors/x takes DELETE, GET, HEAD, PUT, not POST"


def test_the_root_leads_to_the_docs(live: LiveServer) -> None:
    answer = live.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "/docs")


def test_metrics_count_what_happened(live: LiveServer) -> None:
    live.post()
    live.post(b"{")
    sample = r'{}{{code="{}",operation="conv_bwd_data",transport="http"}} [1-9]'
    wanted = [
        re.compile(sample.format("convgrad_requests_total", code))
        for code in ("ok", "malformed-request")
    ]
    live.wait_until_idle()
    # What has happened is counted a moment after its answer.
    until(lambda: all(each.search(live.get("/metrics").text) for each in wanted))
    text = live.get("/metrics").text
    for name in (
        "convgrad_received_bytes_total{",
        "convgrad_sent_bytes_total{",
        "convgrad_request_seconds_bucket{",
        "convgrad_decode_seconds_sum{",
        "convgrad_queue_seconds_sum{",
        "convgrad_compute_seconds_sum{",
        "convgrad_encode_seconds_sum{",
        "convgrad_queue_depth 0.0",
        "convgrad_inflight_bytes 0.0",
        "process_resident_memory_bytes ",
    ):
        assert f"\n{name}" in text, name


def test_paths_that_are_no_operation_make_no_metrics(live: LiveServer) -> None:
    live.post(path="/rubbish", headers={"Content-Type": JSON})
    assert "rubbish" not in live.get("/metrics").text
