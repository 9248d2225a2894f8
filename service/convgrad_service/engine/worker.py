"""A worker's own process: a backend, the arena, and threads that compute from place to place."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from convgrad.errors import ServiceError
from convgrad_service.backends.base import ServingBackend, Vitals
from convgrad_service.engine.arena import Arena
from convgrad_service.engine.channel import Pipe
from convgrad_service.engine.jobs import Finished, Job, run_job
from convgrad_service.engine.segments import Segments
from convgrad_service.priority import give_way

__all__ = ["Cancel", "Forget", "Hello", "Start", "WorkerFailed", "worker_main"]

_log = logging.getLogger("convgrad.worker")


class Start(NamedTuple):
    """What a worker needs to begin; the last four numbers are descriptors that it was given."""

    make_backend: Callable[[int], ServingBackend]
    prepare: Callable[[], None]
    device: int
    slots: int | None
    arena: int
    jobs: int
    control: int
    files: int


class Hello(NamedTuple):
    """A worker is ready to compute, so many jobs at a time.

    There are ``devices`` like its own, itself included; ``pins`` says that what it has used of the
    arena may not be given back to the system.
    """

    backend: str
    slots: int
    devices: int
    pins: bool


class Cancel(NamedTuple):
    """Nobody wants a job any more."""

    number: int


class Forget(NamedTuple):
    """No job uses a region any more."""

    region: int


# How often the hub is told how the device is, where that has changed.
_VITALS_S = 2.0


class WorkerFailed(Exception):
    """What a backend raised that is none of the service's errors, with its traceback as text."""


def worker_main(start: Start) -> None:
    """Serve until the hub closes its end."""
    control = Pipe(start.control)
    start.prepare()
    try:
        backend = start.make_backend(start.device)
    except ServiceError as error:
        control.send(error)
        return
    files = socket.socket(fileno=start.files)
    arena = Arena(start.arena)
    backend.adopt(arena.address, arena.size_bytes)
    worker = _Worker(backend, arena, Pipe(start.jobs), files)
    slots = start.slots or backend.slots
    for index in range(slots):
        threading.Thread(target=worker.serve, name=f"compute-{index}", daemon=True).start()
    control.send(Hello(backend.name, slots, backend.devices, backend.pins))
    threading.Thread(target=_tell_vitals, args=(backend, control), daemon=True).start()
    try:
        while True:
            worker.told(control.receive())
    except EOFError:
        # Whatever still computes is of no use to anybody.
        os._exit(0)


def _tell_vitals(backend: ServingBackend, control: Pipe) -> None:
    told: Vitals | None = None
    while backend.fault is None:
        vitals = backend.vitals()
        if vitals != told:
            try:
                control.send(vitals)
            except OSError:
                return  # the hub has gone
            told = vitals
        time.sleep(_VITALS_S)


class _Worker:
    def __init__(
        self, backend: ServingBackend, arena: Arena, jobs: Pipe, files: socket.socket
    ) -> None:
        self._backend, self._arena, self._jobs, self._files = backend, arena, jobs, files
        self._segments = Segments(backend)
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._cancelled: dict[int, threading.Event] = {}
        self._early: set[int] = set()
        self._last = -1

    def serve(self) -> None:
        """Compute one job after another; the hub sends no more than there are such threads."""
        give_way()
        while True:
            with self._turn:
                try:
                    number, packed, part, new_regions = self._jobs.receive()
                except EOFError:
                    return  # the control channel's end says the rest
                cancelled = self._begin(number)
                refusal = self._open(new_regions)
            result: Finished | BaseException
            try:
                if refusal is not None:
                    raise refusal
                job: Job = pickle.loads(packed)  # noqa: S301 - from the hub
                result = run_job(self._backend, self._arena, self._segments, job, cancelled, part)
            except ServiceError as error:
                result = error
            # Whatever it was, the request that waits must hear of it.
            except BaseException as error:  # noqa: BLE001
                result = WorkerFailed(f"{error!r}\n{traceback.format_exc()}")
            if self._backend.fault is not None:
                # Nothing will work here again. Unanswered, the job runs on a fresh worker.
                _log.error("the device has failed: %s", self._backend.fault)
                os._exit(1)
            with self._lock:
                del self._cancelled[number]
            self._jobs.send((number, result))

    def told(self, message: Cancel | Forget) -> None:
        """Pass on that nobody wants a job, which may not have begun or may have ended."""
        if isinstance(message, Forget):
            self._segments.close(message.region)
            return
        with self._lock:
            if message.number in self._cancelled:
                self._cancelled[message.number].set()
            elif message.number > self._last:
                self._early.add(message.number)

    def _open(self, regions: Sequence[int]) -> ServiceError | None:
        """Map regions whose files the hub has sent for this job; what is wrong with one, if so."""
        refusal = None
        for region in regions:
            _, descriptors, _, _ = socket.recv_fds(self._files, 1, 1)
            try:
                self._segments.open(region, descriptors[0])
            except ServiceError as error:
                refusal = error
            finally:
                os.close(descriptors[0])
        return refusal

    def _begin(self, number: int) -> threading.Event:
        with self._lock:
            event = self._cancelled[number] = threading.Event()
            self._last = number
            if number in self._early:
                self._early.discard(number)
                event.set()
        return event
