"""What clients can make the gRPC server hold: messages on their way, unread answers, watches.

The memory is that of the real server's processes. Others are served meanwhile.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import hyperframe.frame
import pytest
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from convgrad_service.grpc_api import health
from tests.support.fake_backends import Zeros
from tests.support.h2_client import (
    CHECK,
    INFER,
    LIVE,
    STREAM_INFER,
    WATCH,
    H2Client,
    connected,
    grpc_message,
    pool_request,
    served,
    wait_until_idle,
)
from tests.support.http_server import serving_process
from tests.support.oip_server import serving_oip
from tests.support.tree_server import until

MIB = 2**20
LARGEST_WINDOW = 2**31 - 1
RESOURCE_EXHAUSTED, UNAVAILABLE = "8", "14"


def live_within(address: str, seconds: float) -> None:
    """A new client is answered in this time; on a busy machine a few tries are given."""
    for _ in range(5):
        began_s = time.monotonic()
        with connected(address) as client:
            assert client.answer(client.open(LIVE, grpc_message(b""), last=True)).status == "0"
        if time.monotonic() - began_s < seconds:
            return
    raise AssertionError("others are kept waiting")


def stalled(client: H2Client, path: str = INFER) -> int:
    """A call whose message has begun and does not go on."""
    return client.open(path, b"\0" + (MIB).to_bytes(4, "big") + bytes(1000))


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
    monkeypatch.setattr(health, "_MAX_WATCHES", 40)
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


@dataclass(frozen=True)
class Served:
    """A server in processes of its own."""

    http: str
    grpc: str
    hub: int

    def memory_bytes(self, name: str = "VmRSS") -> int:
        """A line of the hub's status, in which gRPC runs."""
        lines = Path(f"/proc/{self.hub}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024

    def connections(self) -> int:
        """How many its gRPC port has: those in the system's table that are established."""
        port = f"{int(self.grpc.rpartition(':')[2]):04X}"
        found = 0
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.hub}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                found += fields[1].endswith(f":{port}") and fields[3] == "01"
        return found

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = httpx.get(f"{self.http}/metrics", timeout=60).text
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])


