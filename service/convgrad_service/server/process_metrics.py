"""Metrics of a server's processes and connections, from Linux's /proc; none on other systems."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from prometheus_client import ProcessCollector

from convgrad_service.engine.telemetry.metrics import Labelled, Metrics

__all__ = ["add_connection_metrics", "add_process_metrics"]

_NET = Path("/proc/net")
_ESTABLISHED = "01"


def add_process_metrics(metrics: Metrics, processes: Callable[[], Mapping[str, int]]) -> None:
    """Add the resources of each process; ``processes`` returns their ids by name."""

    def of_each(family: str) -> Labelled:
        """Read a family of prometheus_client's collector, but for each process."""
        return lambda: {
            name: each.samples[0].value
            for name, process_id in processes().items()
            for each in ProcessCollector(pid=partial(int, process_id), registry=None).collect()
            if each.name == family
        }

    labels = ("process",)
    metrics.totals(
        "convgrad_process_cpu_seconds",
        "CPU time of each of the server's processes.",
        labels,
        of_each("process_cpu_seconds"),
    )
    metrics.gauges(
        "convgrad_process_resident_bytes",
        "Resident memory of each process, shared memory included.",
        labels,
        of_each("process_resident_memory_bytes"),
    )
    metrics.gauges(
        "convgrad_process_open_files",
        "Open file descriptors of each process.",
        labels,
        of_each("process_open_fds"),
    )


def add_connection_metrics(metrics: Metrics, ports: Mapping[str, int]) -> None:
    """Add the number of connections to each port, by the port's name."""
    metrics.gauges(
        "convgrad_connections",
        "Open connections by port: http, grpc or management.",
        ("port",),
        lambda: _connections(ports),
    )


def _connections(ports: Mapping[str, int]) -> Mapping[str, int]:
    names = {f"{port:04X}": name for name, port in ports.items()}
    counts = dict.fromkeys(ports, 0)
    known = False
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            counted = _established((_NET / table).read_text().splitlines()[1:])
            known = True
            for port in counted:
                if (name := names.get(port)) is not None:
                    counts[name] += 1
    return counts if known else {}


def _established(lines: Iterable[str]) -> Iterable[str]:
    """Yield the local port of each established connection, in hexadecimal."""
    for line in lines:
        _, local, _, state = line.split(maxsplit=4)[:4]
        if state == _ESTABLISHED:
            yield local.rpartition(":")[2]
