"""Several HTTP front ends: each has its share of the connections, and one that dies is replaced."""

from __future__ import annotations

import asyncio
import errno
import http.client
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from convgrad import Client
from convgrad_service.server.connection_dispatcher import ConnectionDispatcher
from convgrad_service.server.http_server import listening_socket
from tests.support.killable import mortal
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

FRONT_ENDS = 3
ONES = np.ones((1, 1, 1, 1), np.float32)


@pytest.fixture
def server() -> Iterator[TreeServer]:
    with serving_tree(mortal, http_workers=FRONT_ENDS) as serving:
        yield serving


def sockets(process_id: int) -> int:
    """Return how many a process has."""
    found = 0
    for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(OSError):
            found += str(descriptor.readlink()).startswith("socket:")
    return found


def http_processes(server: TreeServer) -> list[int]:
    """The HTTP front ends; gRPC's is the first that was started."""
    ids = [process.pid for process in server.tree.front_processes]
    names: dict[int, str] = {}
    for each in ids:
        # It has just died: before its name was opened, or before it was read.
        with suppress(FileNotFoundError, ProcessLookupError):
            names[each] = Path(f"/proc/{each}/comm").read_text().strip()
    return [each for each in ids if names.get(each, "").startswith("convgrad-http")]


def connected(server: TreeServer) -> http.client.HTTPConnection:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
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
        with Client(server.url, max_retries=0) as client:
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


def dealt(end: socket.socket) -> int:
    """Return how many connections were received over a socket."""
    end.setblocking(False)
    found = 0
    with suppress(BlockingIOError):
        while True:
            told, descriptors, _, _ = socket.recv_fds(end, 1, 1)
            if not told:
                break  # the other end is closed
            os.close(descriptors[0])
            found += 1
    return found


def test_what_nobody_takes_waits_and_who_has_gone_gets_nothing() -> None:
    async def scenario() -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (ours, theirs), (second, gone) = pairs
        held: list[socket.socket] = []
        with listening_socket("127.0.0.1", 0) as bound:
            bound.listen()
            dealer = ConnectionDispatcher(bound)

            async def connect(count: int) -> None:
                held.extend(socket.create_connection(bound.getsockname()) for _ in range(count))
                await asyncio.sleep(0.05)

            async def are_dealt(count: int) -> None:
                found = 0
                while (found := found + dealt(theirs)) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                assert found == count

            await connect(2)
            dealer.add(ours)
            await are_dealt(2)
            dealer.add(second)
            gone.close()
            await connect(4)
            await are_dealt(4)  # and none is lost with the other
            dealer.remove(second)
            dealer.remove(ours)
            await connect(1)
            assert dealt(theirs) == 0
        for each in (*held, theirs):
            each.close()

    asyncio.run(scenario())


def test_once_all_have_gone_at_the_end_connections_are_refused() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listening_socket("127.0.0.1", 0) as bound:
            address = bound.getsockname()
            dealer = ConnectionDispatcher(bound)
            dealer.add(ours)
            dealer.close()
            with socket.create_connection(address):
                await asyncio.sleep(0.05)
            assert dealt(theirs) == 1
            theirs.close()
            with socket.create_connection(address):  # by which it is noticed
                await asyncio.sleep(0.05)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)

    asyncio.run(scenario())


def test_what_one_front_end_cannot_be_sent_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when one has been stopped: the system limits how many descriptors are on their way."""
    send_fds = socket.send_fds

    async def scenario() -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (stopped, silent), (ours, theirs) = pairs

        def send(end: socket.socket, *arguments: list[bytes] | list[int]) -> int:
            if end is stopped:
                raise OSError(errno.ETOOMANYREFS, "Too many references")
            return send_fds(end, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(socket, "send_fds", send)
        with listening_socket("127.0.0.1", 0) as bound, stopped, silent, ours, theirs:
            dealer = ConnectionDispatcher(bound)
            dealer.add(stopped)
            dealer.add(ours)
            held = [socket.create_connection(bound.getsockname()) for _ in range(4)]
            await asyncio.sleep(0.05)
            assert dealt(theirs) == 4
            dealer.remove(stopped)
            dealer.remove(ours)
        for each in held:
            each.close()

    asyncio.run(scenario())


def test_what_each_process_uses_is_measured_and_who_is_connected(server: TreeServer) -> None:
    port = server.url.rpartition(":")[2]
    waiting = [socket.create_connection(("127.0.0.1", int(port)), 10) for _ in range(3)]

    def found() -> dict[tuple[str, str], float]:
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        return {
            (sample.name, value): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            for label, value in sample.labels.items()
            if label in ("process", "port")
        }

    # The one that asks is connected too.
    until(lambda: found()["convgrad_connections", "http"] == 4)
    for one in waiting:
        one.close()
    until(lambda: found()["convgrad_connections", "http"] == 1)
    values = found()
    fronts = {f"http-{number}" for number in range(FRONT_ENDS)}
    for name, least in (
        ("process_cpu_seconds_total", 0.01),
        ("process_resident_bytes", 2**20),
        ("process_open_files", 4),
    ):
        measured = {value for metric, value in values if metric == f"convgrad_{name}"}
        assert measured == {"hub", "worker-0", "grpc", *fronts}
        assert all(values[f"convgrad_{name}", one] >= least for one in measured), name
    assert values["convgrad_connections", "grpc"] == 0
