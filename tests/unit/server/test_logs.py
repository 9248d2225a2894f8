"""Log lines: one a record, whatever is in it, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from convgrad_service.engine.telemetry.record import ExchangeLine, RequestContext, access
from convgrad_service.server.logs import LogFormat, configure_logs

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("convgrad", "convgrad_service", "uvicorn")]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    hooks = logging.lastResort, sys.excepthook, threading.excepthook
    yield
    logging.lastResort, sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
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
    context.timings.add("compute", 0.25, context.timings.started_s)
    access.info(ExchangeLine(context, {"method": "POST", "path": path, "status": 200}))
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


def test_what_others_write_is_json_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(logging.root, "handlers", [])  # pytest's
        configure_logs("info", "json")
        logging.getLogger("another.package").warning("two\nlines")
        warnings.warn("deprecated", stacklevel=1)
        try:
            raise ValueError("two\nlines")
        except ValueError as error:
            sys.excepthook(ValueError, error, error.__traceback__)
        thread = threading.Thread(target=int, args=("x",))
        thread.start()
        thread.join()
    package, warning, main, other = map(json.loads, capsys.readouterr().err.splitlines())
    assert (package["logger"], package["message"]) == ("another.package", "two\nlines")
    assert "UserWarning: deprecated" in warning["message"]
    assert main["message"] == other["message"] == "unhandled exception"
    assert main["traceback"].endswith("ValueError: two\nlines")
    assert "ValueError: invalid literal" in other["traceback"]


@pytest.mark.parametrize("traceparent", ["", "00-zz-b7ad6b7169203331-01", "anything"])
def test_a_trace_that_is_none_is_not_named(traceparent: str) -> None:
    context = RequestContext.begin([])
    context.trace = {"traceparent": traceparent}
    assert context.trace_id == ""
