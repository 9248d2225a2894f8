"""The metrics of a server: its hub, its keys, its devices, its processes and their connections.

Those of processes and connections come from Linux's /proc; other systems have none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import ProcessCollector

from convgrad_service.engine.hub import Hub
from convgrad_service.engine.scheduling.quotas import Usage
from convgrad_service.engine.telemetry.metrics import Metrics, triton_exposition

_NET = Path("/proc/net")
_ESTABLISHED = "01"


def add_metrics(hub: Hub) -> Metrics:
    """Create the hub's Prometheus metrics."""
    metrics = Metrics(hub.backend, hub.requests)
    gauge, total = metrics.gauge, metrics.total
    schedule, memory, children = hub.scheduler, hub.memory, hub.children
    in_line = schedule.lines.values()
    gauge("queue_depth", "Problems waiting.", lambda: schedule.waiting + sum(in_line))
    gauge("running", "Problems running.", lambda: schedule.running)
    gauge("workers", "Workers that accept problems.", lambda: schedule.workers)
    total("workers_lost", "Workers that have died.", lambda: schedule.deaths)
    gauge("front_ends_missing", "Front ends that are not serving.", lambda: len(children.missing))
    ended, hung, failed = children.ended, children.hung, children.failed_starts
    total("children_ended", "Child processes that exited unexpectedly.", lambda: ended, "name")
    text = "Child processes killed because they sent no heartbeats or made no progress."
    total("children_hung", text, lambda: hung, "name")
    text = "Failed attempts to start a child process; each is retried."
    total("child_start_failures", text, lambda: failed, "name")
    gauge(
        "inflight_bytes",
        "Memory held by the tensors of requests in flight.",
        lambda: memory.used_bytes + hub.reserve_memory.used_bytes,
    )
    gauge(
        "memory_waiting",
        "Requests waiting for memory for their tensors or their JSON text.",
        lambda: memory.waiting + hub.texts.waiting,
    )
    gauge("stored_bytes", "Memory held by stored tensors.", lambda: hub.tensors.used_bytes)
    _add_key_metrics(metrics, hub)
    _add_device_metrics(metrics, hub)
    gauge("threads", "Threads of the process.", threading.active_count)
    metrics.more.append(
        lambda: triton_exposition(hub.requests.statistics(), float(schedule.waiting))
    )
    hub.metrics = metrics.exposition
    return metrics


def _add_key_metrics(metrics: Metrics, hub: Hub) -> None:
    """Add the usage of keys that have limits, labelled with their names in the key file."""

    def keys() -> Iterable[tuple[str, Usage]]:
        # A name with a slash is a quota of timings, not a key.
        return ((name, usage) for name, usage in hub.quotas.used.items() if "/" not in name)

    metrics.gauge(
        "key_inflight_requests",
        "Requests in flight of an API key that has limits.",
        lambda: {name: usage.requests for name, usage in keys()},
        "key",
    )
    metrics.gauge(
        "key_inflight_bytes",
        "Memory held by the tensors of such a key's requests in flight.",
        lambda: {name: usage.size_bytes for name, usage in keys()},
        "key",
    )
    metrics.total(
        "key_refused",
        "Requests refused because of an API key's limit, by limit.",
        lambda: {
            (name, limit): count for name, usage in keys() for limit, count in usage.refused.items()
        },
        *("key", "limit"),
    )


def _add_device_metrics(metrics: Metrics, hub: Hub) -> None:
    """Add what the workers report about their devices."""

    def each(field: str) -> Mapping[str, Any]:
        workers = hub.scheduler.by_device.items()
        return {str(index): getattr(worker.vitals, field) for index, worker in workers}

    # The UUID joins these series with those of NVIDIA's DCGM exporter.
    metrics.gauge(
        "device_info",
        "Always 1; uuid is the GPU's, empty for the CPU.",
        lambda: dict.fromkeys(each("uuid").items(), 1.0),
        *("device", "uuid"),
    )
    gauge, total = metrics.gauge, metrics.total
    used, whole = partial(each, "memory_used_bytes"), partial(each, "memory_total_bytes")
    text = "Memory of a device in use by any process."
    gauge("device_memory_used_bytes", text, used, "device")
    gauge("device_memory_total_bytes", "Memory of a device.", whole, "device")
    for name, text, field in (
        ("kernel_cache_hits", "Kernels found in the cache on first use.", "kernels_found"),
        ("kernel_cache_misses", "Kernels compiled on first use.", "kernels_compiled"),
        ("kernel_compile_seconds", "Time spent compiling kernels.", "compile_s"),
    ):
        total(name, text, partial(each, field), "device")


def add_process_metrics(metrics: Metrics, processes: Callable[[], Mapping[str, int]]) -> None:
    """Add the resources of each process; ``processes`` returns their ids by name."""

    def each(family: str) -> Mapping[str, float]:
        """Read a family of prometheus_client's collector, but for each process."""
        return {
            name: found.samples[0].value
            for name, process_id in processes().items()
            for found in ProcessCollector(pid=partial(int, process_id), registry=None).collect()
            if found.name == family
        }

    read = partial(each, "process_cpu_seconds")
    text = "CPU time of each of the server's processes."
    metrics.total("process_cpu_seconds", text, read, "process")
    read = partial(each, "process_resident_memory_bytes")
    text = "Resident memory of each process, shared memory included."
    metrics.gauge("process_resident_bytes", text, read, "process")
    read = partial(each, "process_open_fds")
    text = "Open file descriptors of each process."
    metrics.gauge("process_open_files", text, read, "process")


def add_connection_metrics(metrics: Metrics, ports: Mapping[str, int]) -> None:
    """Add the number of connections to each port, by the port's name."""
    metrics.gauge(
        "connections",
        "Open connections by port: http, grpc or management.",
        lambda: _connections(ports),
        "port",
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
