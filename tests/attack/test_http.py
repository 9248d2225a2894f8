"""Attacks on the HTTP port: what one client can do must not be what others notice."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from tests.attack.served import MIB, Served, attacked, convolution, processes
from tests.support.http_server import EXAMPLE, SAFETENSORS
from tests.support.overload import Overloading
from tests.support.raw_http import FOR_A_LARGE_ANSWER

HEAD = b"POST /conv_bwd_data HTTP/1.1\r\nHost: x\r\n"
SMALL = HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
    len(EXAMPLE),
    EXAMPLE,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = {
        "header_timeout_s": "3",
        "body_idle_timeout_s": "2",
        "answer_idle_timeout_s": "2",
        "max_inflight_bytes": "512MiB",
        "heartbeat_timeout_s": "4",
    }
    with processes(tmp_path_factory.mktemp("http"), **limits) as serving:
        yield serving


def send(connection: socket.socket, data: bytes) -> None:
    """Send as much as the server takes."""
    with suppress(OSError):
        connection.sendall(data)


@contextmanager
def connections(server: Served, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as held:
        yield [held.enter_context(server.connect()) for _ in range(count)]


def head_in_drips(server: Served) -> None:
    """300 connections on which a head comes byte by byte, and never ends."""
    with connections(server, 300) as opened:
        for byte in HEAD[:20]:
            for connection in opened:
                send(connection, bytes([byte]))
            time.sleep(0.05)


def endless_header(server: Served) -> None:
    """One header line without an end, on 20 connections."""
    with connections(server, 20) as opened:
        for connection in opened:
            send(connection, HEAD + b"X: " + b"x" * MIB)


def requests_sent_ahead(server: Served) -> None:
    """Ten thousand small requests in one go, whose answers are not read."""
    with connections(server, 4) as opened:
        for connection in opened:
            connection.settimeout(1)
            send(connection, SMALL * 2500)


def bodies_that_stop(server: Served) -> None:
    """Bodies that hold the places of all their tensors, and do not go on."""
    shape = [1, 1, 2048, 1024]
    tensors = {
        "grad_output": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8 * MIB]},
        "weight": {"dtype": "F32", "shape": [1, 1, 1, 1], "data_offsets": [8 * MIB, 8 * MIB + 4]},
    }
    text = json.dumps(tensors).encode()
    body = len(text).to_bytes(8, "little") + text
    head = HEAD + b"Content-Type: %s\r\nContent-Length: %d\r\n\r\n" % (
        SAFETENSORS.encode(),
        len(body) + 8 * MIB + 4,
    )
    with connections(server, 24) as opened:  # of some thirty for which there is memory
        for connection in opened:
            send(connection, head + body + bytes(1000))
        time.sleep(3)


def chunks_of_a_byte(server: Served) -> None:
    """A body of a million chunks."""
    with connections(server, 4) as opened:
        for connection in opened:
            send(
                connection,
                HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n",
            )
            send(connection, b"1\r\n \r\n" * 250_000)


def unread_answers(server: Served) -> None:
    """A few bytes each ask for 23 MB that nobody reads."""
    with connections(server, 16) as opened:
        for connection in opened:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send(connection, FOR_A_LARGE_ANSWER)
        time.sleep(3)


def rubbish(server: Served) -> None:
    """Invalid heads, each on its own connection, closed without waiting for an answer."""
    heads = [b"\0" * 100, b"GET", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01" * 50]
    heads += [HEAD + line + b"\r\n\r\n" for line in (b"Content-Length: -1", b"A\0B: c", b": ")]
    for _ in range(60):
        for each in heads:
            with server.connect() as connection:
                send(connection, each)


ATTACKS: list[Callable[[Served], None]] = [
    head_in_drips,
    endless_header,
    requests_sent_ahead,
    bodies_that_stop,
    chunks_of_a_byte,
    unread_answers,
    rubbish,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_do_not_notice(server: Served, attack: Callable[[Served], None]) -> None:
    # A quarter of max_inflight_bytes stays ready for what comes next.
    with attacked(server, more_bytes=200 * MIB):
        attack(server)


@pytest.mark.parametrize(
    ("seconds", "share"),
    [(2.0, 0.5), pytest.param(20.0, 0.8, marks=pytest.mark.slow)],
    ids=["quick", "long"],
)
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "reconnecting"])
def test_clients_that_ignore_retry_after_take_no_answers_away(
    server: Served, seconds: float, share: float, keep: bool
) -> None:
    """What 400 clients are answered costs hardly more than what 16 are, and who asks for the
    server's health is answered in time. By its processes' time: others may use the machine."""
    asking = convolution()
    before_bytes = server.all_bytes()
    few = Overloading(server.address, asking, 16, keep=keep).run(seconds, server.cpu_s)
    probed_s: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        while not ended.wait(0.05):
            began_s = time.monotonic()
            with server.connect() as connection:
                send(connection, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            probed_s.append(time.monotonic() - began_s)

    probing = threading.Thread(target=probe)
    probing.start()
    many = Overloading(server.address, asking, 400, keep=keep).run(seconds, server.cpu_s)
    ended.set()
    probing.join()
    for clients, found in ((16, few), (400, many)):
        print(
            f"{clients} clients: {found.answered / found.took_s:.0f} answers and "
            f"{found.refused / found.took_s:.0f} refusals a second, "
            f"{found.answered / found.computed_s:.0f} answers for each that the server computes; "
            f"cores used by the server {found.computed_s / found.took_s:.2f}, by the clients "
            f"{found.clients_s / found.took_s:.2f}"
        )
    assert few.refused == 0
    assert many.answered / many.computed_s > share * few.answered / few.computed_s
    assert sorted(probed_s)[len(probed_s) * 99 // 100] < 2.0
    assert server.computes()
    assert server.all_bytes() - before_bytes < 300 * MIB
