"""The event loop stays free: health answers at once while the real backend computes and decodes."""

from __future__ import annotations

import base64
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from convgrad.wire import safetensors
from tests.load.served import busy_s
from tests.support.http_server import JSON, SAFETENSORS, serving_process
from tests.support.tree_server import until

pytestmark = pytest.mark.processes

# The promise is 50 ms at p99, on a machine with nothing else to do (`make test-slow`). On any other
# all takes longer, the work as well: what must hold there is that no answer waits for the work. The
# best of a few attempts counts; a loop that blocks would fail each of them.
PROMISE_S, SHARE_OF_WORK, ATTEMPTS = 0.05, 0.25, 3


def seconds_of_work() -> bytes:
    """A request that computes for a second or more: 35 GFLOP in float64 for each core, up to 16."""
    rng = np.random.default_rng(0)
    channels = 32 * min(os.cpu_count() or 1, 16)
    tensors = {
        "input": rng.random((4, 224, 112, 112)),
        "weight": rng.random((channels, 224, 7, 7)),
    }
    return b"".join(safetensors.encode(tensors, {"parameters": "{}"}))


def long_work() -> bytes:
    """A request that computes for ten seconds or more on two cores: 2.5 TFLOP in float64."""
    tensors = {"input": np.ones((4, 64, 160, 160)), "weight": np.ones((64, 64, 55, 55))}
    parameters = json.dumps({"padding": 27})
    return b"".join(safetensors.encode(tensors, {"parameters": parameters}))


def large_json() -> bytes:
    """48 MiB of base64 for a problem of no size, so that decoding is all there is."""
    data = base64.b64encode(bytes(36 * 2**20)).decode()
    tensor = {"data": data, "dtype": "float32", "shape": [9, 2**20, 1, 1]}
    weight = {"data": base64.b64encode(bytes(4 * 2**20)).decode(), "dtype": "float32"}
    weight["shape"] = [1, 2**20, 1, 1]  # type: ignore[assignment]
    return json.dumps({"input": tensor, "weight": weight}).encode()


def p99_while(url: str, body: bytes, content_type: str, at_least: int) -> tuple[float, int, float]:
    """p99 of /v2/health/live while ``body`` is worked on, how many were asked, and how long."""
    headers = {"Content-Type": content_type}
    took: list[float] = []
    with ThreadPoolExecutor(1) as posting, httpx.Client(base_url=url, timeout=60) as client:
        client.get("/v2/health/live")
        began = time.monotonic()
        work = posting.submit(
            httpx.post, f"{url}/conv_fwd", content=body, headers=headers, timeout=60
        )
        while not work.done():
            started = time.monotonic()
            assert client.get("/v2/health/live").status_code == 200
            took.append(time.monotonic() - started)
            time.sleep(0.004)
        lasted = time.monotonic() - began
        assert work.result().status_code == 200, work.result().text
    assert len(took) >= at_least
    return statistics.quantiles(took, n=100)[98], len(took), lasted


BODIES = {"computed": (seconds_of_work, SAFETENSORS), "decoded": (large_json, JSON)}


def best_of_attempts(folder: Path, work: str, good: Callable[[float, float], bool]) -> None:
    """Until p99 and the seconds of work are good."""
    make, content_type = BODIES[work]
    body = make()
    seen: list[tuple[float, int, float]] = []
    with serving_process(folder, {}) as (url, _):
        while len(seen) < ATTEMPTS and not any(good(p99_s, work_s) for p99_s, _, work_s in seen):
            seen.append(p99_while(url, body, content_type, at_least=3))
    print(f"\np99, requests, seconds of work: {seen}")
    assert any(good(p99_s, work_s) for p99_s, _, work_s in seen), seen


@pytest.mark.parametrize("work", BODIES)
def test_health_does_not_wait_for_the_work(tmp_path: Path, work: str) -> None:
    best_of_attempts(tmp_path, work, lambda p99_s, work_s: p99_s < SHARE_OF_WORK * work_s)


@pytest.mark.slow
@pytest.mark.parametrize(("work", "most_s"), [("computed", PROMISE_S), ("decoded", 2 * PROMISE_S)])
def test_health_answers_at_once(tmp_path: Path, work: str, most_s: float) -> None:
    before_s, began_s = busy_s(), time.monotonic()
    time.sleep(1)
    busy = (busy_s() - before_s) / (time.monotonic() - began_s) / (os.cpu_count() or 1)
    if busy > 0.2:
        pytest.skip(f"other processes use {busy:.0%} of this machine; see PROMISE_S")
    best_of_attempts(tmp_path, work, lambda p99_s, _: p99_s < most_s)


def test_work_past_its_deadline_stops_computing(tmp_path: Path) -> None:
    with (
        serving_process(tmp_path, {}) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        # An answer that is sent as it is computed may have begun, and is broken off then.
        headers = {"Content-Type": SAFETENSORS, "Accept": JSON, "X-Request-Timeout": "1.5"}
        answer = client.post("/conv_fwd", content=long_work(), headers=headers)
        assert answer.status_code == 504
        until(lambda: "\nconvgrad_running 0.0\n" in client.get("/metrics").text, 8)
