"""A whole tree of processes, with its hub in the test's own: to look inside, and to kill things."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.options import InlineBackend, WorkerRecipe
from convgrad_service.server.http_server import listening_socket
from convgrad_service.server.process_tree import ProcessTree
from convgrad_service.server.settings import Settings

__all__ = ["LONGEST_S", "TreeServer", "alive", "descriptors", "serving_tree", "until"]

# What takes longer than this on a machine with much else to do never comes.
LONGEST_S = 60.0


@dataclass(frozen=True)
class TreeServer:
    """Its addresses, and the objects inside it."""

    url: str
    grpc: str
    tree: ProcessTree

    @property
    def worker_id(self) -> int | None:
        """The process of the first worker, while there is one."""
        worker = self.tree.supervisor.workers.get(0)
        return None if worker is None else worker.process_id

    @property
    def held_bytes(self) -> int:
        """The bytes of the arena that requests and the front ends' local pools hold."""
        return self.tree.hub.memory.used_bytes + self.tree.hub.texts.used_bytes

    def settled_bytes(self) -> int:
        """The bytes that are held without any request: the front ends' local pools."""
        # A place is given back a moment after its answer has left.
        seen = [self.held_bytes]
        while len(seen) < 40 or len(set(seen[-40:])) > 1:
            time.sleep(0.005)
            seen.append(self.held_bytes)
        return seen[-1]

    def kill_worker(self) -> None:
        """Kill the first worker, and wait until another has taken its place."""
        until(lambda: self.worker_id is not None)
        killed = self.worker_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        until(lambda: self.worker_id not in (None, killed))

    def children(self) -> list[int]:
        """The processes of the server but the hub's."""
        workers = [worker.process_id for worker in self.tree.supervisor.workers.values()]
        return [*workers, *(process.pid for process in self.tree.front_processes)]


@contextmanager
def serving_tree(
    make_backend: Callable[[int], ServingBackend],
    *,
    slots: int = 2,
    beside: InlineBackend | None = None,
    warm_up: Callable[[ServingBackend], None] | None = None,
    **settings: Any,
) -> Iterator[TreeServer]:
    """A server of several processes whose workers compute with this backend.

    ``make_backend`` is a function of a module, for it is called in another process; so is what
    makes ``beside``, which computes on the spot.
    """
    chosen = Settings(http_port=0, **{"grpc_port": 0, "log_level": "error", **settings})
    started = threading.Event()
    ending: list[Callable[[], object]] = []
    failures: list[BaseException] = []
    grpc_ports: list[int] = []
    with listening_socket(chosen.http_host, 0) as bound:
        tree = ProcessTree(
            chosen, bound, WorkerRecipe(make_backend, slots, inline_backend=beside, warm_up=warm_up)
        )

        async def serve() -> None:
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            ending.append(lambda: loop.call_soon_threadsafe(ended.set))
            try:
                grpc_ports.append(await tree.start())
                started.set()
                await ended.wait()
                await tree.stop()
            finally:
                await tree.kill()

        def run() -> None:
            try:
                uvloop.run(serve())
            except BaseException as error:  # noqa: BLE001 - the test is to fail of it
                failures.append(error)
                started.set()

        # Its children end with the thread that started them, so it lasts as long as they do.
        thread = threading.Thread(target=run)
        thread.start()
        try:
            # Only pytest ends it early: imports alone take a minute on a busy machine.
            started.wait()
            assert not failures, failures
            http_port = bound.getsockname()[1]
            yield TreeServer(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_ports[0]}", tree)
        finally:
            for end in ending:
                with suppress(RuntimeError):  # its loop has ended by itself
                    end()
            thread.join(LONGEST_S)
        assert not thread.is_alive()
        assert not failures, failures


def until(condition: Callable[[], bool], timeout_s: float = LONGEST_S) -> None:
    """Return once it is true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def alive(process_id: int) -> bool:
    """Whether a process runs; one that has ended may wait for whoever inherits it to look."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def descriptors(process_id: int) -> int:
    """Return how many files a process has open."""
    return len(list(Path(f"/proc/{process_id}/fd").iterdir()))
