"""After SIGTERM a server is not ready at once, and still answers until all may have noticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import EXAMPLE, JSON
from tests.support.tree_server import LONGEST_S, TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

WINDOW_S = 3.0


def cpu(device: int) -> CpuBackend:
    return CpuBackend(threads=1)


@pytest.fixture(params=[1, 2], ids=["inside the hub", "two front ends"])
def serving(request: pytest.FixtureRequest) -> Iterator[tuple[TreeServer, Any]]:
    """A server, and what has it end as SIGTERM would."""
    made = serving_tree(cpu, http_workers=request.param, drain_s=WINDOW_S)
    server = made.__enter__()
    ended = threading.Event()

    def end() -> None:
        made.__exit__(None, None, None)
        ended.set()

    ending = threading.Thread(target=end)
    yield server, partial(_begun, ending)
    if not ending.ident:
        ending.start()
    assert ended.wait(LONGEST_S)


def _begun(ending: threading.Thread) -> float:
    ending.start()
    return time.monotonic()


def test_it_is_not_ready_at_once_and_answers_for_a_while(
    serving: tuple[TreeServer, Any],
) -> None:
    server, end = serving

    def ready() -> int:
        return httpx.get(f"{server.url}/v2/health/ready").status_code

    def ask() -> int:
        headers = {"Content-Type": JSON}
        url = f"{server.url}/conv_bwd_data"
        return httpx.post(url, content=EXAMPLE, headers=headers, timeout=60).status_code

    assert ready() == ask() == 200
    began_s = end()
    until(lambda: ready() == 503)
    assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
    answered = 0
    while time.monotonic() < began_s + WINDOW_S / 2:
        # New connections too: whoever sends them has not noticed yet.
        assert ask() == 200
        answered += 1
    assert answered > 0

    def closed() -> bool:
        try:
            return ask() == 503
        except httpx.TransportError:
            return True

    until(closed)
    assert time.monotonic() >= began_s + WINDOW_S
