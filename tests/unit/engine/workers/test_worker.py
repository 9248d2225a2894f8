"""A worker's process; here as threads of this one."""

from __future__ import annotations

import socket
import threading

from convgrad_service.engine.ipc.channel import Cancel, Pipe, RunTask
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.workers.worker import _Worker
from tests.support.fake_backends import Zeros
from tests.support.scheduling import pooling


def test_what_is_cancelled_too_late_is_not_remembered() -> None:
    """Neither of brief tasks, which cannot be cancelled, nor of others."""
    hub, own = socket.socketpair()
    jobs, pipe = Pipe(hub.detach()), Pipe(own.detach())
    arena = Arena.create(2**20)
    files, other = socket.socketpair()
    worker = _Worker(Zeros(), arena, pipe, pipe, files)
    serving = threading.Thread(target=worker.serve)
    serving.start()
    for number, brief in enumerate((True, False, True, True)):
        interned = 0, pooling().packed
        jobs.send(RunTask(number, interned, 0, (), None, (), brief))
        assert jobs.receive()[0] == number
        worker.handle_control(Cancel(number))
        assert not worker._cancelled_early
    jobs.close()
    serving.join(10)
    assert not serving.is_alive()
    for each in (pipe, files, other, arena):
        each.close()
