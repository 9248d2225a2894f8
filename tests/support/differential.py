"""One request over every transport and topology, and everything that can be seen of how it went.

`ask` sends it and returns a `Seen`: what the client got, and what the server counted and logged.
Whatever may differ between two equal requests (times, ids, dates) is taken out of it, so that two
of them can be compared whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2_grpc

from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.hub import Hub
from convgrad_service.engine.options import InlineBackend
from convgrad_service.problems import Problem
from tests.support.oip_server import serving_oip
from tests.support.senders import Asked, Sender
from tests.support.tree_server import serving_tree, until

__all__ = [
    "BREAK",
    "HANG",
    "TOPOLOGIES",
    "Commanded",
    "Running",
    "Seen",
    "running",
]

HANG, BREAK = 4321.0, 1234.0
"""A first element that has the backend wait until nobody wants the answer, or fail."""
TOPOLOGIES = ("embedded", "workers", "two front ends")

_LOG = re.compile(r"(\w+)=(\"[^\"]*\"|\S+)")


class Commanded(CpuBackend):
    """Computes on one thread, unless the first element of a tensor says otherwise."""

    name = "commanded"

    def __init__(self, _: int = 0) -> None:
        super().__init__(threads=1)

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        command = float(next(iter(tensors.values())).flat[0])
        if command == BREAK:
            raise RuntimeError("told to break")
        if command == HANG and cancelled is not None:
            cancelled.wait(60)
            raise DeadlineExceeded("nobody waits")
        return super().run(problem, tensors, cancelled, out)


@dataclass(frozen=True)
class Seen:
    """``surface`` is what one transport alone has; everything else is the same in all."""

    code: str
    detail: str | None
    comes_again: bool
    outputs: Mapping[str, tuple[str, tuple[int, ...], bytes]]
    report: Mapping[str, Any]
    stages: tuple[str, ...]
    counted: tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]
    logged: Mapping[str, str]
    surface: Any = None

    def shared(self, *, early: bool = False) -> dict[str, Any]:
        """Return what must be the same over every transport.

        Over gRPC a message is read before it is known which operation it is for; ``early`` leaves
        out what follows from that, for a request that is refused before HTTP's body is read.
        """
        shared = {
            "code": self.code,
            "detail": self.detail,
            "comes again": self.comes_again,
            "outputs": self.outputs,
            "report": self.report,
            "logged code": self.logged["code"],
        }
        if early:
            return shared
        own = ("method", "path", "status", "received_bytes")
        return shared | {
            "stages": self.stages,
            "counted": tuple(
                (name, tuple(pair for pair in labels if pair[0] != "transport"), value)
                for name, labels, value in self.counted
                if "received_bytes" not in name
            ),
            "logged": {name: value for name, value in self.logged.items() if name not in own},
        }


@dataclass
class Running:
    """A server of one topology, with its log."""

    sender: Sender
    hub: Hub
    log: Callable[[str], list[str]]
    client: httpx.Client

    def ask(self, transport: str, asked: Asked, *, leave: bool = False) -> Seen:
        """Send one request; with ``leave`` the client goes away once it is being computed."""
        identity = uuid.uuid4().hex
        before = self._counts()
        found = self.sender.send(transport, identity, asked, leave=leave)
        counted = self._counted(before)
        logged = self._logged(identity)
        surface = found.pop("surface", None)
        code = logged["code"]
        # How long an answer is depends on the digits of the seconds in its report.
        if "sent_bytes" in found:
            assert found.pop("sent_bytes") == int(logged["sent_bytes"]), logged
        del logged["sent_bytes"]
        counted = tuple(each for each in counted if "sent_bytes" not in each[0])
        if "code" in found:
            assert found.pop("code") == code
        return Seen(
            code=code,
            detail=found["detail"].replace(identity, "ID") if "detail" in found else None,
            comes_again=found.get("comes_again", False),
            outputs=found.get("outputs", {}),
            report=found.get("report", {}),
            stages=found.get("stages", ()),
            counted=counted,
            logged=logged,
            surface=surface,
        )

    @contextlib.contextmanager
    def busy(self, asked: Asked, count: int) -> Iterator[None]:
        """While so many requests that hang are in flight."""
        sockets = []
        try:
            for number in range(count):
                sockets.append(self.sender.begin(uuid.uuid4().hex, asked))
                until(lambda number=number: self._in_flight() == number + 1)  # type: ignore[misc]
            yield
        finally:
            for each in sockets:
                each.close()
            until(lambda: self._in_flight() == 0)

    def _in_flight(self) -> int:
        return self.hub.scheduler.running + self.hub.scheduler.waiting

    def _counts(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        counts = {}
        # Buckets are most of the lines, and times, which are not compared.
        lines = [
            line
            for line in self.client.get("/metrics").text.splitlines()
            if line.startswith(("# TYPE convgrad_", "convgrad_")) and "_bucket{" not in line
        ]
        for family in text_string_to_metric_families("\n".join([*lines, ""])):
            if family.type == "gauge":
                continue
            for sample in family.samples:
                if not sample.name.endswith(("_seconds_sum", "_created")):
                    counts[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return counts

    def _counted(
        self, before: Mapping[Any, float]
    ) -> tuple[tuple[str, tuple[tuple[str, str], ...], float], ...]:
        """Return what the server counted for one request, without CPU time, which varies."""
        end_s = time.monotonic() + 60
        while True:
            now = self._counts()
            more = {key: value - before.get(key, 0.0) for key, value in now.items()}
            changed = {
                key: value
                for key, value in more.items()
                if value and key[0] != "convgrad_process_cpu_seconds_total"
            }
            if any(name == "convgrad_requests_total" for name, _ in changed):
                return tuple(sorted((*key, value) for key, value in changed.items()))
            assert time.monotonic() < end_s, "no request was counted"
            time.sleep(0.01)

    def _logged(self, identity: str) -> dict[str, str]:
        lines: list[str] = []

        def found() -> bool:
            lines[:] = [line for line in self.log(identity) if "total_s=" in line]
            return bool(lines)

        until(found)
        assert len(lines) == 1, lines
        fields = {name: value.strip('"') for name, value in _LOG.findall(lines[0])}
        del fields["request_id"]
        times = tuple(sorted(name for name in fields if name.endswith("_s")))
        return {name: fields[name] for name in fields if name not in times} | {"times": str(times)}


@contextlib.contextmanager
def running(topology: str, directory: Path, **settings: Any) -> Iterator[Running]:
    """A server of one topology with the backend `Commanded`, whose log can be read."""
    chosen = {"system_shared_memory": True, "log_level": "info", **settings}
    with contextlib.ExitStack() as held:
        log = held.enter_context(_captured(directory / f"{uuid.uuid4().hex}.log"))
        if topology == "embedded":
            server = held.enter_context(serving_oip(Commanded(), **chosen))
            url, grpc_at, hub = f"http://{server.http}", server.grpc, server.pipeline.engine
            assert isinstance(hub, Hub)
        else:
            tree = held.enter_context(
                serving_tree(
                    Commanded,
                    slots=chosen.get("compute_slots", 2),
                    beside=InlineBackend("commanded", Commanded),
                    http_workers=1 if topology == "workers" else 2,
                    **chosen,
                )
            )
            url, grpc_at, hub = tree.url, tree.grpc, tree.tree.hub
        client = held.enter_context(httpx.Client(base_url=url, timeout=60))
        channel = held.enter_context(grpc.insecure_channel(grpc_at))
        host, port = url.removeprefix("http://").split(":")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        sender = Sender((host, int(port)), hub, client, stub)
        yield Running(sender, hub, log, client)


@contextlib.contextmanager
def _captured(path: Path) -> Iterator[Callable[[str], list[str]]]:
    """The log lines that hold a text: of this process, and of children that begin meanwhile."""
    access = logging.getLogger("convgrad.access")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = access.level
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    kept = os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield lambda text: [line for line in path.read_text().splitlines() if text in line]
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        access.removeHandler(handler)
        access.setLevel(level)
        handler.close()