@contextmanager
def processes(folder: Path, **environment: str) -> Iterator[Served]:
    """A server with these settings, which has answered once."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    named = {f"CONVGRAD_{name.upper()}": value for name, value in environment.items()}
    with serving_process(folder, {"CONVGRAD_GRPC_PORT": str(port), **named}) as (url, hub):
        found = Served(url, f"127.0.0.1:{port}", hub)
        with connected(found.grpc) as client:
            assert client.answer(client.open(INFER, grpc_message(pool_request()), last=True)).status
        yield found


@pytest.mark.parametrize("path", [INFER, CHECK])
def test_unfinished_messages_hold_what_the_permits_say(tmp_path: Path, path: str) -> None:
    """Of 48 messages of 63 MiB all but the last byte is sent: 3 GiB, of which little is taken."""
    size_bytes = 63 * MIB
    with processes(
        tmp_path, grpc_max_message_bytes="64MiB", grpc_message_permits="2", max_timeout_s="20"
    ) as server:
        base_bytes = server.memory_bytes()
        most_bytes = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal most_bytes
            while not done.wait(0.02):
                most_bytes = max(most_bytes, server.memory_bytes())

        def attack() -> None:
            with connected(server.grpc) as client:
                for _ in range(12):
                    stream = client.open(path, b"\0" + size_bytes.to_bytes(4, "big"))
                    client.data(stream, bytes(size_bytes - 1))

        watching = threading.Thread(target=watch)
        attacking = [threading.Thread(target=attack) for _ in range(4)]
        for thread in (watching, *attacking):
            thread.start()
        live_within(server.grpc, 2.0)
        assert httpx.get(f"{server.http}/v2/health/ready", timeout=60).status_code == 200
        for thread in attacking:
            thread.join()
        done.set()
        watching.join()
        # Two of them, and what the loopback brings in a tenth of a second.
        assert most_bytes - base_bytes < 600 * MIB
        live_within(server.grpc, 2.0)


def test_a_huge_health_check_is_refused_before_it_comes(tmp_path: Path) -> None:
    with processes(tmp_path) as server, connected(server.grpc) as client:
        base_bytes = server.memory_bytes()
        stream = client.open(CHECK, b"\0" + (1000 * MIB).to_bytes(4, "big"))
        client.data(stream, bytes(1000 * MIB))
        assert client.answer(stream).status == RESOURCE_EXHAUSTED
        assert server.memory_bytes("VmHWM") - base_bytes < 50 * MIB


def large_answer() -> bytes:
    """A request of some bytes whose answer has 23 MB."""
    made = service_pb2.ModelInferRequest(model_name="conv_fwd")
    for name in ("input", "weight"):
        made.inputs.add(name=name, datatype="FP32", shape=[1, 1, 1, 1])
        made.raw_input_contents.append(bytes(4))
    made.parameters["padding"].int64_param = 1200
    body: bytes = made.SerializeToString()
    return body


def test_answers_that_nobody_reads_are_counted_and_cut_off(tmp_path: Path) -> None:
    with processes(
        tmp_path,
        grpc_max_unread_bytes="256MiB",
        max_inflight_bytes="512MiB",
        max_memory_wait_s="1",
        answer_idle_timeout_s="2",
        min_body_bytes_per_s="64MiB",
    ) as server:
        base_bytes = server.memory_bytes("RssAnon")
        until(lambda: server.connections() == 0)
        with connected(server.grpc, INITIAL_WINDOW_SIZE=LARGEST_WINDOW) as client:
            client.h2.increment_flow_control_window(LARGEST_WINDOW - 65535)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            for _ in range(60):
                client.open(INFER, grpc_message(large_answer()), last=True)
            most_bytes = 0
            until_s = time.monotonic() + 60
            # Its own end does not see that: what was sent to it stands before the end.
            while server.connections():
                most_bytes = max(most_bytes, server.memory_bytes("RssAnon"))
                assert time.monotonic() < until_s, "it may hold its answers as long as it likes"
                time.sleep(0.02)
        # A quarter of 256 MiB for one connection, and as much again where grpcio copies.
        assert most_bytes - base_bytes < 300 * MIB
        until(lambda: server.metric("convgrad_inflight_bytes") == 0)
        # malloc keeps a quarter of max_inflight_bytes for the next.
        until(lambda: server.memory_bytes("RssAnon") - base_bytes < 200 * MIB)
        live_within(server.grpc, 2.0)


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


def settings_flood(count: int) -> bytes:
    """Frames that change the first window of every stream, again and again."""
    pair = b"".join(
        hyperframe.frame.SettingsFrame(settings={4: size}).serialize() for size in (0, 2**30)
    )
    return pair * (count // 2)


def floods() -> dict[str, Callable[[H2Client], bytes]]:
    ping = hyperframe.frame.PingFrame(opaque_data=bytes(8)).serialize()
    return {
        "settings": lambda _: settings_flood(100_000),
        "pings": lambda _: ping * 100_000,
        "unknown frames": lambda _: b"\0\0\3\x77\0\0\0\0\1abc" * 100_000,
        "empty data": lambda client: (
            hyperframe.frame.DataFrame(client.open(INFER)).serialize() * 100_000
        ),
    }


@pytest.mark.parametrize("name", floods())
def test_a_flood_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    with processes(tmp_path) as server, connected(server.grpc) as client:
        for _ in range(200):
            client.open(WATCH, grpc_message(b""), last=True)
        flood = floods()[name](client)
        base_bytes = server.memory_bytes()
        sending = threading.Thread(target=_send, args=(client.socket, flood))
        sending.start()
        # Each of them: grpcio's poller before the event engine let one wait for 16 s.
        for _ in range(20):
            began_s = time.monotonic()
            with connected(server.grpc) as other:
                assert other.answer(other.open(LIVE, grpc_message(b""), last=True)).status == "0"
            assert time.monotonic() - began_s < 5.0
        assert httpx.get(f"{server.http}/v2/health/ready", timeout=60).status_code == 200
        with suppress(OSError):
            client.socket.shutdown(socket.SHUT_RDWR)
        sending.join()
        assert server.memory_bytes() - base_bytes < 100 * MIB


def _send(connection: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # the server may close, and so does the test
        connection.sendall(data)


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
