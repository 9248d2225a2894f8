"""From settings to an engine: which parts there are, and how large each is."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

from convgrad_service.backends.base import ServingBackend
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.selection import BackendOptions, backend_named
from convgrad_service.engine.embedded import embedded_hub
from convgrad_service.engine.hub import Engine, Hub
from convgrad_service.engine.options import EngineOptions, Limits
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.scheduling.quotas import Usage
from convgrad_service.engine.telemetry.metrics import Labelled, Metrics
from convgrad_service.engine.telemetry.triton_metrics import TritonMetrics
from convgrad_service.engine.workers.inline_executor import InlineBackend
from convgrad_service.engine.workers.worker_main import WorkerRecipe
from convgrad_service.server.logs import configure_logs
from convgrad_service.server.malloc import keep_large_blocks
from convgrad_service.server.memory_budget import memory_budget
from convgrad_service.server.settings import Settings
from convgrad_service.server.warm_up import warm_up

__all__ = [
    "backend_of",
    "count_in",
    "embedded_pipeline",
    "engine_options",
    "pipeline_on",
    "prepare_process",
    "worker_recipe",
]

# What stays with the server of the memory that its requests have used: enough that a body in a
# busy server finds its pages, little enough that a small machine gets them back.
_KEEP_SHARE, _MOST_KEPT_BYTES = 1 / 4, 2**30


def engine_options(settings: Settings) -> EngineOptions:
    """What the settings say of the engine."""
    budget = memory_budget(settings)
    return EngineOptions(
        tensor_bytes=budget.tensors,
        text_bytes=budget.texts,
        keep_bytes=min(int(budget.tensors * _KEEP_SHARE), _MOST_KEPT_BYTES),
        wait_s=settings.max_memory_wait_s,
        slots=settings.compute_slots,
        max_queue=settings.max_queue,
        large_s=settings.large_problem_s,
        max_regions=settings.max_shared_regions,
        stored_bytes=budget.stored,
        stored_longest_s=settings.stored_longest_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        progress_timeout_s=settings.progress_timeout_s,
        device_timeout_s=settings.device_timeout_s,
    )


def backend_of(settings: Settings, device: int = 0) -> ServingBackend:
    """The backend that the settings name; raises DeviceUnavailable where it cannot work."""
    options = BackendOptions(
        threads=settings.threads,
        workspace_limit_bytes=memory_budget(settings).workspace,
        kernel_cache=settings.kernel_cache,
        device=device,
    )
    return backend_named(settings.backend, options)


def worker_recipe(settings: Settings) -> WorkerRecipe:
    """How a worker with that backend is started in a process of its own."""
    return WorkerRecipe(
        partial(backend_of, settings),
        settings.compute_slots,
        partial(prepare_process, settings),
        inline_cpu_backend(settings),
        None if settings.warm_up is None else partial(warm_up, settings.warm_up),
    )


def prepare_process(settings: Settings) -> None:
    """What every process of a server does first: logs, and malloc before the heap holds much."""
    configure_logs(settings.log_level, settings.log_format)
    if settings.malloc_tuning:
        keep_large_blocks(min(memory_budget(settings).tensors // 4, _MOST_KEPT_BYTES))


def inline_cpu_backend(settings: Settings) -> InlineBackend:
    """What computes small problems on the spot where workers compute on the CPU."""
    workspace_bytes = memory_budget(settings).workspace
    make = partial(CpuBackend, threads=1, workspace_limit_bytes=workspace_bytes)
    return InlineBackend(CpuBackend.name, make)


def pipeline_on(engine: Engine, settings: Settings) -> Pipeline:
    """A front end's dataplane on an engine, wherever that is."""
    return Pipeline(
        engine,
        limits=Limits(
            settings.max_problem_bytes, settings.max_problem_flops, settings.max_output_ratio
        ),
        codec_threads=settings.codec_threads,
    )


def embedded_pipeline(settings: Settings, backend: ServingBackend | None = None) -> Pipeline:
    """A dataplane with an engine of its own in this process."""
    hub = embedded_hub(backend or backend_of(settings), engine_options(settings))
    count_in(hub)
    return pipeline_on(hub, settings)


