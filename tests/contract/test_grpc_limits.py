"""Limits on what clients make the gRPC server hold: arriving messages, unread answers, watches.

The memory is that of the real server's processes. Others are served meanwhile.
"""

from __future__ import annotations

import select
import time
from contextlib import ExitStack, suppress

import pytest
from grpc_health.v1 import health_pb2

from convgrad_service.grpc_api import standard_services
from tests.support.fake_backends import Zeros
from tests.support.h2_client import (
    CHECK,
    INFER,
    LIVE,
    STREAM_INFER,
    WATCH,
    Answer,
    H2Client,
    connected,
    grpc_message,
    large_answer,
    pool_request,
    served,
    wait_until_idle,
)
from tests.support.oip_server import serving_oip
from tests.support.tree_server import until

pytestmark = pytest.mark.processes

MIB = 2**20
LARGEST_WINDOW = 2**31 - 1
RESOURCE_EXHAUSTED, UNAVAILABLE = "8", "14"
ANOTHER_CLIENT = "127.0.0.2"


def stalled(client: H2Client, path: str = INFER) -> int:
    """A call whose message has begun and does not go on."""
    return client.open(path, b"\0" + (MIB).to_bytes(4, "big") + bytes(1000))


def first_to_end(calls: list[tuple[H2Client, int]]) -> Answer:
    """The answer of the call that ends first, whichever it is."""
    by_socket = {client.socket: client for client, _ in calls}
    while True:
        for client, stream in calls:
            if client.answers[stream].ended:
                return client.answers[stream]
        readable, _, _ = select.select(list(by_socket), [], [], 60)
        assert readable, "none of them ends"
        for each in readable:
            assert by_socket[each].receive()


def test_messages_on_their_way_have_a_permit_each() -> None:
    with (
        serving_oip(Zeros(), grpc_message_permits=2, body_idle_timeout_s=60) as server,
        connected(server.grpc) as client,
    ):
        held = [stalled(client), stalled(client)]
        time.sleep(0.3)
        found = client.answer(stalled(client))
        assert found.status == UNAVAILABLE
        assert found.headers["convgrad-code"] == "overloaded"
        assert found.headers["retry-after"] == "1"
        # What comes at once needs none.
        stream = client.open(INFER, grpc_message(pool_request()), last=True)
        assert client.answer(stream).status == "0"
        assert not any(client.answers[stream].ended for stream in held)


def test_open_streams_are_limited() -> None:
    with serving_oip(Zeros(), grpc_message_permits=1) as server, connected(server.grpc) as client:
        opened = [client.open(STREAM_INFER) for _ in range(8)]
        refused = client.answer(client.open(STREAM_INFER))
        assert refused.headers["convgrad-code"] == "overloaded"
        client.data(opened[0], b"", last=True)
        assert client.answer(opened[0]).status == "0"
        stream = client.open(STREAM_INFER, grpc_message(pool_request()), last=True)
        assert client.answer(stream).status == "0"


def test_who_had_time_enough_leaves_its_permit_to_others() -> None:
    with (
        serving_oip(Zeros(), grpc_message_permits=1, body_idle_timeout_s=0.3) as server,
        connected(server.grpc) as client,
    ):
        first = stalled(client)
        time.sleep(0.6)
        second = stalled(client)
        found = client.answer(first)
        assert found.status == UNAVAILABLE
        assert found.headers["convgrad-code"] == "request-timeout"
        assert not client.answers[second].ended


