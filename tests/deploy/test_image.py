"""The image that build_image.sh built, run as its own user with a read-only root file system.

`make check-deploy` builds it and runs these tests as root; a chroot in its own mount namespace
stands in for a container engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import convgrad
from tests.support.otlp_collector import collecting

pytestmark = pytest.mark.deploy

# Compilers other than NVRTC, and package installers.
FORBIDDEN = ("gcc", "cc", "g++", "clang", "zig", "ld", "make", "pip", "pip3")


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--image")
    if folder is None:
        pytest.skip("needs --image, the folder that build_image.sh was given")
    return Path(folder).resolve()


@pytest.fixture(scope="module")
def config(image: Path) -> dict[str, Any]:
    """The image's configuration in Docker's format."""
    inspected = json.loads((image / "image.json").read_text())
    found: dict[str, Any] = inspected["Docker"]["config"]
    return found


def contained(image: Path, config: dict[str, Any], command: list[str], *more: str) -> list[str]:
    """Return a command line that runs in the image: read-only root, one writable volume."""
    root, (volume,) = image / "root", config["Volumes"]
    environment = [*config["Env"], *more]
    user, group = config["User"].split(":")
    inside = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    run = shlex.join(["chroot", str(root), "/usr/bin/env", "-i", *environment, *inside, *command])
    mounts = [
        f"mount --bind {root} {root}",
        f"mount -o remount,bind,ro {root}",
        f"mount -t tmpfs -o uid={user},gid={group} none {root}{volume}",
        f"mount -t proc -o ro none {root}/proc",
        f"mount --rbind /dev {root}/dev",
    ]
    script = " && ".join([*mounts, f"exec {run}"])
    return ["unshare", "--mount", "sh", "-c", script]


@contextlib.contextmanager
def started(
    image: Path, config: dict[str, Any], *settings: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the server; yield it and its port once the HEALTHCHECK succeeds."""
    settings = (*settings, f"CONVGRAD_MANAGEMENT_PORT={free_port()}")
    free_ports = ("CONVGRAD_HTTP_PORT=0", "CONVGRAD_GRPC_PORT=0", *settings)
    command = contained(image, config, [*config["Entrypoint"], *config["Cmd"]], *free_ports)
    assert not health(image, config, *settings)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        port = listening_port(process)
        deadline = time.monotonic() + 120
        while not health(image, config, *settings):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield process, port
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def listening_port(process: subprocess.Popen[str]) -> int:
    """Read the port from the server's output."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if found := re.search(r"listens on https?://\S+:([0-9]+)", line):
            return int(found[1])
    raise AssertionError(f"the server ended before it listened: {output}")


def health(image: Path, config: dict[str, Any], *settings: str) -> bool:
    """Run the HEALTHCHECK inside the image; return whether it succeeded."""
    kind, *command = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    asked = subprocess.run(contained(image, config, command, *settings), capture_output=True)
    return asked.returncode == 0


def test_serves_and_ends_on_sigterm(image: Path, config: dict[str, Any]) -> None:
    with started(image, config) as (process, port):
        rng = np.random.default_rng(0)
        grad_output = rng.integers(-2, 3, (2, 3, 8, 8)).astype(np.float32)
        weight = rng.integers(-2, 3, (3, 4, 1, 1)).astype(np.float32)
        with convgrad.Client(f"http://127.0.0.1:{port}") as client:
            grad_input = client.conv_bwd_data(grad_output, weight)
        expected = np.einsum("nkhw,kc->nchw", grad_output, weight[:, :, 0, 0])
        np.testing.assert_array_equal(grad_input, expected)
        owner = Path(f"/proc/{process.pid}").stat().st_uid
        assert str(owner) == config["User"].split(":")[0] != "0"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, process.communicate()[0]


def test_the_healthcheck_works_with_tls(image: Path, config: dict[str, Any]) -> None:
    folder = image / "root" / "etc" / "convgrad"
    folder.mkdir(exist_ok=True)
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=gradients.example -addext subjectAltName=DNS:gradients.example"
    command += " -keyout tls.key -out tls.crt"
    made = subprocess.run(command.split(), cwd=folder, capture_output=True)
    assert made.returncode == 0, made.stderr
    (folder / "tls.key").chmod(0o644)
    files = (
        "CONVGRAD_TLS_CERTIFICATE=/etc/convgrad/tls.crt",
        "CONVGRAD_TLS_KEY=/etc/convgrad/tls.key",
    )
    with (
        started(image, config, *files) as (_, port),
        httpx.Client(verify=ssl.create_default_context(cafile=folder / "tls.crt")) as http,
    ):
        asked = http.get(
            f"https://127.0.0.1:{port}/v2/health/ready",
            extensions={"sni_hostname": "gradients.example"},
        )
        assert asked.status_code == 200


# A program that is in a trace of its own and calls the server.
TRACED_CALL = """
import sys
import numpy as np
from opentelemetry.sdk.trace import TracerProvider
from convgrad import Client
ones = np.ones((1, 1, 2, 2), np.float32)
with TracerProvider().get_tracer("training").start_as_current_span("step") as span:
    Client(sys.argv[1]).conv_bwd_data(ones, ones)
