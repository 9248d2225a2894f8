"""Builds an engine and its parts from the settings."""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from convgrad_service.backends.base import ServingBackend
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.selection import BackendOptions, backend_named
from convgrad_service.engine.admission import Limits
from convgrad_service.engine.embedded import embedded_hub
from convgrad_service.engine.engine import Engine
from convgrad_service.engine.options import EngineOptions, InlineBackend, WorkerRecipe
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.process import memory_bytes
from convgrad_service.server.logs import configure_logs
from convgrad_service.server.malloc import keep_large_blocks
from convgrad_service.server.metrics import add_metrics
from convgrad_service.server.setting_values import PROCESSES_BYTES
from convgrad_service.server.settings import Settings
from convgrad_service.server.warm_up import warm_up

if TYPE_CHECKING:
    from fastapi import FastAPI

# Assumed if the system does not report its memory.
_UNKNOWN_BYTES = 8 * 2**30
# Number of JSON bodies of the maximum size that may be in memory at the same time.
_MAX_SIZE_TEXTS = 4
# How much memory freed by requests is kept for later ones: in the arena, and in the heaps of all
# processes. A share of the tensors' budget, and at most. Kept pages need not be faulted in again.
_KEPT_SHARE, _MAX_KEPT_BYTES = 1 / 4, 2**30
# New objects after which the garbage collector runs.
_OBJECTS_PER_COLLECTION = 10_000
# For 64 small requests, which are answered even while large ones, or responses that nobody reads,
# hold all other memory.
_RESERVE_BYTES = 4 * 2**20


class MemoryBudget(NamedTuple):
    """Bytes for tensors of requests in flight, JSON bodies not yet decoded, stored tensors, and the
    workspace of one problem."""

    tensors: int
    texts: int
    stored: int
    workspace: int


def memory_budget(settings: Settings) -> MemoryBudget:
    """Return the budget from the settings; what they leave unset is a share of `memory_bytes`.

    After subtracting what the processes themselves need, half is for tensors, and an eighth each
    for JSON texts, stored tensors and the workspace of each of two problems.
    """
    limit = settings.memory_bytes or memory_bytes() or _UNKNOWN_BYTES
    free = max(limit - PROCESSES_BYTES, limit // 4)
    tensors = int(settings.max_inflight_bytes or free // 2)
    texts = max(
        min(_MAX_SIZE_TEXTS * settings.max_json_bytes, tensors // 4), settings.max_json_bytes
    )

    def capped_unless_set(name: str, size_bytes: int) -> int:
        return int(size_bytes) if name in settings.model_fields_set else min(size_bytes, free // 8)

    return MemoryBudget(
        tensors,
        capped_unless_set("max_json_bytes", texts),
        capped_unless_set("max_stored_bytes", settings.max_stored_bytes),
        capped_unless_set("workspace_bytes", settings.workspace_bytes),
    )


def engine_options(settings: Settings) -> EngineOptions:
    """Return the engine's options."""
    budget = memory_budget(settings)
    return EngineOptions(
        tensor_bytes=budget.tensors,
        text_bytes=budget.texts,
        reserve_bytes=_RESERVE_BYTES,
        keep_bytes=_kept_bytes(budget),
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


def _kept_bytes(budget: MemoryBudget, processes: int = 1) -> int:
    return min(int(budget.tensors * _KEPT_SHARE) // processes, _MAX_KEPT_BYTES)


def backend_of(settings: Settings, device: int = 0) -> ServingBackend:
    """Make the backend that the settings name; raises DeviceUnavailable if it cannot work here."""
    options = BackendOptions(
        threads=settings.threads,
        workspace_limit_bytes=memory_budget(settings).workspace,
        kernel_cache=settings.kernel_cache,
        tuning=settings.tuning,
        device=device,
    )
    return backend_named(settings.backend, options)


def worker_recipe(settings: Settings) -> WorkerRecipe:
    """Return how to start a worker process with that backend."""
    return WorkerRecipe(
        partial(backend_of, settings),
        settings.compute_slots,
        partial(prepare_process, settings),
        inline_cpu_backend(settings),
        None if settings.warm_up is None else partial(warm_up, settings.warm_up),
    )


def prepare_process(settings: Settings) -> None:
    """Set up logging and malloc; called first in every process of a server."""
    configure_logs(settings.log_level, settings.log_format)
    if settings.malloc_tuning:
        # Bodies are read by the processes that serve HTTP; a worker has workspaces.
        keep_large_blocks(_kept_bytes(memory_budget(settings), settings.http_workers + 1))


def freeze_startup_objects() -> None:
    """Exclude all objects that exist now from garbage collection; called once a process serves.

    They are modules for the most part, and stay. With a few hundred requests in flight the
    collector would visit them every second. Those requests are far more than 700 objects, the
    default after which it runs, and visiting them took 3 % of an overloaded server's time.
    """
    gc.freeze()
    gc.set_threshold(_OBJECTS_PER_COLLECTION, 20, 20)


def inline_cpu_backend(settings: Settings) -> InlineBackend:
    """Return the CPU backend with which a front end computes small problems itself."""
    workspace_bytes = memory_budget(settings).workspace
    make = partial(CpuBackend, threads=1, workspace_limit_bytes=workspace_bytes)
    return InlineBackend(CpuBackend.name, make)


def pipeline_on(engine: Engine, settings: Settings) -> Pipeline:
    """Make a front end's pipeline on a local or remote engine."""
    return Pipeline(
        engine,
        limits=Limits(
            settings.max_problem_bytes, settings.max_problem_flops, settings.max_output_ratio
        ),
        codec_threads=settings.codec_threads,
    )


def create_app(settings: Settings | None = None, backend: ServingBackend | None = None) -> FastAPI:
    """Make an ASGI application with its own engine in this process.

    ``settings`` default to the environment's, ``backend`` to the one that they name. The pipeline
    is at ``app.state.pipeline``, for other transports and for tests.
    """
    # Not above: workers import this module, and none of FastAPI.
    from convgrad_service.http_api.app import app_on

    settings = settings or Settings()
    hub = embedded_hub(backend or backend_of(settings), engine_options(settings))
    add_metrics(hub)
    return app_on(pipeline_on(hub, settings), settings, hub.close)
