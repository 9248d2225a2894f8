"""Every program in examples/ runs against a real server and prints what it should."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.oip_server import OipServer, serving_oip

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(CpuBackend()) as server:
        yield server


def run(server: OipServer, *command: str | Path) -> str:
    addresses = {"CONVGRAD_URL": f"http://{server.http}", "CONVGRAD_GRPC": server.grpc}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **addresses}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: OipServer) -> None:
    answer = json.loads(run(server, EXAMPLES / "curl.sh"))
    # grad_output convolved in full with the diagonal (1, -1), by hand
    assert answer["grad_input"]["values"] == [[[[1, 2, 0], [3, 3, -2], [0, -3, -4]]]]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_node(server: OipServer) -> None:
    assert run(server, "node", EXAMPLES / "node.mjs") == "1x2x8x8 36"


def test_tritonclient(server: OipServer) -> None:
    assert run(server, sys.executable, EXAMPLES / "tritonclient_grpc.py") == "1x2x8x8 36.0"


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_cpp(server: OipServer, tmp_path: Path) -> None:
    program = tmp_path / "http"
    command = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-o", program]
    subprocess.run([*command, EXAMPLES / "http.cpp"], check=True)
    host, _, port = server.http.rpartition(":")
    assert run(server, program, host, port) == "1x2x8x8 36"
    refused = subprocess.run([program, host, "9"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "convgrad serve" in refused.stderr


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text()
    for example in EXAMPLES.iterdir():
        assert f'"{example.name}"' in here, example
