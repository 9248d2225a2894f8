"""Starts the servers that are measured, waits until they answer, and ends them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.perf.serve.sizes import OPERATION, SIZES

__all__ = ["Addresses", "free_ports", "process", "running"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Addresses:
    """Each server's address; our second server computes nothing on the event loop."""

    ours_http: int
    ours_grpc: int
    workers_http: int
    workers_grpc: int
    triton_http: int
    triton_grpc: int
    fastapi: int


@contextmanager
def running(triton: Path, malloc: Mapping[str, str], logs: Path) -> Iterator[Addresses]:
    """All servers at once, each with ``malloc`` in its environment.

    They idle while another is measured, so that every path is measured in every round.
    """
    ports = Addresses(*free_ports(7))
    environment = {**os.environ, **malloc}
    logs.mkdir(parents=True, exist_ok=True)
    ours = [sys.executable, "-m", "tests.perf.serve.ours"]
    peer = [sys.executable, "-m", "tests.perf.serve.plain_fastapi"]
    with ExitStack() as stack:

        def start(name: str, command: Sequence[str], env: Mapping[str, str], ready: str) -> None:
            stack.enter_context(process(command, env, logs / f"{name}.log", ready))

        for name, http, grpc, words in (
            ("ours", ports.ours_http, ports.ours_grpc, ()),
            ("ours-by-workers", ports.workers_http, ports.workers_grpc, ("by-workers",)),
        ):
            start(
                name,
                [*ours, str(http), str(grpc), *words],
                environment,
                f"http://127.0.0.1:{http}/v2/health/ready",
            )
        start(
            "fastapi",
            [*peer, str(ports.fastapi)],
            environment,
            f"http://127.0.0.1:{ports.fastapi}/docs",
        )
        command, env = _triton(triton, environment, ports)
        start("triton", command, env, f"http://127.0.0.1:{ports.triton_http}/v2/health/ready")
        yield ports


@contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str], log: Path, ready: str
) -> Iterator[int]:
    """A program in the repository's root, from when ``ready`` answers until the block ends; its
    process."""
    with log.open("w") as file:
        program = subprocess.Popen(
            command, env=environment, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + _START_TIMEOUT_S
        while not _answers(ready):
            if program.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield program.pid
    finally:
        program.terminate()
        program.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _triton(
    environment_dir: Path, environment: Mapping[str, str], ports: Addresses
) -> tuple[list[str], dict[str, str]]:
    (packages,) = (environment_dir / "lib").glob("python3.*/site-packages")
    server = packages / "pytriton" / "tritonserver"
    backends = environment_dir / "backends" / "python"
    if not backends.exists():
        shutil.copytree(server / "backends" / "python", backends)
        # The wheel brings a stub for each Python; Triton looks for one beside its library.
        version = packages.parent.name.removeprefix("python")
        shutil.copy2(
            server / "python_backend_stubs" / version / "triton_python_backend_stub", backends
        )
    models = environment_dir / "models"
    _write_model(models / OPERATION)
    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={models}",
        f"--backend-directory={backends.parent}",
        "--http-address=127.0.0.1",
        f"--http-port={ports.triton_http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={ports.triton_grpc}",
        "--allow-metrics=false",
    ]
    library_path = str(packages / "nvidia_pytriton.libs")
    # The stub embeds the interpreter that it finds in PATH, with its packages.
    path = os.pathsep.join((str(environment_dir / "bin"), environment.get("PATH", "")))
    return command, {**environment, "LD_LIBRARY_PATH": library_path, "PATH": path}


def _write_model(folder: Path) -> None:
    (folder / "1").mkdir(parents=True, exist_ok=True)
    shutil.copy2(_HERE / "triton_model" / "model.py", folder / "1" / "model.py")
    shapes = json.dumps([(size.input_shape, size.output_shape) for size in SIZES.values()])
    tensor = "{{ name: '{}' data_type: TYPE_FP32 dims: [-1, -1, -1, -1] }}"
    (folder / "config.pbtxt").write_text(
        f"name: '{OPERATION}'\nbackend: 'python'\nmax_batch_size: 0\n"
        f"input [{tensor.format('input')}]\noutput [{tensor.format('output')}]\n"
        f"parameters {{ key: 'shapes' value: {{ string_value: '{shapes}' }} }}\n"
        "instance_group [{ count: 1 kind: KIND_CPU }]\n"
    )


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in bound]
    for each in bound:
        each.close()
    return ports
