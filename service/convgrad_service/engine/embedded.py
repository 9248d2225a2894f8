"""The engine inside one process: the hub on its event loop, the backend in threads.

For embedding, and for tests of what surrounds the engine. `convgrad serve` puts the backend into a
process of its own, see `supervisor`.
"""

from __future__ import annotations

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.options import EngineOptions
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.workers.thread_worker import ThreadWorker

__all__ = ["embedded_hub"]


_SLOTS = 2


def embedded_hub(backend: ServingBackend, options: EngineOptions) -> Hub:
    """A hub with one worker, which takes no jobs any more once the hub is closed."""
    arena = Arena.create(options.arena_bytes)
    schedule = Scheduler(options.max_queue, large_s=options.large_s)
    hub = Hub(arena, schedule, options, backend=backend.name)
    hub.fault = lambda: backend.fault
    hub.vitals = lambda: {0: backend.vitals()}
    worker = ThreadWorker(backend, arena, hub.regions, options.slots or _SLOTS, schedule)
    hub.workers = lambda: {0: worker}
    schedule.add(worker)
    hub.on_close.append(worker.close)
    return hub
