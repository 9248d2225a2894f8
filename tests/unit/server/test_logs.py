"""Log lines: one a record, whatever is in it, as text or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from convgrad_service.engine.telemetry.access_log import log_exchange
from convgrad_service.engine.telemetry.request_context import RequestContext
from convgrad_service.server.logs import LogFormat, configure_logs

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("convgrad", "convgrad_service", "uvicorn")]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers[:], one.propagate = handlers, propagate
        one.setLevel(level)


def lines(
    format: LogFormat, capsys: pytest.CaptureFixture[str], path: str = "/conv_fwd"
) -> list[str]:
    """What is written of a request and of a failure."""
    configure_logs("info", format)
    context = RequestContext.begin(["an id"])
    context.client, context.sent_bytes = "10.1.2.3", 7
    context.trace = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    context.timings.add("compute", 0.25)
    log_exchange(logging.INFO, context, {"method": "POST", "path": path, "status": 200})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("convgrad.http").exception("request_id=%s failed", "x")
    return capsys.readouterr().err.splitlines()


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    request, failure = lines("text", capsys, "/a b\nstatus=200")
    assert "INFO convgrad.access request_id='an id' method=POST path='/a b\\nstatus=200'" in request
    assert f"sent_bytes=7 client=10.1.2.3 trace_id={TRACE} total_s=0.0" in request
    assert request.endswith(" compute_s=0.250000")
    assert "ERROR convgrad.http request_id=x failed\\nTraceback (most recent call last):" in failure
    assert failure.endswith("ValueError: two\\nlines")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    request, failure = map(json.loads, lines("json", capsys))
    assert request["level"] == "info"
    assert request["logger"] == "convgrad.access"
    assert request["time"].endswith("Z")
    wanted = {"request_id": "an id", "path": "/conv_fwd", "status": 200, "client": "10.1.2.3"}
    assert wanted.items() <= request.items()
    assert (request["trace_id"], request["compute_s"]) == (TRACE, 0.25)
    assert failure["message"] == "request_id=x failed"
    assert failure["traceback"].endswith("ValueError: two\nlines")


@pytest.mark.parametrize("traceparent", ["", "00-zz-b7ad6b7169203331-01", "anything"])
def test_a_trace_that_is_none_is_not_named(traceparent: str) -> None:
    context = RequestContext.begin([])
    context.trace = {"traceparent": traceparent}
    assert context.trace_id == ""
