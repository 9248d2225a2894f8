"""A worker: the main program of its process, and how it runs a job on tensors in shared memory.

Rare kinds of jobs, in parts or on shared memory of clients, have their arrays from `parts`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import socket
import threading
import time
import traceback
from concurrent.futures import Future

import numpy as np

from convgrad.errors import InvalidProblem, ServiceError
from convgrad_service.backends.base import Cancellation, ServingBackend, Vitals
from convgrad_service.engine.ipc.channel import (
    Cancel,
    Compiled,
    Compiling,
    Forget,
    Hello,
    Ping,
    Pipe,
    Pong,
    Probe,
    ProbeResult,
    RunTask,
)
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import TensorLayout, unpack_layout
from convgrad_service.engine.options import WorkerRecipe
from convgrad_service.engine.scheduling.job import Job, JobResult, not_in_place_of, result_of
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.workers.parts import (
    Arrays,
    job_arrays,
    pieces_of_part,
    run_pieces,
    use_resident,
)
from convgrad_service.examination import examined
from convgrad_service.process import lower_priority, set_switch_interval, without_traceback

_log = logging.getLogger("convgrad.worker")
# How often the device's vitals are read, and sent to the hub if they have changed.
_VITALS_S = 2.0
# The interpreter lets a thread that plans a new problem hold others up for this long; its default
# of 5 ms is longer than most requests take.
_SWITCH_S = 2e-5


class WorkerFailed(Exception):
    """An unexpected error of a backend, with its traceback as text."""

    @classmethod
    def of(cls, error: BaseException) -> WorkerFailed:
        return cls("".join([f"{error!r}\n", *traceback.format_exception(error)]))


def worker_main(
    recipe: WorkerRecipe, device: int, arena_file: int, jobs: int, control_end: int, files: int
) -> None:
    """Compute tasks until the hub closes the control channel.

    The last four are descriptors: of the arena, and of the sockets for tasks, for other messages,
    and for the files of regions.
    """
    control = Pipe(control_end)
    set_switch_interval(_SWITCH_S)
    recipe.prepare()
    try:
        backend = recipe.make_backend(device)
        if recipe.warm_up is not None:
            recipe.warm_up(backend)
    except ServiceError as error:
        control.send(error)
        return
    arena = Arena(arena_file)
    backend.adopt(arena.address, arena.size_bytes)
    worker = _Worker(backend, arena, Pipe(jobs), control, socket.socket(fileno=files))
    slots = recipe.slots or backend.slots
    for index in range(slots):
        threading.Thread(target=worker.serve, name=f"compute-{index}", daemon=True).start()
    # Everything allocated so far stays alive, so the garbage collector need not scan it.
    gc.freeze()
    control.send(Hello(backend.name, slots, backend.devices, backend.pins))
    threading.Thread(target=_send_vitals, args=(backend, control), daemon=True).start()
    try:
        while True:
            worker.handle_control(control.receive())
    except EOFError:
        # Nobody needs the tasks that are still running.
        os._exit(0)


def _send_vitals(backend: ServingBackend, control: Pipe) -> None:
    last: Vitals | None = None
    while backend.fault is None:
        vitals = backend.vitals()
        if vitals != last:
            try:
                control.send(vitals)
            except OSError:
                return  # the hub is gone
            last = vitals
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
        self._mappings = RegionMappings(backend)
        self._layouts: dict[int, TensorLayout] = {}
        self._receiving = threading.Lock()
        # Guards the attributes below, except for `_compiled`.
        self._lock = threading.Lock()
        self._running: dict[int, Cancellation] = {}
        self._compiling: dict[int, Future[None]] = {}
        # (interned layout, part) that need no compilation.
        self._compiled: set[tuple[int, int | None]] = set()
        # Tasks that were cancelled before they were received; control messages may overtake tasks.
        self._cancelled_early: set[int] = set()
        self._last_number = -1

    def serve(self) -> None:
        """Compute tasks in this thread; the hub sends no more at a time than there are threads.

        Errors of a task are its result. On any other error the process exits, so that the hub runs
        its tasks elsewhere; a missing thread would go unnoticed.
        """
        lower_priority()
        try:
            self._serve()
        except EOFError:
            return  # the main thread notices the closed control channel
        except BaseException:  # noqa: BLE001 - the hub must notice any error
            _log.exception("a thread that computes has failed; the worker ends")
            os._exit(1)

    def _serve(self) -> None:
        while True:
            with self._receiving:
                task, layout, cancelled = self._next()
                while task.brief:
                    # It takes less time than waking another thread to receive the next task.
                    self._run(task, layout, cancelled)
                    task, layout, cancelled = self._next()
            self._run(task, layout, cancelled)

    def _next(self) -> tuple[RunTask, TensorLayout | ServiceError, threading.Event | None]:
        task = RunTask(*self._jobs.receive())
        return task, self._open(task), self._register(task)

    def _run(
        self,
        task: RunTask,
        layout: TensorLayout | ServiceError,
        cancelled: threading.Event | None,
    ) -> None:
        result: JobResult | BaseException
        try:
            if isinstance(layout, ServiceError):
                raise layout
            if (compiling := self._compile_ahead(task, layout)) is not None:
                self._suspend(task.number, compiling)
                return
            job = Job(layout, task.base, task.regions)
            result = run_job(self._backend, self._arena, self._mappings, job, cancelled, task.part)
        except ServiceError as error:
            result = without_traceback(error)
        # Any error must reach the waiting request.
        except BaseException as error:  # noqa: BLE001
            result = WorkerFailed.of(error)
        if self._backend.fault is not None:
            # The device is lost for this process. Without a reply, the hub runs the task elsewhere.
            _log.error("the device has failed: %s", self._backend.fault)
            os._exit(1)
        if not task.brief:
            with self._lock:
                del self._running[task.number]
        self._jobs.send((task.number, tuple(result) if isinstance(result, JobResult) else result))

    def _compile_ahead(self, task: RunTask, layout: TensorLayout) -> Future[None] | None:
        key = task.interned[0], task.part
        if task.brief or key in self._compiled:
            return None
        compiling = compile_ahead(self._backend, layout, task.part)
        if compiling is None:
            self._compiled.add(key)
        return compiling

    def _suspend(self, number: int, compiling: Future[None]) -> None:
        """Give up a task while its kernels are compiled; the hub sends it again afterwards."""

        def report(compiled: Future[None]) -> None:
            with self._lock:
                del self._compiling[number]
            error = None if compiled.cancelled() else compiled.exception()
            if error is not None and not isinstance(error, ServiceError):
                error = WorkerFailed.of(error)
            with contextlib.suppress(OSError):  # the hub is gone
                self._jobs.send((number, Compiled(error)))

        with self._lock:
            cancelled = self._running.pop(number)
            self._compiling[number] = compiling
        self._jobs.send((number, Compiling()))
        if cancelled.is_set():
            compiling.cancel()
        compiling.add_done_callback(report)

    def handle_control(self, message: Cancel | Forget | Ping | Probe) -> None:
        """Handle a message of the control channel."""
        if isinstance(message, Ping):
            with self._lock:
                running = tuple((number, each.progress) for number, each in self._running.items())
            self._control.send(Pong(running))
        elif isinstance(message, Forget):
            self._mappings.close(message.region)
            self._backend.forget(message.region)
        elif isinstance(message, Probe):
            self._control.send(ProbeResult(message.number, self._probe(message)))
        else:
            self._cancel(message.number)

    def _probe(self, probe: Probe) -> ServiceError | None:
        try:
            self._backend.open_handle(probe.handle, probe.size_bytes).close()
        except ServiceError as error:
            return error
        return None

    def _cancel(self, number: int) -> None:
        """Stop a task, which may not have arrived yet or may be done."""
        with self._lock:
            compiling = self._compiling.get(number)
            if number in self._running:
                self._running[number].set()
            elif number > self._last_number:
                self._cancelled_early.add(number)
        if compiling is not None:
            compiling.cancel()

    def _open(self, task: RunTask) -> TensorLayout | ServiceError:
        """Open a task's new regions and return its layout, or the error of a region."""
        refusal = None
        for region, handle, end in task.new_regions:
            if handle is not None:
                try:
                    self._mappings.open_on_device(region, handle, end)
                except ServiceError as error:
                    refusal = error
                continue
            _, descriptors, _, _ = socket.recv_fds(self._files, 1, 1)
            if not descriptors:
                # Out of descriptors, so the kernel dropped the file. Exit: a new worker starts with
                # free descriptors and gets every region again.
                raise OSError(errno.EMFILE, "no descriptor is free for a region")
            try:
                self._mappings.open(region, descriptors[0], end)
            except ServiceError as error:
                refusal = error
            finally:
                os.close(descriptors[0])
        slot, packed = task.interned
        if packed is not None:
            self._layouts[slot] = unpack_layout(packed)
            self._compiled = {key for key in self._compiled if key[0] != slot}
        return refusal or self._layouts[slot]

    def _register(self, task: RunTask) -> threading.Event | None:
        """Return the task's cancellation; None if it is brief, and done before it is cancelled."""
        event = None if task.brief else Cancellation()
        with self._lock:
            self._last_number = task.number
            if event is not None:
                self._running[task.number] = event
                if task.number in self._cancelled_early:
                    event.set()
            if self._cancelled_early:
                early = self._cancelled_early
                self._cancelled_early = {each for each in early if each > task.number}
        return event