def count_in(hub: Hub) -> Metrics:
    """Have the hub count what it is told of, for Prometheus."""
    metrics = Metrics(hub.backend)
    schedule, memory = hub.scheduler, hub.memory
    metrics.gauge("convgrad_queue_depth", "Problems that wait.", lambda: schedule.waiting)
    metrics.gauge("convgrad_running", "Problems that compute.", lambda: schedule.running)
    metrics.gauge("convgrad_workers", "Workers that take problems.", lambda: schedule.workers)
    metrics.total("convgrad_workers_lost", "Workers that have died.", lambda: schedule.deaths)
    children, by_name = hub.children, ("name",)
    metrics.gauge(
        "convgrad_front_ends_missing",
        "Front ends that do not serve.",
        lambda: len(children.missing),
    )
    metrics.totals(
        "convgrad_children_ended",
        "Processes of the server that have ended without being told to.",
        by_name,
        lambda: {(name,): count for name, count in children.ended.items()},
    )
    metrics.totals(
        "convgrad_children_hung",
        "Of those, processes that were ended because they were silent or made no progress.",
        by_name,
        lambda: {(name,): count for name, count in children.hung.items()},
    )
    metrics.totals(
        "convgrad_child_start_failures",
        "Attempts to start such a process that failed; each is followed by another.",
        by_name,
        lambda: {(name,): count for name, count in children.failed_starts.items()},
    )
    metrics.gauge(
        "convgrad_inflight_bytes",
        "Memory that the tensors of requests in flight hold.",
        lambda: memory.used_bytes,
    )
    metrics.gauge(
        "convgrad_memory_waiting",
        "Requests that wait for memory for their tensors or their JSON text.",
        lambda: memory.waiting + hub.texts.waiting,
    )
    metrics.gauge(
        "convgrad_stored_bytes",
        "Memory that stored tensors hold.",
        lambda: hub.tensors.used_bytes,
    )
    _count_keys(metrics, hub)
    _count_devices(metrics, hub)
    metrics.gauge("convgrad_threads", "Threads of the process.", threading.active_count)
    triton = TritonMetrics(hub.inferences.all, lambda: float(schedule.waiting))
    metrics.more.append(triton.exposition)
    hub.counts = metrics
    return metrics


def _count_keys(metrics: Metrics, hub: Hub) -> None:
    """What keys that have limits use of them. Names are those of the file of keys, no others."""
    by_key = ("key",)

    def keys() -> Iterable[tuple[str, Usage]]:
        """Without the counts of timings, whose names are no key's."""
        return ((name, usage) for name, usage in hub.quotas.used.items() if "/" not in name)

    metrics.gauges(
        "convgrad_key_inflight_requests",
        "Requests in flight of an API key that has limits.",
        by_key,
        lambda: {(name,): usage.requests for name, usage in keys()},
    )
    metrics.gauges(
        "convgrad_key_inflight_bytes",
        "Memory that the tensors of such a key's requests in flight hold.",
        by_key,
        lambda: {(name,): usage.size_bytes for name, usage in keys()},
    )
    metrics.totals(
        "convgrad_key_refused",
        "Requests refused because of an API key's limit, by the limit.",
        ("key", "limit"),
        lambda: {
            (name, limit): count for name, usage in keys() for limit, count in usage.refused.items()
        },
    )


def _count_devices(metrics: Metrics, hub: Hub) -> None:
    """What the workers say of their devices."""

    def of_each(field: str) -> Labelled:
        return lambda: {
            (str(index),): getattr(vitals, field) for index, vitals in hub.vitals().items()
        }

    by_device = ("device",)
    # So that a series of a device can be joined with those of NVIDIA's own exporter.
    metrics.gauges(
        "convgrad_device_info",
        "Always 1; uuid is a GPU's, empty for the CPU.",
        ("device", "uuid"),
        lambda: {(str(index), vitals.uuid): 1.0 for index, vitals in hub.vitals().items()},
    )
    for name, text, field in (
        ("memory_used_bytes", "Memory of a device in use, whoever uses it.", "memory_used_bytes"),
        ("memory_total_bytes", "Memory of a device.", "memory_total_bytes"),
    ):
        metrics.gauges(f"convgrad_device_{name}", text, by_device, of_each(field))
    for name, text, field in (
        ("cache_hits", "Kernels needed first that lay compiled in the cache.", "kernels_found"),
        ("cache_misses", "Kernels needed first that had to be compiled.", "kernels_compiled"),
        ("compile_seconds", "Time that compiling kernels took.", "compile_s"),
    ):
        metrics.totals(f"convgrad_kernel_{name}", text, by_device, of_each(field))
