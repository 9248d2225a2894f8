"""Generates the Grafana dashboard: run it to write the chart's dashboard.json."""

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
    """A panel; ``unit`` is one of Grafana's, ``queries`` are PromQL by legend."""

    title: str
    unit: str
    queries: Mapping[str, str]


def rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{_only(where)}}}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "operation") -> str:
    buckets = rate(f"{metric}_bucket", f"{by}, le")
    return f"histogram_quantile({q}, {buckets})"


def achieved(counter: str) -> str:
    """A counter's increase divided by the time spent computing."""
    amount = rate(f"convgrad_{counter}_total", "operation")
    return f"{amount} / {rate('convgrad_compute_seconds_sum', 'operation')}"


def gauge(metric: str, by: str = "instance") -> str:
    return f"sum by ({by}) ({metric}{{{_only()}}})"


def increase(metric: str) -> str:
    """A rarely incremented counter's increase within an hour."""
    return f"sum by (instance) (increase({metric}{{{_only()}}}[1h]))"


def _only(where: str = "") -> str:
    return ", ".join(part for part in ('instance=~"$instance"', where) if part)


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Requests": (
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
            "Request duration",
            "s",
            {
                "{{operation}} p50": quantile(0.5, "convgrad_request_seconds"),
                "{{operation}} p99": quantile(0.99, "convgrad_request_seconds"),
            },
        ),
    ),
    "Stages (p99)": (
        Panel("Queue", "s", {"{{operation}}": quantile(0.99, "convgrad_queue_seconds")}),
        Panel("Compute", "s", {"{{operation}}": quantile(0.99, "convgrad_compute_seconds")}),
        Panel(
            "Receive, decode, upload, download, encode",
            "s",
            {
                stage: quantile(0.99, f"convgrad_{stage}_seconds", "job")
                for stage in ("receive", "decode", "upload", "download", "encode")
            },
        ),
    ),
    "Throughput": (
        Panel("FLOP/s while computing", "flops", {"{{operation}}": achieved("computed_flops")}),
        Panel(
            "Compulsory bytes/s while computing",
            "Bps",
            {"{{operation}}": achieved("compulsory_bytes")},
        ),
        Panel(
            "Workers lost",
            "short",
            {"{{instance}}": increase("convgrad_workers_lost_total")},
        ),
    ),
    "Server": (
        Panel(
            "Bytes on the wire",
            "Bps",
            {
                "received": rate("convgrad_received_bytes_total", "job"),
                "sent": rate("convgrad_sent_bytes_total", "job"),
            },
        ),
        Panel(
            "Problems waiting and running",
            "short",
            {
                "{{instance}} waiting": gauge("convgrad_queue_depth"),
                "{{instance}} running": gauge("convgrad_running"),
                "{{instance}} workers": gauge("convgrad_workers"),
            },
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "{{instance}} requests in flight": gauge("convgrad_inflight_bytes"),
                "{{instance}} hub process": gauge("process_resident_memory_bytes"),
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
                "{{instance}} {{device}} total": gauge(
                    "convgrad_device_memory_total_bytes", "instance, device"
                ),
            },
        ),
        Panel(
            "Kernels on first use",
            "short",
            {
                "{{instance}} in the cache": increase("convgrad_kernel_cache_hits_total"),
                "{{instance}} compiled": increase("convgrad_kernel_cache_misses_total"),
            },
        ),
        Panel(
            "Time spent compiling, per second",
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
            "Requests in flight of keys that have limits",
            "short",
            {"{{key}}": gauge("convgrad_key_inflight_requests", "key")},
        ),
        Panel(
            "Requests refused because of a key's limit",
            "reqps",
            {"{{key}} {{limit}}": rate("convgrad_key_refused_total", "key, limit")},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard's JSON model."""
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
