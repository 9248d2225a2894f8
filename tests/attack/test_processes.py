"""The server's own processes are killed and stopped while others use it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack.served import Served, attacked, processes
from tests.support.tree_server import until

SILENT_S = 2.0
# For a worker to start, on a machine with much else to do.
START_S = 40.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = {"heartbeat_timeout_s": str(SILENT_S)}
    with processes(tmp_path_factory.mktemp("processes"), **limits) as serving:
        yield serving


def worker(server: Served) -> int | None:
    """The worker's process, while there is one."""
    for process_id in server.children():
        try:
            name = Path(f"/proc/{process_id}/comm").read_text().strip()
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name == "convgrad-worker" and state != "Z":
            return process_id
    return None


@pytest.mark.parametrize(("number", "hung"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_worker_that_is_killed_or_stopped_costs_no_request(
    server: Served, number: signal.Signals, hung: int, times: int
) -> None:
    """Ready says no while there is no worker, which is the truth; nothing else may fail."""
    with attacked(server, p99_s=2 * SILENT_S + START_S, may_be_unready=True) as others:
        for _ in range(times):
            until(lambda: server.computes())
            ended = worker(server)
            assert ended is not None
            asked, unready = len(others.took_s), others.not_ready
            os.kill(ended, number)
            until(lambda: worker(server) not in (None, ended))  # noqa: B023
            until(lambda: server.computes())
            until(lambda: len(others.took_s) > asked + 10)  # noqa: B023
            assert not hung or others.not_ready > unready
    assert max(others.took_s) < 2 * SILENT_S + START_S


def test_a_server_that_was_stopped_as_a_whole_takes_nobody_for_dead(server: Served) -> None:
    """The whole server is stopped for longer than its processes may be silent, and goes on."""
    stopped = [server.hub, *server.children()]
    for process_id in stopped:
        os.kill(process_id, signal.SIGSTOP)
    time.sleep(2 * SILENT_S)
    for process_id in stopped:
        os.kill(process_id, signal.SIGCONT)
    assert server.computes()
    time.sleep(SILENT_S)
    assert server.computes()
    assert [server.hub, *server.children()] == stopped  # and none was taken for dead