print(f"{span.get_span_context().trace_id:032x}")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_traces_reach_a_collector(image: Path, config: dict[str, Any], workers: int) -> None:
    with collecting() as collected:
        settings = [f"CONVGRAD_OTLP_ENDPOINT={collected.endpoint}"]
        settings += [f"CONVGRAD_HTTP_WORKERS={workers}", "CONVGRAD_LOG_FORMAT=json"]
        with started(image, config, *settings) as (process, port):
            calling = ["python", "-c", TRACED_CALL, f"http://127.0.0.1:{port}"]
            called = subprocess.run(contained(image, config, calling), capture_output=True)
            assert called.returncode == 0, called.stderr
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 0, output
    trace = called.stdout.decode().strip()
    spans = [one for one in collected.spans if one.trace_id.hex() == trace]
    (request,) = (one for one in spans if one.kind == one.SPAN_KIND_SERVER)
    assert request.name == "POST /conv_bwd_data"
    stages = {one.name for one in spans if one.parent_span_id == request.span_id}
    assert {"receive", "decode", "compute", "encode"} <= stages
    lines = [json.loads(line) for line in output.splitlines()]
    (line,) = (one for one in lines if one.get("path") == "/conv_bwd_data")
    assert line["trace_id"] == trace


def test_labels_and_ports(config: dict[str, Any]) -> None:
    assert config["StopSignal"] == "SIGTERM"
    assert set(config["ExposedPorts"]) == {"8000/tcp", "8001/tcp", "8002/tcp"}
    labels = ("title", "description", "licenses", "vendor", "version", "revision", "created")
    for label in (*labels, "source", "base.name"):
        assert config["Labels"][f"org.opencontainers.image.{label}"]


def test_the_sbom_lists_every_distribution(image: Path) -> None:
    listed = json.loads((image / "root/opt/convgrad/sbom.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    named = {(one["name"].lower(), one["version"]) for one in listed["components"]}
    (packages,) = (image / "root/opt/convgrad/lib").glob("python3*/site-packages")
    inside = {
        (found.metadata["Name"].lower(), found.version)
        for found in distributions(path=[str(packages)])
    }
    assert len(inside) > 20
    assert inside <= named


def test_its_user_can_read_what_is_installed(image: Path) -> None:
    """Kernels too, which the build compiled as root."""
    unreadable = [
        Path(folder, name)
        for folder, folders, files in os.walk(image / "root/opt/convgrad")
        for name, wanted in (*((one, 0o5) for one in folders), *((one, 0o4) for one in files))
        if Path(folder, name).lstat().st_mode & wanted != wanted
    ]
    assert unreadable == []


def test_layers(image: Path) -> None:
    """Dependencies, kernels and application are separate, the least frequently changed first."""
    inspected = json.loads((image / "image.json").read_text())
    copied = [one["created_by"] for one in inspected["History"] if "COPY" in one["created_by"]]
    targets = [line.rpartition(" in ")[2].strip() for line in copied]
    assert targets == ["/opt/convgrad", "/opt/convgrad/kernels", "/opt/convgrad"]


def test_has_no_compiler_or_installer(image: Path, config: dict[str, Any]) -> None:
    path = next(value for value in config["Env"] if value.startswith("PATH="))
    folders = [image / "root" / folder.lstrip("/") for folder in path[5:].split(":")]
    found = [str(f / name) for f in folders for name in FORBIDDEN if (f / name).exists()]
    assert found == []
    assert not list((image / "root/opt/convgrad").glob("lib/python3*/site-packages/ziglang"))
    for folder in ("usr/lib", "usr/local/lib"):
        assert not list((image / "root" / folder).glob("python3*/ensurepip"))


def test_its_user_owns_no_file(image: Path, config: dict[str, Any]) -> None:
    user = int(config["User"].split(":")[0])
    (volume,) = config["Volumes"]
    owned = [
        Path(folder, name)
        for folder, folders, files in os.walk(image / "root")
        for name in (*folders, *files)
        if Path(folder, name).lstat().st_uid == user
    ]
    assert owned == [image / "root" / volume.lstrip("/")]
