"""``convgrad serve`` as processes: the hub here, front ends and workers as its children.

    clients ── HTTP front ends (2..N) ──┐             ┌── worker (a device each)
    clients ── gRPC front end ──────────┴── hub ──────┴── worker

Messages go along the lines; bodies lie in the arena, which all of them map. With a single HTTP
front end, it and gRPC's have no processes of their own but the hub's: a small request is answered
sooner without another process on its way. A small problem on the CPU goes no further than the
process that was asked, see `engine.workers.inline_executor`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from convgrad_service.engine.hub import Hub
from convgrad_service.engine.ipc.channel import MAX_MISSED
from convgrad_service.engine.ipc.frontend import FrontEnd
from convgrad_service.engine.ipc.messages import Listening
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.telemetry.metrics import Metrics
from convgrad_service.engine.workers.child_process import Backoff, spawn
from convgrad_service.engine.workers.supervisor import Supervisor
from convgrad_service.engine.workers.worker_main import WorkerRecipe
from convgrad_service.server.composition import count_in, engine_options, worker_recipe
from convgrad_service.server.connection_dispatcher import ConnectionDispatcher
from convgrad_service.server.front_ends import (
    FrontStart,
    grpc_main,
    http_main,
    serve_grpc,
    serve_http,
    serve_management,
)
from convgrad_service.server.http_server import listening_socket
from convgrad_service.server.process_metrics import count_connections, count_processes
from convgrad_service.server.settings import Settings

__all__ = ["CannotListen", "Tree"]

_log = logging.getLogger("convgrad.serve")

# What a front end may take beyond its grace before it is ended.
_PATIENCE_S = 5.0


_Serve = Callable[[Hub, Settings, Callable[[int], None], asyncio.Event], Coroutine[Any, Any, None]]


class CannotListen(Exception):
    """A front end could not be started; the sentence says why."""


class Tree:
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
        self._beside = recipe.inline_backend
        if recipe.inline_backend is not None:
            self.hub.compute_inline(recipe.inline_backend)
        self.supervisor = Supervisor(self.hub, recipe, options)
        self._fronts: dict[FrontEnd, tuple[str, subprocess.Popen[bytes]]] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._here: list[asyncio.Task[None]] = []
        self._watching: asyncio.Task[None] | None = None
        self._exiting = asyncio.Event()
        self._metrics: Metrics
        self.management_port: int | None = None
        """Where health and metrics are answered, if they have a port of their own."""

    @property
    def front_processes(self) -> list[subprocess.Popen[bytes]]:
        """The front ends' processes."""
        return [process for _, process in self._fronts.values()]

    @property
    def processes(self) -> dict[str, int]:
        """The ids of all processes, by name."""
        workers = self.supervisor.workers.items()
        return {
            "hub": os.getpid(),
            **{f"worker-{index}": worker.process_id for index, worker in workers},
            **{name.removeprefix("convgrad-"): front.pid for name, front in self._fronts.values()},
        }

    async def start(self) -> int:
        """Start everything; the gRPC port.

        Raises
        ------
        DeviceUnavailable
            The backend that the settings name cannot work here.
        CannotListen
            A front end cannot listen where it should.
        """
        # A port that is taken is found out before anything has been started.
        managing = self._management_socket()
        grpc_port = await self._start_front_ends()
        ports = {"http": self._listening.getsockname()[1], "grpc": grpc_port}
        if managing is not None:
            # Ended only when nothing is left to be said of this server.
            serve = partial(serve_management, listening=managing)
            self.management_port = await self._serve_here(serve, ended=self._exiting)
            ports["management"] = self.management_port
        count_connections(self._metrics, ports)
        return grpc_port

    async def _start_front_ends(self) -> int:
        # All at once: what each process imports takes longer than anything else here.
        working = asyncio.ensure_future(self.supervisor.start())
        workers = self._settings.http_workers
        if workers == 1:
            await working
            self._count()
            grpc_port = await self._serve_here(serve_grpc)
            await self._serve_here(partial(serve_http, listening=self._listening))
            return grpc_port
        grpc = self._front("convgrad-grpc", grpc_main, None)
        dealer = ConnectionDispatcher(self._listening)
        others = [
            self._front(f"convgrad-http-{number}", http_main, dealer) for number in range(workers)
        ]
        self._watching = asyncio.ensure_future(self._watch())
        await asyncio.gather(working, grpc, *others)
        self._count()
        return grpc.result()

    async def stop(self) -> None:
        """Be not ready for as long as the settings say, then take no more requests, let the front
        ends finish what they have, and end every process."""
        self.hub.leaving = True
        self.hub.publish()
        await asyncio.sleep(self._settings.drain_s)
        self.hub.draining = True
        self.hub.publish()
        self._ended.set()
        for front in self._fronts:
            front.drain()
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=self._settings.shutdown_grace_s + _PATIENCE_S)
        self._exiting.set()
        if self._here:
            await asyncio.wait(self._here, timeout=_PATIENCE_S)
        await self.kill()

    async def kill(self) -> None:
        """End every process now."""
        self.hub.draining = True
        for task in (*self._here, self._watching):
            if task is not None:
                task.cancel()
        for process in self.front_processes:
            process.kill()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        self.hub.close()
        await self.supervisor.stop()

    def _count(self) -> None:
        self._metrics = count_in(self.hub)
        count_processes(self._metrics, lambda: self.processes)

    def _management_socket(self) -> socket.socket | None:
        host, port = self._settings.http_host, self._settings.management_port
        if port is None:
            return None
        try:
            return listening_socket(host, port)
        except OSError as error:
            where = f"{host}:{port}"
            raise CannotListen(f"cannot listen on {where} for management: {error}") from None

    async def _serve_here(self, serve: _Serve, *, ended: asyncio.Event | None = None) -> int:
        """Serve in this process; return the port once it listens.

        What is given an event to end at of its own is not waited for when the server stops.
        """
        listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(
            serve(self.hub, self._settings, listens.set_result, ended or self._ended)
        )
        self._here.append(serving)
        if ended is None:
            self._keeping.append(serving)
        either: set[asyncio.Future[Any]] = {listens, serving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not listens.done():
            try:
                await serving
            except OSError as error:
                raise CannotListen(str(error)) from None
            raise CannotListen("a front end ended as it started")
        return listens.result()

    def _front(
        self, name: str, target: Callable[[FrontStart], None], dealer: ConnectionDispatcher | None
    ) -> asyncio.Future[int]:
        listens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._keeping.append(asyncio.ensure_future(self._keep(name, target, dealer, listens)))
        return listens

    async def _keep(
        self,
        name: str,
        target: Callable[[FrontStart], None],
        dealer: ConnectionDispatcher | None,
        listens: asyncio.Future[int],
    ) -> None:
        """Keep one front end alive until the server ends; ``dealer`` has its connections."""
        backoff, children = Backoff(), self.hub.children

        def heard(message: Listening) -> None:
            if message.failure is None:
                backoff.succeeded()
                children.serves(name)
            if listens.done():
                return
            if message.failure is None:
                listens.set_result(message.port)
            else:
                listens.set_exception(CannotListen(message.failure))

        while not self.hub.draining:
            try:
                ended = f"ended with {await self._run_front(name, target, dealer, heard)}"
                children.ended[name] += 1
            # Whatever it was: without another try its port would be gone for good.
            except Exception as error:  # noqa: BLE001
                ended = f"cannot start: {error}"
                children.failed_starts[name] += 1
            if not listens.done():
                listens.set_exception(CannotListen(f"{name} {ended}, as it started"))
            if not self.hub.draining:
                children.lost(name)
                pause_s = backoff.failed()
                _log.error("%s %s; it is started again in %g s", name, ended, pause_s)
                await asyncio.sleep(pause_s)

    async def _watch(self) -> None:
        """End front ends that are silent; `_keep` starts them again."""
        beat_s = self._settings.heartbeat_timeout_s / MAX_MISSED
        while True:
            await asyncio.sleep(beat_s)
            for front, (name, process) in self._fronts.items():
                if front.is_silent():
                    timeout_s = self._settings.heartbeat_timeout_s
                    _log.error("%s has been silent for %g s; it is ended", name, timeout_s)
                    self.hub.children.hung[name] += 1
                    process.kill()

    async def _run_front(
        self,
        name: str,
        target: Callable[[FrontStart], None],
        dealer: ConnectionDispatcher | None,
        heard: Callable[[Listening], None],
    ) -> int:
        """Start one front end and serve it until its process has ended; its exit code.

        Raises OSError where the system has not what a process takes.
        """
        arena = self.hub.arena.descriptor
        with self.supervisor.reserve.spent(), contextlib.ExitStack() as failing:
            with contextlib.ExitStack() as theirs:
                ours, channel = socket.socketpair()
                failing.enter_context(ours)
                theirs.enter_context(channel)
                # Each message is one connection.
                dealt, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                failing.enter_context(dealt)
                theirs.enter_context(taken)
                numbers = channel.fileno(), taken.fileno()
                start = FrontStart(self._settings, arena, *numbers, self._beside)
                process = spawn(name, target, start, descriptors=[arena, *numbers])
            failing.pop_all()

        def listening(message: Listening) -> None:
            if dealer is not None:
                dealer.add(dealt)
            heard(message)

        front = FrontEnd(self.hub, on_listening=listening)
        self._fronts[front] = name, process
        try:
            await front.serve(ours)
        finally:
            if dealer is not None:
                dealer.remove(dealt)
            dealt.close()
            del self._fronts[front]
            process.kill()
            code = await asyncio.to_thread(process.wait)
        return code


async def run_until_signalled(tree: Tree, started: Callable[[int], None]) -> None:
    """Serve until SIGINT or SIGTERM, which lets requests finish; a second one does not.

    ``started`` is called with the gRPC port once everything listens. Raises as `Tree.start`.
    """
    signals = asyncio.Queue[None]()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, None)
    starting = asyncio.ensure_future(tree.start())
    asked = asyncio.ensure_future(signals.get())
    try:
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            started(starting.result())
            await asked
            stopping = asyncio.ensure_future(tree.stop())
            again = asyncio.ensure_future(signals.get())
            await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
            again.cancel()
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await starting
        await tree.kill()
