"""What our server has only to be faster, and how it is taken out of a server that is measured.

``python -m tests.perf.serve.ours HTTP GRPC --without NAME`` runs a server without one of
`SHORTCUTS`, which are all in the hub's process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from convgrad_service.engine import pipeline
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.ipc.channel import InternTable
from convgrad_service.engine.shm import stored
from convgrad_service.engine.telemetry.record import SECONDS, STAGES, Record, RequestMetrics
from convgrad_service.engine.workers import process_worker
from convgrad_service.http_api import protocol
from convgrad_service.http_api.middleware import ExchangeMiddleware

__all__ = ["INLINE", "SHORTCUTS", "Shortcut"]

INLINE = "inline"
"""The shortcut that is no patch: `ours` has a word of its own for servers without it."""


@dataclass(frozen=True)
class Shortcut:
    """One of them.

    ``text`` describes it in docs/architecture.md. ``remove`` takes it out of the running program.
    With ``by_worker`` it is measured on a server that computes nothing on the event loop, and with
    ``stores`` by storing tensors of 4 MiB instead of computing 1 KiB.
    """

    text: str
    remove: Callable[[], None]
    by_worker: bool = False
    stores: bool = False


def _prepare_each_request() -> None:
    pipeline._MAX_PREPARED = 0


def _encode_each_text() -> None:
    def text(self: Execution, encode: Callable[[Any], bytes], number: Any) -> bytes:
        return encode(self.report)

    Execution.text = text  # type: ignore[method-assign]


def _route_by_fastapi() -> None:
    made = ExchangeMiddleware.__init__

    def without(self: ExchangeMiddleware, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.endpoints = {}

    ExchangeMiddleware.__init__ = without  # type: ignore[method-assign]


def _count_with_prometheus_client() -> None:
    registry = CollectorRegistry()
    labels = ("operation", "transport", "code")
    totals = ("received_bytes", "sent_bytes", "flops", "compulsory_bytes")
    requests = Counter("requests", "", labels, registry=registry)
    counters = {name: Counter(name, "", labels, registry=registry) for name in totals}
    spent = {
        name: Histogram(name, "", labels, registry=registry, buckets=SECONDS)
        for name in ("request", *STAGES)
    }

    def count(self: RequestMetrics, record: Record) -> None:
        kind = record.operation, record.transport, record.code
        requests.labels(*kind).inc()
        for name, counter in counters.items():
            counter.labels(*kind).inc(getattr(record, name))
        spent["request"].labels(*kind).observe(record.total_s)
        for stage, seconds in record.stages_s.items():
            spent[stage].labels(*kind).observe(seconds)

    RequestMetrics.count = count  # type: ignore[method-assign]


def _write_head_and_body_apart() -> None:
    setattr(protocol, "CoalescedWriter", lambda transport: transport)  # noqa: B010


def _send_each_layout() -> None:
    InternTable.intern = lambda self, text: (0, text)  # type: ignore[method-assign]


def _hand_over_brief_tasks() -> None:
    process_worker._BRIEF_S = -1.0


def _make_each_file() -> None:
    stored._MAX_SPARES = 0


SHORTCUTS = {
    "prepared": Shortcut(
        "prepared requests, by a key (`Pipeline.prepare`)",
        _prepare_each_request,
    ),
    "texts": Shortcut(
        "responses' texts but for the seconds (`Execution.text`)",
        _encode_each_text,
    ),
    "routes": Shortcut(
        "endpoints found without FastAPI's router (`http_api/middleware.py`)",
        _route_by_fastapi,
    ),
    "counters": Shortcut(
        "counters kept as plain numbers (`engine/telemetry/record.py`)",
        _count_with_prometheus_client,
    ),
    "writes": Shortcut(
        "head and body in one write (`http_api/connection.py`)",
        _write_head_and_body_apart,
    ),
    INLINE: Shortcut(
        "computing on the event loop (`engine/workers/inline_executor.py`)",
        lambda: None,
    ),
    "layouts": Shortcut(
        "layouts sent to a worker once (`InternTable`), by a worker; also without brief tasks",
        _send_each_layout,
        by_worker=True,
    ),
    "brief": Shortcut(
        "brief tasks run by the thread that receives them (`RunTask.brief`), by a worker",
        _hand_over_brief_tasks,
        by_worker=True,
    ),
    "spares": Shortcut(
        "files of dropped tensors kept for new ones (`engine/shm/stored.py`), storing 4 MiB",
        _make_each_file,
        stores=True,
    ),
}
