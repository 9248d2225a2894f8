"""What API keys ask for and get, counted as plain numbers; see `request_metrics`.

Apart from the counts by operation: a label more there would multiply every operation by every key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from convgrad_service.engine.telemetry.record import Record

__all__ = ["KeyMetrics"]

_SUMS = {
    "received_bytes": "Bytes of request bodies received from an API key.",
    "sent_bytes": "Bytes of answers sent to an API key.",
    "computed_flops": "Floating-point operations computed for an API key.",
    "compute_seconds": "Time that problems of an API key computed.",
}


@dataclass(slots=True)
class _Tally:
    codes: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    sent_bytes: int = 0
    computed_flops: int = 0
    compute_seconds: float = 0.0


class KeyMetrics(Collector):
    """The counts by key; there are no more than keys in the file."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def count(self, record: Record) -> None:
        """Count one request that came with a key."""
        tally = self._tallies.get(record.key)
        if tally is None:
            tally = self._tallies[record.key] = _Tally()
        tally.codes[record.code] += 1
        tally.received_bytes += record.received_bytes
        tally.sent_bytes += record.sent_bytes
        tally.computed_flops += record.flops
        tally.compute_seconds += record.stages_s.get("compute", 0.0)

    def collect(self) -> Iterable[Metric]:
        """See `Collector.collect`."""
        requests = CounterMetricFamily(
            "convgrad_key_requests",
            "Requests of an API key by how they ended.",
            labels=("key", "code"),
        )
        for key, tally in self._tallies.items():
            for code, count in tally.codes.items():
                requests.add_metric((key, code), count)
        yield requests
        for name, text in _SUMS.items():
            family = CounterMetricFamily(f"convgrad_key_{name}", text, labels=("key",))
            for key, tally in self._tallies.items():
                family.add_metric((key,), getattr(tally, name))
            yield family
