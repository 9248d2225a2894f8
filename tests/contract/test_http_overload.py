"""Many requests at once: what waits, is refused or dropped, and what stays responsive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pytest

from convgrad.wire import safetensors
from convgrad_service.engine import admission
from tests.support.fake_backends import Blocking, Zeros
from tests.support.http_server import EXAMPLE, SAFETENSORS, LiveServer, serving
from tests.support.raw_http import post_head
from tests.support.tree_server import until

Answers = Future[httpx.Response]


@contextmanager
def blocked(**settings: object) -> Iterator[tuple[LiveServer, Blocking, ThreadPoolExecutor]]:
    """A server whose backend waits to be released, and threads to post from."""
    backend = Blocking()
    with serving(backend, **settings) as server, ThreadPoolExecutor(16) as posting:
        try:
            yield server, backend, posting
        finally:
            backend.release.set()


def test_more_than_may_wait_is_refused_and_the_rest_is_answered() -> None:
    with blocked(compute_slots=1, max_queue=2) as (server, backend, posting):
        answers: list[Answers] = [posting.submit(server.post)]
        assert backend.started.acquire(timeout=60)
        answers += [posting.submit(server.post) for _ in range(2)]
        until(lambda: server.hub.scheduler.waiting == 2)
        refused = server.post()
        assert refused.status_code == 429
        assert refused.json()["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
        assert server.get("/v2/health/ready").status_code == 200
        backend.release.set()
        assert [answer.result(60).status_code for answer in answers] == [200] * 3


def test_large_bodies_wait_unread_until_those_before_them_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long this machine takes to receive them.
    monkeypatch.setattr(admission, "_RECEIVING_LARGE_S", 600.0)
    monkeypatch.setattr(admission, "_RECEIVED_LARGE_S", 600.0)
    body = pooled(300_000)
    headers = {"Content-Type": SAFETENSORS}
    most_ahead = 8  # with a slot, by `Pipeline.gate`
    with blocked(compute_slots=1) as (server, backend, posting):
        answers = [
            posting.submit(server.post, body, path="/maxpool2d_fwd", headers=headers)
            for _ in range(14)
        ]
        assert backend.started.acquire(timeout=60)
        # All have come: one is computed, the others wait for that or are in line.
        until(lambda: f"convgrad_queue_depth {14.0 - 1}" in server.get("/metrics").text)
        assert server.hub.scheduler.waiting == most_ahead - 1
        small = posting.submit(server.post)  # passes those in line
        until(lambda: f"convgrad_queue_depth {14.0 - 1 + 1}" in server.get("/metrics").text)
        assert server.hub.scheduler.waiting == most_ahead
        backend.release.set()
        assert [answer.result(60).status_code for answer in [*answers, small]] == [200] * 15


def test_a_full_queue_refuses_a_large_body_before_it_is_sent() -> None:
    with blocked(compute_slots=1, max_queue=1) as (server, backend, posting):
        posting.submit(server.post)
        assert backend.started.acquire(timeout=60)
        posting.submit(server.post)
        until(lambda: server.hub.scheduler.waiting == 1)
        with server.connect() as connection:
            connection.sendall(post_head(10_000_000))
            assert connection.recv(65536).startswith(b"HTTP/1.1 429 ")


def test_memory_in_flight_is_bounded() -> None:
    body = pooled(630_000)
    binary = {"Content-Type": SAFETENSORS}
    with serving(Zeros(), max_inflight_bytes="1MiB", max_memory_wait_s=0.2) as server:
        with server.connect() as connection:
            request = post_head(len(body), path="/maxpool2d_fwd", content_type=SAFETENSORS)
            connection.sendall(request + body[:300_000])
            until(lambda: server.held_bytes >= 600_000)
            refused = server.post(body, path="/maxpool2d_fwd", headers=binary)
            assert refused.status_code == 429
            assert "retry-after" in refused.headers
        server.wait_until_idle()
        assert server.post(body, path="/maxpool2d_fwd", headers=binary).status_code == 200
        # What could never fit is not worth trying again.
        never = server.post(pooled(2_000_000), path="/maxpool2d_fwd", headers=binary)
        assert never.status_code == 413


def test_who_waits_for_memory_gets_it_in_turn() -> None:
    body = pooled(630_000)
    with blocked(max_inflight_bytes="1MiB") as (server, backend, posting):

        def post() -> httpx.Response:
            headers = {"Content-Type": SAFETENSORS}
            return server.post(body, path="/maxpool2d_fwd", headers=headers)

        answers = [posting.submit(post) for _ in range(3)]
        assert backend.started.acquire(timeout=60)
        time.sleep(0.2)
        assert backend.runs == 1  # there is memory for one at a time
        backend.release.set()
        assert [answer.result(60).status_code for answer in answers] == [200] * 3


def pooled(size_bytes: int) -> bytes:
    """A body that takes so many bytes of memory, a third of them for its answer."""
    tensors = {"input": np.zeros((1, 1, size_bytes // 300, 50), np.float32)}
    return b"".join(safetensors.encode(tensors, {"parameters": '{"kernel_size": [1, 2]}'}))


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "running"])
def test_a_deadline_ends_the_wait(waiting: bool) -> None:
    with blocked(compute_slots=1) as (server, backend, posting):
        first = posting.submit(server.post) if waiting else None
        if waiting:
            assert backend.started.acquire(timeout=60)
        # A deadline so short may pass before the work begins, where much else is to be done.
        for deadline_s in (0.2, 2, 20):
            late = server.post(headers={"X-Request-Timeout": str(deadline_s)})
            assert late.status_code == 504
            assert late.json()["code"] == "deadline-exceeded"
            if backend.runs:
                break
        if first is None:
            until(lambda: backend.cancelled == backend.runs >= 1)
        else:
            backend.release.set()
            assert first.result(60).status_code == 200
            assert backend.runs == 1  # the late one never started
        server.wait_until_idle()


def test_a_deadline_covers_a_body_that_is_slow_to_come() -> None:
    with serving(Zeros()) as server, server.connect() as connection:
        connection.sendall(post_head(1000, more="X-Request-Timeout: 0.1\r\n") + b"{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 504 ")


def test_the_server_has_a_longest_time_of_its_own() -> None:
    with blocked(max_timeout_s=0.2) as (server, _, _):
        assert server.post(headers={"X-Request-Timeout": "3600"}).status_code == 504
        assert server.post().status_code == 504


@pytest.mark.parametrize("waiting", [True, False], ids=["waiting", "running"])
def test_a_client_that_leaves_takes_its_work_along(waiting: bool) -> None:
    with blocked(compute_slots=1) as (server, backend, posting):
        if waiting:
            posting.submit(server.post)
            assert backend.started.acquire(timeout=60)
        with server.connect() as connection:
            connection.sendall(post_head(len(EXAMPLE)) + EXAMPLE)
            if waiting:
                until(lambda: server.hub.scheduler.waiting == 1)
            else:
                assert backend.started.acquire(timeout=60)
        if waiting:
            until(lambda: server.hub.scheduler.waiting == 0)
            assert backend.runs == 1
            backend.release.set()
        else:
            assert backend.ended.acquire(timeout=60)
            assert backend.cancelled == 1
        server.wait_until_idle()
        gone = 'code="client-gone",operation="conv_bwd_data"'
        until(lambda: gone in server.get("/metrics").text)


def test_the_last_free_slot_is_not_for_large_problems() -> None:
    # By this setting every problem is large, so only one runs and one slot stays free.
    with blocked(compute_slots=2, large_problem_s=1e-12) as (server, backend, posting):
        large = [posting.submit(server.post) for _ in range(2)]
        assert backend.started.acquire(timeout=60)
        until(lambda: server.hub.scheduler.waiting == 1)
        assert server.hub.scheduler.running == 1
        backend.release.set()
        assert [answer.result(60).status_code for answer in large] == [200, 200]


def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    with blocked() as (server, backend, posting):
        running = posting.submit(server.post)
        assert backend.started.acquire(timeout=60)
        server.server.should_exit = True
        until(lambda: server.pipeline.draining)
        ready = server.get("/v2/health/ready")
        assert (ready.status_code, ready.json()["code"]) == (503, "device-unavailable")
        assert server.get("/v2/health/live").status_code == 200
        assert server.post().status_code == 503
        backend.release.set()
        assert running.result(60).status_code == 200


def test_what_does_not_finish_in_time_does_not_hold_up_the_end() -> None:
    with blocked(shutdown_grace_s=0.2) as (server, backend, posting):
        posting.submit(server.post)
        assert backend.started.acquire(timeout=60)
        server.server.should_exit = True
        assert backend.ended.acquire(timeout=60)
        assert backend.cancelled == 1
