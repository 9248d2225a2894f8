"""Servers for the contract's tests; most share one, because most change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_backends import Zeros
from tests.support.http2_client import Http2Client, connected, served, wait_until_idle
from tests.support.http_server import LiveServer, serving
from tests.support.oip_server import OipServer, serving_oip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-examples", type=int, default=200, help="malformed bodies to try (make fuzz: 10000)"
    )
    parser.addoption("--url", default=None, help="of a server that runs, to ask every operation")


@pytest.fixture(scope="session")
def live() -> Iterator[LiveServer]:
    """A server that answers with zeros, with limits low enough to reach."""
    with serving(
        Zeros(),
        max_json_bytes="256KiB",
        max_body_bytes="1MiB",
        max_problem_bytes="64MiB",
        max_problem_flops=1e9,
        max_header_bytes="16KiB",
        log_level="error",
    ) as server:
        yield server


@pytest.fixture(scope="module")
def http2_server() -> Iterator[OipServer]:
    """A gRPC server with limits low enough to reach, and patience."""
    with serving_oip(
        Zeros(), max_body_bytes="8MiB", max_header_bytes="16KiB", max_connections=40
    ) as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[OipServer]:
    """One whose patience a test can wait out, though not with clients who are slow to greet."""
    with serving_oip(
        Zeros(), max_body_bytes="8MiB", body_idle_timeout_s=0.4, answer_idle_timeout_s=0.5
    ) as running:
        yield running


@pytest.fixture
def raw(http2_server: OipServer) -> Iterator[Http2Client]:
    """A connection to the patient one, after which it serves as before."""
    with connected(http2_server.grpc) as client:
        yield client
    assert served(http2_server)
    wait_until_idle(http2_server)
