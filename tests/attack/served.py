"""A server's processes under attack, and the effect on other clients."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from convgrad.wire import safetensors
from tests.support.h2_client import INFER, LIVE, connected, grpc_message, pool_request
from tests.support.http_server import EXAMPLE, JSON, SAFETENSORS, serving_process
from tests.support.tree_server import until

__all__ = ["MIB", "Others", "Served", "attacked", "convolution", "processes"]

MIB = 2**20
ARENA = "memfd:convgrad-arena"


@dataclass(frozen=True)
class Served:
    """A server's processes; ``hub`` is the first of them, in which gRPC runs."""

    http: str
    grpc: str
    hub: int

    @property
    def address(self) -> tuple[str, int]:
        """The URL at which it serves HTTP."""
        return "127.0.0.1", int(self.http.rpartition(":")[2])

    def connect(self) -> socket.socket:
        """A raw connection over HTTP."""
        return socket.create_connection(self.address, 60)

    def children(self) -> list[int]:
        """The hub's children."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.hub)], capture_output=True, text=True
        )
        return [int(line) for line in found.stdout.split()]

    def memory_bytes(self, name: str = "VmRSS") -> int:
        """A line of the hub's status."""
        lines = Path(f"/proc/{self.hub}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(f"{name}:"))
        return int(line.split()[1]) * 1024

    def all_bytes(self) -> int:
        """What all its processes hold except the arena, what they share counted once.

        The arena keeps some of its pages by design, see `arena_bytes`.
        """
        return sum(size for name, size in self._mapped_bytes() if ARENA not in name)

    def arena_bytes(self) -> int:
        """The resident part of tensor memory."""
        return sum(size for name, size in self._mapped_bytes() if ARENA in name)

    def _mapped_bytes(self) -> Iterator[tuple[str, int]]:
        """Each mapping of each process, with its proportional share of the memory."""
        for process_id in (self.hub, *self.children()):
            name = ""
            with suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{process_id}/smaps").read_text().splitlines():
                    first, _, rest = line.partition(" ")
                    if not first.endswith(":"):
                        name = rest
                    elif first == "Pss:":
                        yield name, int(rest.split()[0]) * 1024

    def cpu_s(self) -> float:
        """The time that its processes have computed."""
        ticks = 0
        for process_id in (self.hub, *self.children()):
            fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def serves(self, port: int) -> bool:
        """Whether a client's gRPC connection from this port is in the system's table for it."""
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.hub}/net/{table}").read_text().splitlines()[1:]:
                _, ours, theirs, state = line.split()[:4]
                ends = int(ours.rpartition(":")[2], 16), int(theirs.rpartition(":")[2], 16)
                if ends == (int(self.grpc.rpartition(":")[2]), port) and state == "01":
                    return True
        return False

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        text = httpx.get(f"{self.http}/metrics", timeout=60).text
        (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])

    def computes(self) -> bool:
        """Whether it says that it is ready, and answers over both transports."""
        with httpx.Client(base_url=self.http, timeout=60) as client:
            if client.get("/v2/health/ready").status_code != 200:
                return False
            client.post("/conv_bwd_data", content=EXAMPLE, headers={"Content-Type": JSON})
        with connected(self.grpc) as client_h2:
            stream = client_h2.open(INFER, grpc_message(pool_request()), last=True)
            return client_h2.answer(stream).status == "0"


@contextmanager
def processes(folder: Path, **environment: str) -> Iterator[Served]:
    """A server with these settings, which has answered once."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    named = {f"CONVGRAD_{name.upper()}": value for name, value in environment.items()}
    with serving_process(folder, {"CONVGRAD_GRPC_PORT": str(port), **named}) as (url, hub):
        found = Served(url, f"127.0.0.1:{port}", hub)
        assert found.computes()
        yield found


@dataclass
class Others:
    """Clients that do nothing wrong: how long each of their requests took, and what failed."""

    server: Served
    took_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    not_ready: int = 0

    def __post_init__(self) -> None:
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(ask,))
            for ask in (self._http, self._ready, self._grpc)
        ]
        self._client = httpx.Client(base_url=self.server.http, timeout=60)

    @property
    def p99_s(self) -> float:
        """Of all that they have asked."""
        return sorted(self.took_s)[len(self.took_s) * 99 // 100]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ask no more."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _run(self, ask: object) -> None:
        assert callable(ask)
        while not self._ended.wait(0.03):
            began_s = time.monotonic()
            try:
                ask()
            except Exception as error:  # noqa: BLE001 - whatever it was, an attack is to blame
                self.failed.append(repr(error))
            self.took_s.append(time.monotonic() - began_s)

    def _http(self) -> None:
        """A request on a connection that is kept."""
        headers = {"Content-Type": JSON}
        answer = self._client.post("/conv_bwd_data", content=EXAMPLE, headers=headers)
        assert answer.status_code == 200, answer.text
        json.loads(answer.content)

    def _ready(self) -> None:
        """Send a health check on its own connection."""
        status = httpx.get(f"{self.server.http}/v2/health/ready", timeout=60).status_code
        self.not_ready += status != 200

    def _grpc(self) -> None:
        """Make a gRPC call on its own connection."""
        with connected(self.server.grpc) as client:
            assert client.answer(client.open(LIVE, grpc_message(b""), last=True)).status == "0"


@contextmanager
def attacked(
    server: Served,
    *,
    p99_s: float = 2.0,
    more_bytes: int = 100 * MIB,
    may_be_unready: bool = False,
) -> Iterator[Others]:
    """While it lasts others use the server, and none of their requests fails.

    Of all of them 99 in 100 take at most ``p99_s``. Afterwards the server computes, says that it
    is ready, as it did all the time unless it ``may_be_unready``, and holds at most ``more_bytes``
    more than before.
    """
    before_bytes = server.all_bytes()
    others = Others(server)
    others.start()
    try:
        yield others
        until(lambda: len(others.took_s) > 30)
    finally:
        others.end()
    assert not others.failed, others.failed[:3]
    assert may_be_unready or others.not_ready == 0
    assert others.p99_s < p99_s, sorted(others.took_s)[-5:]
    assert server.computes()
    until(lambda: server.all_bytes() - before_bytes < more_bytes, 20)
    most_s, more_mib = max(others.took_s), (server.all_bytes() - before_bytes) / MIB
    print(
        f"{len(others.took_s)} requests of others: p99 {others.p99_s * 1e3:.0f} ms, at most "
        f"{most_s * 1e3:.0f} ms; memory {more_mib:+.0f} MiB"
    )


def convolution() -> bytes:
    """A request of 560 KB over HTTP that takes a few milliseconds of all cores."""
    rng = np.random.default_rng(0)
    tensors = {
        "grad_output": rng.standard_normal((1, 32, 64, 64), dtype=np.float32),
        "weight": rng.standard_normal((32, 32, 3, 3), dtype=np.float32),
    }
    body = b"".join(safetensors.encode(tensors, {"parameters": '{"padding": 1}'}))
    head = "POST /conv_bwd_data HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
