"""``convgrad serve`` as processes: the hub here, front ends and workers as its children.

    clients ── HTTP front ends (2..N) ──┐             ┌── worker (a device each)
    clients ── gRPC front end ──────────┴── hub ──────┴── worker

Processes exchange messages along these lines; bodies are in the arena, shared memory that all of
them map. With a single HTTP front end, both front ends run in the hub's process, which makes small
requests faster. Small problems on the CPU are computed in the front end itself, see
`engine.workers.inline_executor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

from convgrad_service.engine.hub import Hub
from convgrad_service.engine.ipc.channel import MAX_MISSED
from convgrad_service.engine.ipc.frontend import FrontEnd
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.options import WorkerRecipe
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.telemetry.metrics import Metrics
from convgrad_service.engine.workers.child_process import Backoff, spawn
from convgrad_service.engine.workers.supervisor import Supervisor
from convgrad_service.server.composition import (
    engine_options,
    freeze_startup_objects,
    worker_recipe,
)
from convgrad_service.server.connection_dispatcher import ConnectionDispatcher, SharedPort
from convgrad_service.server.front_ends import Serve, front_main, serve_grpc, serve_http
from convgrad_service.server.http_server import listening_socket
from convgrad_service.server.metrics import add_connection_metrics, add_metrics, add_process_metrics
from convgrad_service.server.service_manager import ending_signals, notify
from convgrad_service.server.settings import Settings

_log = logging.getLogger("convgrad.serve")

# How long a front end may take beyond the shutdown grace before it is killed.
_EXTRA_GRACE_S = 5.0
_ONE_SIGNAL_S = 0.5


class CannotListen(Exception):
    """A front end could not be started; the message says why."""


class ProcessTree:
    """All processes of one server."""

    def __init__(
        self, settings: Settings, listening: socket.socket, recipe: WorkerRecipe | None = None
    ) -> None:
        self._settings, self._listening = settings, listening
        options = engine_options(settings)
        self.hub = Hub(
            Arena.create(options.arena_bytes),
            Scheduler(options.max_queue, large_s=options.large_s),
            options,
            backend="",
        )
        recipe = recipe or worker_recipe(settings)
        self._inline_backend = recipe.inline_backend
        if recipe.inline_backend is not None:
            self.hub.compute_inline(recipe.inline_backend)
        self.supervisor = Supervisor(self.hub, recipe, options)
        self._fronts: dict[FrontEnd, tuple[str, subprocess.Popen[bytes]]] = {}
        # Tasks of the front ends, in processes of their own or here; and of all that serve here.
        self._front_tasks: list[asyncio.Task[None]] = []
        self.local_tasks: list[asyncio.Task[None]] = []
        self._watchdog: asyncio.Task[None] | None = None
        self._ports: list[ConnectionDispatcher | SharedPort] = []
        self._stop_front_ends = asyncio.Event()
        self._stop_management = asyncio.Event()
        self._metrics: Metrics
        self.management_port: int | None = None
        """The management port, if there is one; set by `start`."""

    @property
    def front_processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the front ends."""
        return [process for _, process in self._fronts.values()]

    @property
    def processes(self) -> dict[str, int]:
        """The process ids by process name."""
        workers = self.supervisor.workers.items()
        return {
            "hub": os.getpid(),
            **{f"worker-{index}": worker.process_id for index, worker in workers},
            **{name.removeprefix("convgrad-"): front.pid for name, front in self._fronts.values()},
        }

    async def start(self) -> int:
        """Start all processes and return the gRPC port.

        Raises
        ------
        DeviceUnavailable
            The backend that the settings name cannot work here.
        CannotListen
            A front end cannot listen on its port.
        """
        # Bound first, so that a port in use fails before anything is started.
        management = self._management_socket()
        grpc_port = await self._start_front_ends()
        ports = {"http": self._listening.getsockname()[1], "grpc": grpc_port}
        if management is not None:
            # Stopped last, so that health and metrics are available while requests finish.
            serve = partial(serve_http, source=management, management=True)
            self.management_port = await self._serve_locally(serve, self._stop_management)
            ports["management"] = self.management_port
        add_connection_metrics(self._metrics, ports)
        return grpc_port

    async def _start_front_ends(self) -> int:
        # All processes start concurrently: most of their start is spent importing modules.
        workers_started = asyncio.ensure_future(self.supervisor.start())
        count = self._settings.http_workers
        if count == 1:
            await workers_started
            self._add_metrics()
            stop = self._stop_front_ends
            grpc_port = await self._serve_locally(serve_grpc, stop)
            await self._serve_locally(partial(serve_http, source=self._listening), stop)
            self._front_tasks += self.local_tasks
            return grpc_port
        shared = self._shared_port()
        serve = partial(serve_grpc, shared_port=shared.number)
        grpc = self._start_front("convgrad-grpc", serve, shared)
        dispatcher = ConnectionDispatcher(self._listening)
        self._ports += [shared, dispatcher]
        http = [
            self._start_front(f"convgrad-http-{number}", serve_http, dispatcher)
            for number in range(count)
        ]
        self._watchdog = asyncio.ensure_future(self._kill_silent_front_ends())
        await asyncio.gather(workers_started, grpc, *http)
        self._add_metrics()
        return grpc.result()

    async def stop(self) -> None:
        """Report not ready for ``drain_s``, then refuse new requests, let running ones finish, and
        end all processes."""
        self.hub.leaving = True
        self.hub.publish()
        await asyncio.sleep(self._settings.drain_s)
        self.hub.draining = True
        self.hub.publish()
        self._stop_front_ends.set()
        for port in self._ports:
            port.close()
        for front in self._fronts:
            front.drain()
        if self._front_tasks:
            grace_s = self._settings.shutdown_grace_s + _EXTRA_GRACE_S
            await asyncio.wait(self._front_tasks, timeout=grace_s)
        self._stop_management.set()
        if self.local_tasks:
            await asyncio.wait(self.local_tasks, timeout=_EXTRA_GRACE_S)
        await self.kill()

    async def kill(self) -> None:
        """End all processes immediately."""
        self.hub.draining = True
        for task in (*self.local_tasks, *self._front_tasks, self._watchdog):
            if task is not None:
                task.cancel()
        await asyncio.gather(*self.local_tasks, *self._front_tasks, return_exceptions=True)
        for port in self._ports:
            port.close()
        self.hub.close()
        await self.supervisor.stop()

    def _add_metrics(self) -> None:
        self._metrics = add_metrics(self.hub)
        add_process_metrics(self._metrics, lambda: self.processes)

    def _management_socket(self) -> socket.socket | None:
        host, port = self._settings.http_host, self._settings.management_port
        if port is None:
            return None
        try:
            return listening_socket(host, port)
        except OSError as error:
            where = f"{host}:{port}"
            raise CannotListen(f"cannot listen on {where} for management: {error}") from None

    def _shared_port(self) -> SharedPort:
        host, port = self._settings.http_host, self._settings.grpc_port
        try:
            return SharedPort(listening_socket(host, port))
        except OSError as error:
            raise CannotListen(f"gRPC cannot listen on {host}:{port}: {error}") from None

    async def _serve_locally(self, serve: Serve, stop: asyncio.Event) -> int:
        """Serve in this process until ``stop`` is set; return the port once it listens."""
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(serve(self.hub, self._settings, port.set_result, stop))
        self.local_tasks.append(serving)
        either: set[asyncio.Future[Any]] = {port, serving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not port.done():
            try:
                await serving
            except OSError as error:
                raise CannotListen(str(error)) from None
            raise CannotListen("a front end ended during its start")
        return port.result()

    def _start_front(
        self, name: str, serve: Serve, dispatcher: ConnectionDispatcher | SharedPort
    ) -> asyncio.Future[int]:
        """Start a front end in its own process; return its future port."""
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        supervising = self._supervise_front(name, serve, dispatcher, port)
        self._front_tasks.append(asyncio.ensure_future(supervising))
        return port

    async def _supervise_front(
        self,
        name: str,
        serve: Serve,
        dispatcher: ConnectionDispatcher | SharedPort,
        port: asyncio.Future[int],
    ) -> None:
        """Run a front end, and restart it when it ends, until the server drains."""
        backoff, children = Backoff(), self.hub.children

        def on_listening(number: int, failure: str | None) -> None:
            if failure is None:
                backoff.succeeded()
                children.serves(name)
            if port.done():
                return
            if failure is None:
                port.set_result(number)
            else:
                port.set_exception(CannotListen(failure))

        while not self.hub.draining:
            try:
                status = await self._run_front(name, serve, dispatcher, on_listening)
                ended = f"ended with {status}"
                children.ended[name] += 1
            # Any error is retried: otherwise no process would serve the port again.
            except Exception as error:  # noqa: BLE001
                ended = f"cannot start: {error}"
                children.failed_starts[name] += 1
            if not port.done():
                port.set_exception(CannotListen(f"{name} {ended} during its start"))
            if not self.hub.draining:
                children.lost(name)
                pause_s = backoff.failed()
                _log.error("%s %s; restarting it in %g s", name, ended, pause_s)
                await asyncio.sleep(pause_s)

    async def _kill_silent_front_ends(self) -> None:
        """Kill front ends whose heartbeats have stopped; `_supervise_front` restarts them."""
        beat_s = self._settings.heartbeat_timeout_s / MAX_MISSED
        while True:
            await asyncio.sleep(beat_s)
            for front, (name, process) in self._fronts.items():
                if (why := front.check(beat_s)) is not None:
                    _log.error("killing %s: %s", name, why)
                    self.hub.children.hung[name] += 1
                    process.kill()

    async def _run_front(
        self,
        name: str,
        serve: Serve,
        dispatcher: ConnectionDispatcher | SharedPort,
        on_listening: Callable[[int, str | None], None],
    ) -> int:
        """Start a front end's process, serve its messages until it ends, return its exit status.

        Raises OSError if the process cannot be started.
        """
        arena = self.hub.arena.descriptor
        with self.supervisor.reserve.spent():
            process, (channel, connections) = spawn(
                name,
                front_main,
                *(self._settings, serve, self._inline_backend, arena),
                descriptors=[arena],
                # SOCK_SEQPACKET keeps messages apart: each is one connection.
                sockets=[socket.SOCK_STREAM, socket.SOCK_SEQPACKET],
            )

        def listens(port: int, failure: str | None) -> None:
            if failure is None:
                dispatcher.add(connections)
            on_listening(port, failure)

        front = FrontEnd(self.hub, on_listening=listens)
        self._fronts[front] = name, process
        try:
            await front.serve(channel)
        finally:
            dispatcher.remove(connections)
            del self._fronts[front]
            process.kill()
            status = await asyncio.to_thread(process.wait)
        return status


async def run_until_signalled(tree: ProcessTree, started: Callable[[int], None]) -> None:
    """Serve until one of `ending_signals`, then let running requests finish unless another arrives.

    Signals within `_ONE_SIGNAL_S` count as one: timeout(1) sends one to the process and one to its
    group.

    ``started`` is called with the gRPC port once everything listens. Raises like
    `ProcessTree.start`.
    """
    signals = asyncio.Queue[None]()
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, signals.put_nowait, None)
    starting = asyncio.ensure_future(tree.start())
    first = asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait({starting, first}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            port = starting.result()
            freeze_startup_objects()
            started(port)
            notify("READY=1")
            await asyncio.wait({first, *tree.local_tasks}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                # Better no process than one that lives and serves nothing.
                await asyncio.gather(*(task for task in tree.local_tasks if task.done()))
                raise RuntimeError("a front end has ended")
            notify("STOPPING=1")
            stopping = asyncio.ensure_future(tree.stop())
            second = asyncio.ensure_future(_another(signals))
            await asyncio.wait({stopping, second}, return_when=asyncio.FIRST_COMPLETED)
            second.cancel()
            stopping.cancel()
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await starting
        await tree.kill()


async def _another(signals: asyncio.Queue[None]) -> None:
    await asyncio.sleep(_ONE_SIGNAL_S)
    while not signals.empty():
        signals.get_nowait()
    await signals.get()
