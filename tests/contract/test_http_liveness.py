"""The event loop stays free: health answers at once while the real backend computes and decodes."""

from __future__ import annotations

import base64
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np

from convgrad.wire import safetensors
from tests.contract.server import JSON, SAFETENSORS, serving_process

# The promise is 50 ms at p99. Other work on the machine can delay any process, this one too, so
# the best of a few attempts counts; a loop that blocks would fail each of them by far.
PROMISE_S, ATTEMPTS = 0.05, 3


def seconds_of_work() -> bytes:
    """A request that computes for two seconds or more on two cores: 361 GFLOP in float64."""
    rng = np.random.default_rng(0)
    tensors = {
        "input": rng.random((4, 256, 112, 112)),
        "weight": rng.random((320, 256, 7, 7)),
    }
    return b"".join(safetensors.encode(tensors, {"parameters": "{}"}))


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


def test_health_answers_while_a_problem_of_seconds_runs(tmp_path: Path) -> None:
    with serving_process(tmp_path, {}) as (url, _):
        body = seconds_of_work()
        seen = []
        for _ in range(ATTEMPTS):
            seen.append(p99_while(url, body, SAFETENSORS, at_least=50))
            if seen[-1][0] < PROMISE_S:
                break
    print(f"\np99, requests, seconds of work: {seen}")
    assert min(p99 for p99, _, _ in seen) < PROMISE_S, seen


def test_work_past_its_deadline_stops_computing(tmp_path: Path) -> None:
    with (
        serving_process(tmp_path, {}) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        # An answer that is sent as it is computed may have begun, and is broken off then.
        headers = {"Content-Type": SAFETENSORS, "Accept": JSON, "X-Request-Timeout": "1.5"}
        answer = client.post("/conv_fwd", content=seconds_of_work(), headers=headers)
        assert answer.status_code == 504
        until = time.monotonic() + 1.0
        while "\nconvgrad_running 0.0\n" not in client.get("/metrics").text:
            assert time.monotonic() < until, "the backend went on with what nobody waits for"
            time.sleep(0.02)


def test_health_answers_while_a_large_json_body_is_decoded(tmp_path: Path) -> None:
    with serving_process(tmp_path, {}) as (url, _):
        body = large_json()
        seen = []
        for _ in range(ATTEMPTS):
            seen.append(p99_while(url, body, JSON, at_least=3))
            if seen[-1][0] < 2 * PROMISE_S:
                break
    print(f"\np99, requests, seconds of work: {seen}")
    assert min(p99 for p99, _, _ in seen) < 2 * PROMISE_S, seen