def compile_ahead(
    backend: ServingBackend, layout: TensorLayout, part: int | None = None
) -> Future[None] | None:
    """Start compiling what `run_job` needs; see `ServingBackend.compile_ahead`."""
    if layout.parts == 1:
        return backend.compile_ahead(layout.problem.computes)
    pieces = pieces_of_part(layout, part).values()
    return backend.compile_ahead([piece.problem for piece in pieces])


def run_job(
    backend: ServingBackend,
    arena: Arena,
    mappings: RegionMappings,
    job: Job,
    cancelled: threading.Event | None = None,
    part: int | None = None,
) -> JobResult:
    """Compute a job, or one ``part`` of it, in the calling thread.

    Its regions must be open. The part after the last piece adds up partial sums.

    Raises what the backend raises, and InvalidProblem if a client truncated its shared memory.
    """
    layout = job.layout
    pieces = {} if layout.parts == 1 else pieces_of_part(layout, part)
    inputs, outputs = job_arrays(arena, mappings, job)
    not_direct = frozenset[str]()
    if job.regions:
        use_resident(backend, job, pieces, inputs, outputs)
        not_direct = not_in_place_of(layout, job.regions)
    # Rarely, kernels cannot use a tensor where it is: they get a copy, or compute into one.
    targets = dict(outputs)
    for name in not_direct & outputs.keys():
        if not isinstance(outputs[name], np.ndarray):
            raise InvalidProblem(f"the output {name} overlaps another tensor of the request")
        targets[name] = np.empty_like(outputs[name])
    if layout.parts == 1:
        own = {
            name: array.copy() if name in not_direct else array for name, array in inputs.items()
        }
        outcome = examined(backend, layout.problem, own, cancelled, targets)
        computed: Arrays = outcome.outputs
        result = result_of(outcome)
    else:
        computed, result = run_pieces(
            backend, arena, layout, job.base, pieces, part, inputs, not_direct, targets, cancelled
        )
    for name, target in outputs.items():
        # Backends may compute elsewhere, but most use the target they are given.
        if computed[name] is target:
            continue
        if isinstance(target, np.ndarray):
            np.copyto(target, computed[name], casting="no")
        else:
            target.fill(computed[name])
    if job.regions:
        mappings.check({each.region for each in job.regions})
    return result