@pytest.mark.parametrize("source", [None, ANOTHER_CLIENT], ids=["connection", "client"])
def test_a_client_with_many_permits_leaves_one_to_another(source: str | None) -> None:
    """A message arrives in two halves while all messages of another client have stalled."""
    message = grpc_message(pool_request())
    with (
        serving_oip(Zeros(), grpc_message_permits=4, body_idle_timeout_s=60) as server,
        ExitStack() as stack,
    ):
        # With an address of its own, the client has one of these on each of its connections.
        slow = [
            stack.enter_context(connected(server.grpc, source=source))
            for _ in range(1 if source is None else 4)
        ]
        held = [(client, stalled(client)) for client in slow * (4 // len(slow))]
        time.sleep(0.3)
        other = stack.enter_context(connected(server.grpc))
        stream = other.open(INFER, message[:20])
        time.sleep(0.3)
        other.data(stream, message[20:], last=True)
        assert other.answer(stream).status == "0"
        assert first_to_end(held).headers["convgrad-code"] == "overloaded"
        assert sum(client.answers[stream].ended for client, stream in held) == 1


@pytest.mark.parametrize("idle_s", [0.3, 60.0], ids=["idle", "most"])
def test_open_streams_leave_a_place_to_another_client(idle_s: float) -> None:
    """Of eight: the one that was idle too long, or one of the client that has all of them."""
    with (
        serving_oip(Zeros(), grpc_message_permits=1, body_idle_timeout_s=idle_s) as server,
        connected(server.grpc) as client,
        connected(server.grpc) as other,
    ):
        opened = [client.open(STREAM_INFER) for _ in range(8)]
        time.sleep(0.4)
        client.data(opened[0], grpc_message(pool_request()))
        client.until(lambda: bool(client.answers[opened[0]].data))
        stream = (client if idle_s < 1 else other).open(
            STREAM_INFER, grpc_message(pool_request()), last=True
        )
        assert (client if idle_s < 1 else other).answer(stream).status == "0"
        code = "request-timeout" if idle_s < 1 else "overloaded"
        assert client.answer(opened[1]).headers["convgrad-code"] == code
        assert not client.answers[opened[0]].ended


def test_unread_answers_make_room_for_another_client() -> None:
    """Two connections of one client hold 46 MB of 50 MiB, and read nothing."""
    limits = {"grpc_max_unread_bytes": "50MiB", "max_memory_wait_s": 3}
    with serving_oip(Zeros(), **limits) as server, ExitStack() as stack:
        slow = [
            stack.enter_context(connected(server.grpc, source=ANOTHER_CLIENT)) for _ in range(2)
        ]
        for client in slow:
            client.grants = False
            unread = client.open(INFER, grpc_message(large_answer()), last=True)
            client.until(lambda: bool(client.answers[unread].data))  # noqa: B023 - called at once
        other = stack.enter_context(connected(server.grpc))
        stream = other.open(INFER, grpc_message(large_answer()), last=True)
        assert other.answer(stream).status == "0"
        wait_until_idle(server)


def test_a_message_that_never_comes_is_waited_for_as_long_as_a_request_may_take() -> None:
    with serving_oip(Zeros(), max_timeout_s=0.5) as server, connected(server.grpc) as client:
        found = client.answer(stalled(client))
        assert found.status == "4"
        assert found.headers["convgrad-code"] == "deadline-exceeded"


def test_a_health_check_whose_message_does_not_come_is_cut_off() -> None:
    with serving_oip(Zeros()) as server, connected(server.grpc) as client:
        began_s = time.monotonic()
        streams = [stalled(client, CHECK) for _ in range(4)]
        found = [client.answer(stream) for stream in streams]
        assert [each.headers["convgrad-code"] for each in found] == [
            "deadline-exceeded",
            "deadline-exceeded",
            "overloaded",
            "overloaded",
        ]
        assert time.monotonic() - began_s < 30
        assert client.answer(client.open(CHECK, grpc_message(b""), last=True)).status == "0"


def test_watches_are_limited_and_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_services, "_MAX_WATCHES", 40)
    backend = Zeros()
    with serving_oip(backend) as server, connected(server.grpc) as client:
        streams = [client.open(WATCH, grpc_message(b""), last=True) for _ in range(40)]
        client.until(lambda: all(client.answers[stream].data for stream in streams))
        refused = client.answer(client.open(WATCH, grpc_message(b""), last=True))
        assert refused.headers["convgrad-code"] == "overloaded"
        # One that leaves takes no notice away from the others.
        client.h2.reset_stream(streams.pop())
        client.flush()
        before = {stream: len(client.answers[stream].data) for stream in streams}
        backend.fault = "an illegal address"
        client.until(lambda: all(len(client.answers[each].data) > before[each] for each in streams))
        not_serving = health_pb2.HealthCheckResponse(status="NOT_SERVING").SerializeToString()
        assert all(client.answers[each].data.endswith(not_serving) for each in streams)


def test_an_answer_that_is_read_in_drips_is_cut_off() -> None:
    """Its client reads the connection, and opens the window of the answer by a few bytes."""
    with (
        serving_oip(Zeros(), answer_idle_timeout_s=0.5, min_body_bytes_per_s="16MiB") as server,
        connected(server.grpc) as client,
    ):
        client.grants = False
        stream = client.open(INFER, grpc_message(large_answer()), last=True)
        client.until(lambda: bool(client.answers[stream].data))
        client.socket.settimeout(0.05)
        until_s = time.monotonic() + 60
        while not client.gone:
            assert time.monotonic() < until_s
            client.h2.increment_flow_control_window(100, stream)
            client.h2.increment_flow_control_window(100)
            client.flush()
            with suppress(TimeoutError):
                client.receive()
        wait_until_idle(server)


def test_many_answers_that_are_read_need_no_more_than_their_turn() -> None:
    with (
        serving_oip(Zeros(), grpc_max_unread_bytes="40MiB", max_memory_wait_s=60) as server,
        connected(server.grpc) as client,
    ):
        streams = [client.open(INFER, grpc_message(large_answer()), last=True) for _ in range(6)]
        assert [client.answer(stream).status for stream in streams] == ["0"] * 6
        wait_until_idle(server)


def test_connections_are_limited() -> None:
    with serving_oip(Zeros(), max_connections=5) as server, ExitStack() as stack:
        opened = [stack.enter_context(connected(server.grpc)) for _ in range(8)]
        found = [
            client.answer(client.open(LIVE, grpc_message(b""), last=True)).status
            for client in opened
        ]
        assert found.count("0") == 5
        for client in opened:
            client.socket.close()
        until(lambda: served(server))


def test_a_connection_without_calls_is_closed() -> None:
    with serving_oip(Zeros(), keep_alive_s=1) as server, connected(server.grpc) as client:
        assert client.answer(client.open(LIVE, grpc_message(b""), last=True)).status == "0"
        while client.receive():  # a GOAWAY, then the end
            pass
        assert served(server)
