"""Attacks on the gRPC port, frame by frame: unfinished messages, unread answers, floods."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.attack.served import MIB, Served, attacked, processes
from tests.support.h2_client import (
    CHECK,
    INFER,
    connected,
    grpc_message,
    large_answer,
)
from tests.support.http_server import serving_process
from tests.support.tls_files import TlsFiles
from tests.support.tree_server import descriptors, until

LARGEST_WINDOW = 2**31 - 1
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE = "3", "8", "14"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    limits = {
        "grpc_max_message_bytes": "64MiB",
        "grpc_message_permits": "2",
        "max_timeout_s": "20",
        "grpc_max_unread_bytes": "256MiB",
        "max_inflight_bytes": "512MiB",
        "max_memory_wait_s": "1",
        "answer_idle_timeout_s": "2",
        "min_body_bytes_per_s": "64MiB",
    }
    with processes(tmp_path_factory.mktemp("grpc"), **limits) as serving:
        yield serving


@pytest.mark.parametrize("path", [INFER, CHECK])
@pytest.mark.parametrize("each", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_unfinished_messages_hold_what_the_permits_say(
    server: Served, path: str, each: int
) -> None:
    """Of 12 or 48 messages of 63 MiB all but the last byte is sent, and little of it is taken."""
    size_bytes = 63 * MIB
    most_bytes, base_bytes = 0, server.memory_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal most_bytes
        while not done.wait(0.02):
            most_bytes = max(most_bytes, server.memory_bytes())

    def attack() -> None:
        with connected(server.grpc) as client:
            for _ in range(each):
                stream = client.open(path, b"\0" + size_bytes.to_bytes(4, "big"))
                client.data(stream, bytes(size_bytes - 1))

    watching = threading.Thread(target=watch)
    watching.start()
    with attacked(server, more_bytes=200 * MIB):
        attacking = [threading.Thread(target=attack) for _ in range(4)]
        for thread in attacking:
            thread.start()
        for thread in attacking:
            thread.join()
    done.set()
    watching.join()
    # Two of them, and what the loopback brings in a tenth of a second.
    assert most_bytes - base_bytes < 600 * MIB


@pytest.mark.parametrize("path", [INFER, CHECK])
def test_compressed_messages_are_inflated_one_at_a_time(server: Served, path: str) -> None:
    """60 calls of 61 KB each, which would become 3.6 GB."""
    message = grpc_message(gzip.compress(bytes(60 * MIB)), compressed=True)
    base_bytes = server.memory_bytes("VmHWM")
    with attacked(server, more_bytes=200 * MIB), connected(server.grpc) as client:
        encoding = [("grpc-encoding", "gzip")]
        streams = [client.open(path, message, last=True, more=encoding) for _ in range(60)]
        assert {client.answer(stream).status for stream in streams} <= {
            INVALID_ARGUMENT,
            UNAVAILABLE,
            RESOURCE_EXHAUSTED,
        }
    assert server.memory_bytes("VmHWM") - base_bytes < 250 * MIB


def test_messages_that_cannot_be_read_are_not_kept(server: Served) -> None:
    """One after another; the last reads of the hub's memory decide."""
    message = grpc_message(bytes(20 * MIB))
    with attacked(server), connected(server.grpc) as client:
        held_bytes = []
        for _ in range(10):
            assert client.answer(client.open(INFER, message, last=True)).status == INVALID_ARGUMENT
            held_bytes.append(server.memory_bytes())
        assert max(held_bytes[2:]) - held_bytes[1] < 50 * MIB


def test_a_huge_health_check_is_refused_before_it_comes(server: Served) -> None:
    with attacked(server), connected(server.grpc) as client:
        base_bytes = server.memory_bytes("VmHWM")
        stream = client.open(CHECK, b"\0" + (1000 * MIB).to_bytes(4, "big"))
        client.data(stream, bytes(1000 * MIB))
        assert client.answer(stream).status == RESOURCE_EXHAUSTED
        assert server.memory_bytes("VmHWM") - base_bytes < 50 * MIB


def test_answers_that_nobody_reads_are_counted_and_cut_off(server: Served) -> None:
    base_bytes = server.memory_bytes("RssAnon")
    with attacked(server, more_bytes=200 * MIB) as others:
        with connected(server.grpc, INITIAL_WINDOW_SIZE=LARGEST_WINDOW) as client:
            client.h2.increment_flow_control_window(LARGEST_WINDOW - 65535)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for _ in range(60):
                client.open(INFER, grpc_message(large_answer()), last=True)
            most_bytes = 0
            until_s = time.monotonic() + 60
            port = client.socket.getsockname()[1]
            # Its own end does not see that: what was sent to it stands before the end.
            while server.serves(port):
                most_bytes = max(most_bytes, server.memory_bytes("RssAnon"))
                assert time.monotonic() < until_s, "it may hold its answers as long as it likes"
                time.sleep(0.02)
        # A quarter of 256 MiB for one connection, and as much again where grpcio copies.
        assert most_bytes - base_bytes < 300 * MIB
        assert not others.failed
    until(lambda: server.metric("convgrad_inflight_bytes") == 0)
    # Of 512 MiB the first quarter keeps its pages.
    assert 0 < server.arena_bytes() < 136 * MIB


def test_silent_tls_connections_end_and_take_nothing_along(tmp_path: Path) -> None:
    """600 connections to the gRPC port that never begin their handshake."""
    files = TlsFiles.made(tmp_path).server()
    limits = {"header_timeout_s": "2", **{name: str(file) for name, file in files.items()}}
    with socket.create_server(("127.0.0.1", 0)) as bound:
        limits["grpc_port"] = str(bound.getsockname()[1])
    named = {f"CONVGRAD_{name.upper()}": value for name, value in limits.items()}
    with serving_process(tmp_path, named) as (_, hub), ExitStack() as held:
        idle = descriptors(hub)
        for _ in range(600):
            address = "127.0.0.1", int(limits["grpc_port"])
            held.enter_context(socket.create_connection(address, 20))
        until(lambda: descriptors(hub) > idle + 400)
        until(lambda: descriptors(hub) <= idle)
