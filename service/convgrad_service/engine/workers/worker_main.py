"""A worker's own process: a backend, the arena, and threads that compute from place to place."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from convgrad.errors import ServiceError
from convgrad_service.backends.base import Cancellation, ServingBackend, Vitals
from convgrad_service.engine.ipc.channel import Pipe
from convgrad_service.engine.ipc.heartbeat import Ping, Pong
from convgrad_service.engine.ipc.interning import Named
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import PackedTensorLayout, TensorLayout
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import InRegion
from convgrad_service.engine.workers.execute import Finished, Job, compile_ahead, run_job
from convgrad_service.thread_priority import give_way

__all__ = [
    "Cancel",
    "Compiled",
    "Compiling",
    "Forget",
    "Hello",
    "NewRegion",
    "Probe",
    "Probed",
    "RunTask",
    "Start",
    "WorkerFailed",
    "worker_main",
]

_log = logging.getLogger("convgrad.worker")


class Start(NamedTuple):
    """What a worker needs to begin; the last four numbers are descriptors that it was given."""

    make_backend: Callable[[int], ServingBackend]
    prepare: Callable[[], None]
    warm_up: Callable[[ServingBackend], None] | None
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


NewRegion = tuple[int, tuple[bytes, int] | None]
"""A region that a worker is to open: its number, and handle and size of one on its device."""


class RunTask(NamedTuple):
    """One job for a worker: see `Job`, whose arrangement goes by a name here.

    The files of ``new_regions`` have been sent before. ``brief`` says that it takes no time worth
    another thread's waiting for the next one meanwhile.
    """

    number: int
    named: Named
    base: int
    regions: tuple[tuple[Any, ...], ...]
    part: int | None
    new_regions: Sequence[NewRegion]
    brief: bool


class Cancel(NamedTuple):
    """Nobody wants a job any more."""

    number: int


class Forget(NamedTuple):
    """No job uses a region any more."""

    region: int


class Probe(NamedTuple):
    """Try to open a handle of the device's memory."""

    number: int
    handle: bytes
    size_bytes: int


class Probed(NamedTuple):
    """How that went."""

    number: int
    error: ServiceError | None


class Compiling(NamedTuple):
    """Of a job, in place of its result: its kernels are being compiled. `Compiled` follows."""


class Compiled(NamedTuple):
    """They are, and the job may be sent again; or they cannot be."""

    error: BaseException | None


# How often the hub is told how the device is, where that has changed.
_VITALS_S = 2.0


_NEVER = threading.Event()


class WorkerFailed(Exception):
    """What a backend raised that is none of the service's errors, with its traceback as text."""

    @classmethod
    def of(cls, error: BaseException) -> WorkerFailed:
        return cls("".join([f"{error!r}\n", *traceback.format_exception(error)]))


