"""Several HTTP front ends: each has its share of the connections, and one that dies is replaced."""

from __future__ import annotations

import http.client
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from convgrad import Client
from tests.contract.test_worker_deaths import mortal
from tests.contract.tree_server import TreeServer, serving_tree, until

FRONT_ENDS = 3
ONES = np.ones((1, 1, 1, 1), np.float32)


@pytest.fixture
def server() -> Iterator[TreeServer]:
    with serving_tree(mortal, http_workers=FRONT_ENDS) as serving:
        yield serving


def sockets(process_id: int) -> int:
    """How many a process has."""
    found = 0
    for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(OSError):
            found += str(descriptor.readlink()).startswith("socket:")
    return found


def http_processes(server: TreeServer) -> list[int]:
    """The HTTP front ends; gRPC's is the first that was started."""
    ids = [process.pid for process in server.tree.front_processes]
    names = {each: Path(f"/proc/{each}/comm").read_text().strip() for each in ids}
    return [each for each in ids if names[each] == "convgrad-http"]


def connected(server: TreeServer) -> http.client.HTTPConnection:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("GET", "/v2/health/live")
    assert connection.getresponse().read() is not None
    return connection


def test_connections_that_come_together_are_shared_out(server: TreeServer) -> None:
    processes = http_processes(server)
    assert len(processes) == FRONT_ENDS
    before = [sockets(each) for each in processes]
    held = [connected(server) for _ in range(4 * FRONT_ENDS)]
    after = [sockets(each) for each in processes]
    assert [now - then for now, then in zip(after, before, strict=True)] == [4] * FRONT_ENDS
    for connection in held:
        connection.close()


def test_a_front_end_that_dies_gets_its_share_again(server: TreeServer) -> None:
    killed, *rest = http_processes(server)
    others = set(rest)
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in http_processes(server))
    # The others take what comes meanwhile.
    for _ in range(FRONT_ENDS):
        with Client(server.url, retries=0) as client:
            assert client.conv_bwd_data(ONES, ONES).item() == 2
    until(lambda: len(http_processes(server)) == FRONT_ENDS)
    (fresh,) = set(http_processes(server)) - others
    before = sockets(fresh)

    def has_some() -> bool:
        held.append(connected(server))
        return sockets(fresh) > before

    held: list[http.client.HTTPConnection] = []
    until(has_some)
    for connection in held:
        connection.close()
