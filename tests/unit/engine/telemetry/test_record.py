"""Request metrics give the same series as Prometheus' own client."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from convgrad.errors import CODES
from convgrad_service.engine.telemetry.metrics import RequestCollector
from convgrad_service.engine.telemetry.record import Record, RequestMetrics

SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


def samples(registry: CollectorRegistry, *names: str) -> dict[str, float]:
    """Return the samples of some metrics, by name and labels."""
    lines = generate_latest(registry).decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(names) and "_created" not in line
    }


def test_series_match_prometheus_client(seed: int) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = RequestMetrics()
    ours.register(RequestCollector(tallies))
    labels = ("operation", "transport")
    requests = Counter("convgrad_requests", "x", (*labels, "code"), registry=theirs)
    received = Counter("convgrad_received_bytes", "x", labels, registry=theirs)
    flops = Counter("convgrad_computed_flops", "x", ("operation",), registry=theirs)
    total = Histogram(
        "convgrad_request_seconds", "x", (*labels, "code"), buckets=SECONDS, registry=theirs
    )
    queue = Histogram(
        "convgrad_queue_seconds", "x", ("operation",), buckets=SECONDS, registry=theirs
    )
    draw = random.Random(seed)
    for _ in range(500):
        operation, transport = (
            draw.choice(["conv_fwd", "maxpool2d_bwd"]),
            draw.choice(["http", "grpc"]),
        )
        code = draw.choice(["ok", "overloaded"])
        # On a bucket's bound, between two, and beyond the last.
        spent_s = draw.choice([*SECONDS, draw.expovariate(10), 1e3])
        queue_s = draw.expovariate(100)
        size = draw.randrange(10**6)
        tallies.count(
            Record(
                operation,
                transport,
                code,
                spent_s,
                {"queue": queue_s},
                size,
                7,
                flops=size,
            )
        )
        requests.labels(operation, transport, code).inc()
        received.labels(operation, transport).inc(size)
        flops.labels(operation).inc(size)
        total.labels(operation, transport, code).observe(spent_s)
        queue.labels(operation).observe(queue_s)
    names = tuple(
        f"convgrad_{name}"
        for name in (
            "requests_total",
            "received_bytes",
            "computed_flops",
            "request_seconds",
            "queue",
        )
    )
    expected, found = samples(theirs, *names), samples(ours, *names)
    assert found.keys() == expected.keys()
    for line, value in expected.items():
        assert abs(found[line] - value) <= 1e-9 * abs(value), line


def test_every_code_has_a_series_from_the_start() -> None:
    """Otherwise the first error would start a series, which rate() does not count."""
    registry, metrics = CollectorRegistry(), RequestMetrics()
    registry.register(RequestCollector(metrics))
    found = samples(registry, "convgrad_requests_by_code_total")
    assert set(found.values()) == {0.0}
    for code in ("ok", "client-gone", "cancelled", *CODES):
        assert f'convgrad_requests_by_code_total{{code="{code}"}}' in found
    metrics.count(Record("conv_fwd", "http", "internal", 1.0, {}, 0, 0))
    found = samples(registry, "convgrad_requests_by_code_total")
    assert found.pop('convgrad_requests_by_code_total{code="internal"}') == 1.0
    assert set(found.values()) == {0.0}