def worker_main(start: Start) -> None:
    """Serve until the hub closes its end."""
    control = Pipe(start.control)
    start.prepare()
    try:
        backend = start.make_backend(start.device)
        if start.warm_up is not None:
            start.warm_up(backend)
    except ServiceError as error:
        control.send(error)
        return
    files = socket.socket(fileno=start.files)
    arena = Arena(start.arena)
    backend.adopt(arena.address, arena.size_bytes)
    worker = _Worker(backend, arena, Pipe(start.jobs), control, files)
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
        self,
        backend: ServingBackend,
        arena: Arena,
        jobs: Pipe,
        control: Pipe,
        files: socket.socket,
    ) -> None:
        self._backend, self._arena = backend, arena
        self._jobs, self._control, self._files = jobs, control, files
        self._segments = RegionMappings(backend.open_handle, backend)
        self._arrangements: dict[int, TensorLayout] = {}
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._cancelled: dict[int, Cancellation] = {}
        self._compiling: dict[int, Future[None]] = {}
        # Of arrangements by their names, the parts of which nothing needs to be compiled.
        self._compiled: set[tuple[int, int | None]] = set()
        self._early: set[int] = set()
        self._last = -1

    def serve(self) -> None:
        """Compute one job after another; the hub sends no more than there are such threads.

        What goes wrong with a job is its own error. Should anything else go wrong, the process
        ends: the hub sees that, runs on another worker what this one held, and would never see
        that a thread is missing.
        """
        give_way()
        try:
            self._serve()
        except EOFError:
            return  # the control channel's end says the rest
        except BaseException:  # noqa: BLE001 - whatever it was, the hub must notice
            _log.exception("a thread that computes has failed; the worker ends")
            os._exit(1)

    def _serve(self) -> None:
        while True:
            with self._turn:
                order, opened, cancelled = self._next()
                while order.brief:
                    # Done sooner than another thread would have woken to wait for the next.
                    self._run(order, opened, cancelled)
                    order, opened, cancelled = self._next()
            self._run(order, opened, cancelled)

    def _next(self) -> tuple[RunTask, TensorLayout | ServiceError, threading.Event]:
        order = RunTask(*self._jobs.receive())
        # What is brief is done before anybody could have it stopped.
        cancelled = _NEVER if order.brief else self._begin(order.number)
        return order, self._learn(order), cancelled

    def _run(
        self, order: RunTask, opened: TensorLayout | ServiceError, cancelled: threading.Event
    ) -> None:
        result: Finished | BaseException
        try:
            if isinstance(opened, ServiceError):
                raise opened
            if (compiling := self._compile_ahead(order, opened)) is not None:
                self._put_aside(order.number, compiling)
                return
            job = Job(opened, order.base, tuple(InRegion(*each) for each in order.regions))
            result = run_job(self._backend, self._arena, self._segments, job, cancelled, order.part)
        except ServiceError as error:
            result = error
        # Whatever it was, the request that waits must hear of it.
        except BaseException as error:  # noqa: BLE001
            result = WorkerFailed.of(error)
        if self._backend.fault is not None:
            # Nothing will work here again. Unanswered, the job runs on a fresh worker.
            _log.error("the device has failed: %s", self._backend.fault)
            os._exit(1)
        if not order.brief:
            with self._lock:
                del self._cancelled[order.number]
        # A plain tuple: a class's name takes longer to read than all the rest.
        plain = tuple(result) if isinstance(result, Finished) else result
        self._jobs.send((order.number, plain))

    def _compile_ahead(self, order: RunTask, layout: TensorLayout) -> Future[None] | None:
        key = order.named[0], order.part
        if order.brief or key in self._compiled:
            return None
        compiling = compile_ahead(self._backend, layout, order.part)
        if compiling is None:
            self._compiled.add(key)
        return compiling

    def _put_aside(self, number: int, compiling: Future[None]) -> None:
        """Leave a job until its kernels are compiled, then have the hub send it again."""

        def tell(compiled: Future[None]) -> None:
            with self._lock:
                del self._compiling[number]
            error = None if compiled.cancelled() else compiled.exception()
            if error is not None and not isinstance(error, ServiceError):
                error = WorkerFailed.of(error)
            with contextlib.suppress(OSError):  # the hub has gone
                self._jobs.send((number, Compiled(error)))

        with self._lock:
            cancelled = self._cancelled.pop(number)
            self._compiling[number] = compiling
        self._jobs.send((number, Compiling()))
        if cancelled.is_set():
            compiling.cancel()
        compiling.add_done_callback(tell)

    def told(self, message: Cancel | Forget | Ping | Probe) -> None:
        """Do what the hub says beside jobs."""
        if isinstance(message, Ping):
            with self._lock:
                running = tuple((number, each.progress) for number, each in self._cancelled.items())
            self._control.send(Pong(running))
        elif isinstance(message, Forget):
            self._segments.close(message.region)
            self._backend.forget(message.region)
        elif isinstance(message, Probe):
            self._control.send(Probed(message.number, self._tried(message)))
        else:
            self._cancel(message)

    def _tried(self, probe: Probe) -> ServiceError | None:
        try:
            self._backend.open_handle(probe.handle, probe.size_bytes).close()
        except ServiceError as error:
            return error
        return None

    def _cancel(self, message: Cancel) -> None:
        """Nobody wants a job, which may not have begun or may have ended."""
        with self._lock:
            compiling = self._compiling.get(message.number)
            if message.number in self._cancelled:
                self._cancelled[message.number].set()
            elif message.number > self._last:
                self._early.add(message.number)
        if compiling is not None:
            compiling.cancel()

    def _learn(self, order: RunTask) -> TensorLayout | ServiceError:
        """What is to be computed, with the regions opened whose files or handles came with it; or
        what is wrong with one."""
        refusal = None
        for region, handle in order.new_regions:
            if handle is not None:
                try:
                    self._segments.open_on_device(region, *handle)
                except ServiceError as error:
                    refusal = error
                continue
            _, descriptors, _, _ = socket.recv_fds(self._files, 1, 1)
            if not descriptors:
                # The system drops what a process without a free descriptor is sent. Another worker
                # has all of them free, and is sent every region anew.
                raise OSError(errno.EMFILE, "no descriptor is free for a region")
            try:
                self._segments.open(region, descriptors[0])
            except ServiceError as error:
                refusal = error
            finally:
                os.close(descriptors[0])
        number, text = order.named
        if text is not None:
            self._arrangements[number] = PackedTensorLayout(text).unpacked()
            self._compiled = {key for key in self._compiled if key[0] != number}
        return refusal or self._arrangements[number]

    def _begin(self, number: int) -> threading.Event:
        with self._lock:
            event = self._cancelled[number] = Cancellation()
            self._last = number
            if number in self._early:
                event.set()
            self._early = {early for early in self._early if early > number}
        return event
