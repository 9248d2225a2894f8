"""A front end's process and the hub, at both ends of a channel in this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from convgrad.errors import Overloaded
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.ipc.frontend import FrontEnd
from convgrad_service.engine.ipc.remote_hub import RemoteHub
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.options import EngineOptions, InlineBackend
from convgrad_service.engine.scheduling.job import Job
from convgrad_service.engine.scheduling.scheduler import Scheduler
from convgrad_service.engine.workers.child_process import START_S
from tests.support.fake_backends import Zeros
from tests.support.scheduling import DONE, Recorder, pooling

MIB = 2**20


@asynccontextmanager
async def connected(
    *, wait_s: float = 5.0
) -> AsyncIterator[tuple[Hub, RemoteHub, FrontEnd, socket.socket, asyncio.Task[None]]]:
    """A hub, a front end's engine, and what serves it until the socket is closed."""
    options = EngineOptions(tensor_bytes=MIB, text_bytes=MIB, wait_s=wait_s)
    arena = Arena.create(options.arena_bytes)
    hub = Hub(arena, Scheduler(8), options, backend=Zeros.name)
    hub.compute_inline(InlineBackend(Zeros.name, Zeros))
    ours, theirs = socket.socketpair()
    front = FrontEnd(hub, on_listening=lambda *_: None)
    serving = asyncio.ensure_future(front.serve(ours))
    engine = RemoteHub(arena, drained=lambda: None, lost=lambda: None)
    await engine.open(theirs)
    try:
        yield hub, engine, front, theirs, serving
    finally:
        engine._channel.close()
        await asyncio.wait([serving], timeout=5)
        hub.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what it waits for has no event
        await asyncio.sleep(0.001)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_a_reservation_that_times_out_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with connected(wait_s=0.05) as (hub, engine, front, *_):
            held = await engine.reserve(hub.limit_bytes - 128 * 1024)
            for _ in range(3):
                with pytest.raises(Overloaded):
                    await engine.reserve(512 * 1024)
            assert len(front._held) == 2  # the local pool and that lease
            held.release()

    run(scenario())


def test_a_front_end_that_died_is_replaced_while_its_job_still_runs() -> None:
    """The memory of the job is free only once the worker is done."""

    async def scenario() -> None:
        async with connected() as (hub, engine, _, _, serving):
            worker = Recorder()
            hub.scheduler.add(worker)
            lease = await engine.reserve(512 * 1024)
            engine.submit(lease, Job(pooling(), lease.offset), time.monotonic() + 60)
            await until(lambda: worker.held)
            engine._channel.close()
            await asyncio.wait_for(serving, 2)
            assert worker.cancelled == worker.held
            assert hub.memory.used_bytes >= 512 * 1024
            hub.scheduler.finished(worker.held[0], DONE)
            await until(lambda: not hub.memory.used_bytes)

    run(scenario())


def test_a_front_end_that_never_starts_is_killed() -> None:
    async def scenario() -> None:
        async with connected() as (_, engine, front, *_):
            assert front.check(START_S - 1) is None
            assert front.check(2) == "not ready within 300 s"
            engine.notify("listening", 1, None)
            await until(lambda: front.check(1) is None)

    run(scenario())
