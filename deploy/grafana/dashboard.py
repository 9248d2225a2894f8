"""The Grafana dashboard as code; run, it writes the chart's dashboard.json.

A panel is a title, a unit of Grafana's, and queries by their legend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "helm" / "convgrad" / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8
COLUMNS = 3


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    queries: Mapping[str, str]


def rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_only(where)}}}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "operation") -> str:
    buckets = rate(f"{metric}_bucket", f"{by}, le")
    return f"histogram_quantile({q}, {buckets})"


def achieved(what: str) -> str:
    """Of what was computed in a while, by the seconds that computing it took."""
    done = rate(f"convgrad_{what}_total", "operation")
    return f"{done} / {rate('convgrad_compute_seconds_sum', 'operation')}"


def gauge(metric: str, by: str = "instance") -> str:
    return f"sum by ({by}) ({metric}{{{_only()}}})"


def increase(metric: str) -> str:
    """Of counters that seldom move: how far they went in an hour."""
    return f"sum by (instance) (increase({metric}{{{_only()}}}[1h]))"


def _only(where: str = "") -> str:
    return ", ".join(part for part in ('instance=~"$instance"', where) if part)


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "What callers see": (
        Panel(
            "Requests by operation",
            "reqps",
            {
                "{{operation}} {{transport}}": rate(
                    "convgrad_requests_total", "operation, transport"
                )
            },
        ),
        Panel(
            "Refusals and failures by code",
            "reqps",
            {"{{code}}": rate("convgrad_requests_total", "code", 'code!="ok"')},
        ),
        Panel(
            "Request time",
            "s",
            {
                "{{operation}} p50": quantile(0.5, "convgrad_request_seconds"),
                "{{operation}} p99": quantile(0.99, "convgrad_request_seconds"),
            },
        ),
    ),
    "Where the time goes (p99)": (
        Panel(
            "Waiting for a slot", "s", {"{{operation}}": quantile(0.99, "convgrad_queue_seconds")}
        ),
        Panel("Computing", "s", {"{{operation}}": quantile(0.99, "convgrad_compute_seconds")}),
        Panel(
            "Receiving, decoding, to the device and back, encoding",
            "s",
            {
                stage: quantile(0.99, f"convgrad_{stage}_seconds", "job")
                for stage in ("receive", "decode", "upload", "download", "encode")
            },
        ),
    ),
    "What is achieved": (
        Panel("FLOP/s while computing", "flops", {"{{operation}}": achieved("computed_flops")}),
        Panel(
            "Compulsory bytes/s while computing",
            "Bps",
            {"{{operation}}": achieved("compulsory_bytes")},
        ),
        Panel(
            "Workers that died",
            "short",
            {"{{instance}}": increase("convgrad_workers_lost_total")},
        ),
    ),
    "What the server holds": (
        Panel(
            "Bytes on the wire",
            "Bps",
            {
                "received": rate("convgrad_received_bytes_total", "job"),
                "sent": rate("convgrad_sent_bytes_total", "job"),
            },
        ),
        Panel(
            "Problems that wait and that compute",
            "short",
            {
                "{{instance}} waiting": gauge("convgrad_queue_depth"),
                "{{instance}} computing": gauge("convgrad_running"),
                "{{instance}} workers": gauge("convgrad_workers"),
            },
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "{{instance}} requests in flight": gauge("convgrad_inflight_bytes"),
                "{{instance}} the hub's process": gauge("process_resident_memory_bytes"),
            },
        ),
    ),
    "Devices": (
        Panel(
            "Device memory",
            "bytes",
            {
                "{{instance}} {{device}} used": gauge(
                    "convgrad_device_memory_used_bytes", "instance, device"
                ),
                "{{instance}} {{device}} in all": gauge(
                    "convgrad_device_memory_total_bytes", "instance, device"
                ),
            },
        ),
        Panel(
            "Kernels needed first",
            "short",
            {
                "{{instance}} lay in the cache": increase("convgrad_kernel_cache_hits_total"),
                "{{instance}} were compiled": increase("convgrad_kernel_cache_misses_total"),
            },
        ),
        Panel(
            "Seconds spent compiling, a second",
            "s",
            {"{{instance}}": rate("convgrad_kernel_compile_seconds_total", "instance")},
        ),
    ),
    "API keys": (
        Panel(
            "Requests by key",
            "reqps",
            {"{{key}} {{code}}": rate("convgrad_key_requests_total", "key, code")},
        ),
        Panel(
            "In flight of keys that have limits",
            "short",
            {"{{key}}": gauge("convgrad_key_inflight_requests", "key")},
        ),
        Panel(
            "Refused because of a key's limit",
            "reqps",
            {"{{key}} {{limit}}": rate("convgrad_key_refused_total", "key, limit")},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """What Grafana reads."""
    return {
        "uid": "convgrad",
        "title": "convgrad",
        "tags": ["convgrad"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": "label_values(convgrad_info, instance)",
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                    "allValue": ".*",
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number = y = 0
    for row, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS * WIDTH, "h": 1},
            "panels": [],
        }
        for column, panel in enumerate(panels):
            number += 1
            yield {
                "id": number,
                "type": "timeseries",
                "title": panel.title,
                "datasource": SOURCE,
                "gridPos": {"x": column * WIDTH, "y": y + 1, "w": WIDTH, "h": HEIGHT},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
                "targets": [
                    {
                        "refId": chr(ord("A") + i),
                        "expr": query,
                        "legendFormat": legend,
                        "datasource": SOURCE,
                    }
                    for i, (legend, query) in enumerate(panel.queries.items())
                ],
            }
        y += HEIGHT + 1


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(dashboard(), indent=1) + "\n")
