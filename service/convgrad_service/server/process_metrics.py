"""Metrics of a server's processes and connections, from Linux's /proc; none on other systems."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from convgrad_service.engine.telemetry.metrics import Metrics

__all__ = ["add_connection_metrics", "add_process_metrics"]

PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Indices of fields in /proc/PID/stat, counted after the command name, which may contain spaces.
_USER, _SYSTEM, _RESIDENT = 11, 12, 21
_ESTABLISHED = "01"


def add_process_metrics(metrics: Metrics, processes: Callable[[], Mapping[str, int]]) -> None:
    """Add the resources of each process; ``processes`` returns their ids by name."""

    def of_each(read: Callable[[int], float]) -> Callable[[], Mapping[str, float]]:
        def values() -> Mapping[str, float]:
            found: dict[str, float] = {}
            for name, process_id in processes().items():
                # A process may have just ended.
                with contextlib.suppress(OSError, IndexError, ValueError):
                    found[name] = read(process_id)
            return found

        return values

    labels = ("process",)
    metrics.totals(
        "convgrad_process_cpu_seconds",
        "CPU time of each of the server's processes.",
        labels,
        of_each(_cpu_s),
    )
    metrics.gauges(
        "convgrad_process_resident_bytes",
        "Resident memory of each process, shared memory included.",
        labels,
        of_each(lambda process_id: int(_stat(process_id)[_RESIDENT]) * _PAGE_BYTES),
    )
    metrics.gauges(
        "convgrad_process_open_files",
        "Open file descriptors of each process.",
        labels,
        of_each(lambda process_id: len(os.listdir(PROC / str(process_id) / "fd"))),  # noqa: PTH208
    )


def add_connection_metrics(metrics: Metrics, ports: Mapping[str, int]) -> None:
    """Add the number of connections to each port, by the port's name."""
    metrics.gauges(
        "convgrad_connections",
        "Open connections by port: http, grpc or management.",
        ("port",),
        lambda: _connections(ports),
    )


def _stat(process_id: int) -> list[str]:
    text = (PROC / str(process_id) / "stat").read_text()
    return text.rpartition(")")[2].split()


def _cpu_s(process_id: int) -> float:
    fields = _stat(process_id)
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S


def _connections(ports: Mapping[str, int]) -> Mapping[str, int]:
    names = {f"{port:04X}": name for name, port in ports.items()}
    counts = dict.fromkeys(ports, 0)
    known = False
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            counted = _established((PROC / "net" / table).read_text().splitlines()[1:])
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
