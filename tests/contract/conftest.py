"""Servers for the contract's tests; most share one, because most change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_backends import Zeros
from tests.support.http_server import LiveServer, serving


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
