"""The README's requests, run as they stand against a real server with the real CPU backend."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import LiveServer, serving
from tests.support.oip_server import serving_oip

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
GRPC_ADDRESS = "127.0.0.1:8001"


@pytest.fixture(scope="module")
def computing() -> Iterator[LiveServer]:
    with serving(CpuBackend(), log_level="error") as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_request(computing: LiveServer) -> None:
    (command,) = [block for block in _blocks("bash") if block.startswith("curl ")]
    done = subprocess.run(
        ["sh", "-c", command.replace(ADDRESS, computing.url)],  # as a reader pastes it
        check=True,
        capture_output=True,
        text=True,
    )
    answer = json.loads(done.stdout)
    # grad_output convolved in full with the diagonal (1, -1), by hand
    assert answer["grad_input"]["values"] == [[[[1, 2, 0], [3, 3, -2], [0, -3, -4]]]]
    assert answer["report"]["backend"] == "cpu"


def test_python_request(computing: LiveServer) -> None:
    code, *_ = _blocks("python")
    _run(code.replace(ADDRESS, computing.url))


def test_request_of_another_client() -> None:
    _, code, *_ = _blocks("python")
    with serving_oip(CpuBackend()) as server:
        _run(code.replace(GRPC_ADDRESS, server.grpc))


def test_answer_in_parts(computing: LiveServer) -> None:
    _, _, code, *_ = _blocks("python")
    _run(code.replace(ADDRESS, computing.url))


def test_request_through_shared_memory() -> None:
    _, _, _, code, _ = _blocks("python")
    with serving(CpuBackend(), system_shared_memory=True, log_level="error") as server:
        _run(code.replace(ADDRESS, server.url))


def test_request_with_stored_tensors(computing: LiveServer) -> None:
    *_, code = _blocks("python")
    _run(code.replace(ADDRESS, computing.url))


def _run(code: str) -> None:
    """Run a block and hold what it prints against what it promises to."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})  # noqa: S102 - our own README
    promised = re.search(r"print\(.*#\s*(.*)", code)
    assert promised is not None
    assert printed.getvalue().strip().splitlines()[-1] == promised[1]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
