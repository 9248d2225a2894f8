"""`convgrad serve` on this machine's GPUs, and clients that load it; for the benches of the GPU."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.perf.provenance import origin
from tests.perf.serve.processes import Spent, per_request, server_processes, spent_by
from tests.perf.serve.sizes import MALLOC

__all__ = ["Loaded", "Server", "Way", "gpu_origin", "loaded", "serving"]

ROOT = Path(__file__).parents[3]
START_S = 120.0
# As `convgrad serve`, also where the package is not installed.
_SERVE = "import sys; from convgrad_service.server.command import serve; sys.exit(serve())"


@dataclass(frozen=True)
class Way:
    """One way to the server, and what loads it."""

    name: str
    transport: str
    front_ends: int
    clients: int
    threads: int

    @property
    def in_flight(self) -> int:
        return self.clients * self.threads


@dataclass(frozen=True)
class Server:
    """Where one listens, and the process of its hub."""

    url: str
    process_id: int

    def workers(self) -> list[int]:
        """The processes of its workers, the first device's first."""
        found = server_processes(self.process_id)
        return [process_id for role, process_id in found.items() if role.startswith("worker-")]


@dataclass(frozen=True)
class Loaded:
    """When each answer came, how long it took, the checksums of some, and what one cost each of
    the server's processes, and all clients together."""

    times: list[tuple[float, float]]
    sums: set[int]
    costs: Mapping[str, Mapping[str, float]]

    @property
    def between_s(self) -> float:
        """Seconds from one answer to the next."""
        return (self.times[-1][0] - self.times[0][0]) / (len(self.times) - 1)

    @property
    def said(self) -> str:
        """Milliseconds of CPU for one answer, by process."""
        return ", ".join(
            f"{role} {each['user_ms'] + each['system_ms']:.1f}" for role, each in self.costs.items()
        )


@contextlib.contextmanager
def serving(environment: Mapping[str, str]) -> Iterator[Server]:
    """A server with these environment variables in addition."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", _SERVE, "--port", str(port)]
    chosen = {
        "CONVGRAD_GRPC_PORT": "0",
        "CONVGRAD_SYSTEM_SHARED_MEMORY": "true",
        "CONVGRAD_CUDA_SHARED_MEMORY": "true",
        "CONVGRAD_MAX_STORED_BYTES": "4GiB",
        "CONVGRAD_LOG_LEVEL": "warning",
    }
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "port"
        process = subprocess.Popen(
            [*command, "--port-file", str(told)],
            env={**os.environ, **chosen, **environment},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        try:
            until_s = time.monotonic() + START_S
            while not told.exists():
                if process.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit("the server did not start")
                time.sleep(0.05)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            process.terminate()
            process.wait(30)


def loaded(
    server: Server,
    way: Way,
    layer: str,
    *,
    batch: int | None,
    seconds: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Loaded:
    """Load a server for so long; ``meanwhile`` is called once it is under load.

    A client that gets another answer than expected, or none, ends it all. Of processes that are
    started meanwhile the costs are not told.
    """
    program = [sys.executable, "-m", "tests.perf.serve.load", server.url]
    options = ["--layer", layer, "--transport", way.transport]
    options += ["--threads", str(way.threads), "--seconds", str(seconds)]
    if batch:
        options += ["--batch", str(batch)]
    clients = [
        subprocess.Popen(
            [*program, *options],
            env={**os.environ, **MALLOC},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(way.clients)
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            if client.stdout.readline() != "ready\n":
                raise SystemExit(f"{way.name}: a client failed")
        processes = server_processes(server.process_id)
        before = {role: spent_by(each) for role, each in processes.items()}
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("begin\n")
            client.stdin.flush()
        meanwhile()
        found = [json.loads(client.communicate(timeout=120)[0]) for client in clients]
        after = {role: spent_by(each) for role, each in processes.items()}
    finally:
        for client in clients:
            client.kill()
            client.wait()
    times = sorted((end_s, spent_s) for one in found for end_s, spent_s in one["times"])
    before["clients"] = Spent()
    after["clients"] = sum((Spent(*one["spent"]) for one in found), Spent())
    costs = per_request(before, after, sum(one["calls"] for one in found))
    return Loaded(times, {each for one in found for each in one["sums"]}, costs)


def gpu_origin(git_sha: str | None) -> dict[str, Any]:
    """What a record says of where it comes from."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    name, driver = said[0].split(", ")
    packages = ("numpy", "cupy-cuda13x", "fastapi", "uvicorn", "uvloop", "tritonclient")
    stamp = origin(name, {package: version(package) for package in packages})
    return {**stamp, "driver": driver, "git_sha": git_sha or stamp["git_sha"]}
