"""Keeps a worker process alive for every device."""

from __future__ import annotations

import asyncio
import logging

from convgrad.errors import DeviceUnavailable, ServiceError
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.ipc.channel import MAX_MISSED
from convgrad_service.engine.options import EngineOptions, WorkerRecipe
from convgrad_service.engine.workers.child_process import Backoff, DescriptorReserve
from convgrad_service.engine.workers.process_worker import ProcessWorker

_log = logging.getLogger("convgrad.supervisor")

# Failed starts in a row after which a device counts as broken; starts are still retried.
_BROKEN_AFTER = 4


class Supervisor:
    """Starts a worker for each device, and replaces workers that die or hang."""

    def __init__(self, hub: Hub, recipe: WorkerRecipe, options: EngineOptions) -> None:
        self.workers: dict[int, ProcessWorker] = {}
        self.reserve = DescriptorReserve()
        self._hub, self._recipe, self._options = hub, recipe, options
        self._devices = 1
        self._broken: dict[int, str] = {}
        self._keeping: list[asyncio.Task[None]] = []
        # Per device: how long it has had no worker, or after a hang a busy one without a result.
        self._failing_s: dict[int, float] = {}
        self._hung: set[int] = set()

    async def start(self) -> None:
        """Start a worker for every device and wait until all are ready.

        Raises
        ------
        DeviceUnavailable
            A device cannot be used.
        """
        first = await self._started(0, self._recipe)
        self._devices = first.greeting.devices
        if first.greeting.pins:
            for pool in (self._hub.memory, self._hub.reserve_memory):
                pool.stop_discarding()
        others = [self._started(index, self._recipe) for index in range(1, self._devices)]
        for index, worker in enumerate([first, *await asyncio.gather(*others)]):
            self._keeping.append(asyncio.ensure_future(self._keep(index, worker)))
        self._keeping.append(asyncio.ensure_future(self._watch()))

    async def stop(self) -> None:
        """End all workers and start no more."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        self.reserve.close()

    async def _started(self, index: int, recipe: WorkerRecipe) -> ProcessWorker:
        worker = await ProcessWorker.start_process(
            recipe,
            index,
            self._hub.arena,
            self._hub.regions,
            self._hub.scheduler,
            self.reserve,
        )
        self.workers[index] = worker
        self._hub.backend = worker.greeting.backend
        self._hub.scheduler.add(worker)
        _log.info(
            "worker %d is process %d on %s", index, worker.process_id, worker.greeting.backend
        )
        return worker

    async def _keep(self, index: int, worker: ProcessWorker) -> None:
        while True:
            code = await asyncio.shield(worker.lost)
            _log.error("worker %d (process %d) ended with %d", index, worker.process_id, code)
            del self.workers[index]
            self._hub.children.ended["convgrad-worker"] += 1
            self._hub.scheduler.lost(worker)
            worker = await self._restart(index)

    async def _restart(self, index: int) -> ProcessWorker:
        """Start a worker to replace a dead one, retrying until it succeeds."""
        backoff = Backoff()
        while True:
            try:
                # No warm-up: it may be what killed the worker, and its kernels are cached.
                worker = await self._started(index, self._recipe._replace(warm_up=None))
            # Any error must be retried: otherwise the device would never get a worker again.
            except Exception as error:  # noqa: BLE001
                pause_s = backoff.failed()
                why = error.detail if isinstance(error, ServiceError) else str(error)
                _log.error("worker %d cannot start (tried again in %g s): %s", index, pause_s, why)
                self._hub.children.failed_starts["convgrad-worker"] += 1
                # An OSError is a shortage of the machine, not a fault of the device.
                if backoff.failures >= _BROKEN_AFTER and isinstance(error, ServiceError):
                    self._broken[index] = why
                    self._update_fault()
                await asyncio.sleep(pause_s)
            else:
                self._broken.pop(index, None)
                self._update_fault()
                return worker

    async def _watch(self) -> None:
        """Kill workers that hang, and detect that no device has worked for long."""
        beat_s = self._options.heartbeat_timeout_s / MAX_MISSED
        self._failing_s = dict.fromkeys(range(self._devices), 0.0)
        while True:
            await asyncio.sleep(beat_s)
            for index in range(self._devices):
                self._check(index, beat_s)
            self._hub.dead = self._dead()
            self._hub.publish()

    def _check(self, index: int, beat_s: float) -> None:
        worker, failing_s = self.workers.get(index), self._failing_s[index]
        if worker is None or worker.slots == 0:
            self._failing_s[index] = min(failing_s + beat_s, self._options.device_timeout_s)
            return
        if index not in self._hung or worker.finished:
            failing_s = 0.0
        elif worker.busy:
            failing_s = min(failing_s + beat_s, self._options.device_timeout_s)
        else:
            # Idle but responsive: forgive the hang gradually.
            failing_s = max(failing_s - beat_s, 0.0)
        self._failing_s[index] = failing_s
        if failing_s == 0:
            self._hung.discard(index)
        if (why := worker.check(beat_s, self._options.progress_timeout_s)) is not None:
            _log.error("worker %d (process %d) %s; it is ended", index, worker.process_id, why)
            self._hung.add(index)
            worker.end()
            self._hub.children.hung["convgrad-worker"] += 1

    def _dead(self) -> str | None:
        """Return why the server is not live, or None.

        A worker may have hung because of one bad request, so that alone does not make it dead.
        """
        longest_s = self._options.device_timeout_s
        if min(self._failing_s.values()) < longest_s:
            return None
        if self._hub.scheduler.workers and self._hub.dead is None:
            return None
        return f"no device has worked for {longest_s:g} s"

    def _update_fault(self) -> None:
        """Refuse all requests while all devices are broken."""
        broken = self._broken if len(self._broken) >= self._devices else {}
        self._hub.fault = fault = next(iter(broken.values()), None)
        if fault is not None:
            self._hub.scheduler.refuse_all(DeviceUnavailable(f"the device has failed: {fault}"))
