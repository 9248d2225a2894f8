"""The server's own processes are killed and stopped while others use it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.attack.served import Served, attacked, processes
from tests.support.http_server import EXAMPLE, JSON
from tests.support.tree_server import descriptors, until

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


@pytest.mark.slow
def test_descriptors_that_run_out_in_any_process_come_back(tmp_path: Path) -> None:
    """Each process in turn may open no more files for a while. What it serves already goes on."""
    with processes(tmp_path, http_workers="2", heartbeat_timeout_s="4") as server:
        for process_id in (server.hub, *server.children()):
            name = Path(f"/proc/{process_id}/comm").read_text().strip()
            with httpx.Client(base_url=server.http, timeout=20) as client:
                assert client.get("/v2/health/ready").status_code == 200
                before = resource.prlimit(process_id, resource.RLIMIT_NOFILE)
                limit = descriptors(process_id), before[1]
                resource.prlimit(process_id, resource.RLIMIT_NOFILE, limit)
                try:
                    for _ in range(4):  # connections that may find no descriptor
                        with suppress(httpx.TransportError):
                            httpx.get(f"{server.http}/v2/health/ready", timeout=1)
                    headers = {"Content-Type": JSON}
                    answer = client.post("/conv_bwd_data", content=EXAMPLE, headers=headers)
                    assert answer.status_code == 200, (name, answer.text)
                finally:
                    with suppress(ProcessLookupError):  # it was replaced
                        resource.prlimit(process_id, resource.RLIMIT_NOFILE, before)
            until(lambda: serves_again(server), 30)


def serves_again(server: Served) -> bool:
    try:
        return server.computes()
    except (OSError, httpx.TransportError, AssertionError):
        return False


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
