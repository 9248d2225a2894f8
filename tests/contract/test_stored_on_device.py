"""Stored tensors stay on the device that computes with them: see `tests.support.fake_gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import convgrad
from convgrad.errors import InvalidProblem
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of
from convgrad_service.engine.shm import stored
from tests.support.fake_gpu import FakeGpu, fake_gpu, one_of_two
from tests.support.http_server import LiveServer, serving
from tests.support.tree_server import serving_tree, until

pytestmark = pytest.mark.processes

GRAD = np.random.default_rng(0).standard_normal((2, 4, 16, 16), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 3, 3, 3), np.float32)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def server(gpu: FakeGpu) -> Iterator[LiveServer]:
    with serving(gpu) as live:
        yield live


def test_a_request_uploads_nothing_that_is_stored(
    server: LiveServer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_SPARE_S", 0.1)
    with convgrad.Client(server.url, max_retries=0) as client:
        wanted = client.conv_bwd_data(GRAD, WEIGHT)
        grad, weight = client.put("grad", GRAD), client.put("weight", WEIGHT)
        moved = []
        for _ in range(3):
            before = gpu.moved_bytes
            assert (client.conv_bwd_data(grad, weight) == wanted).all()
            moved.append(gpu.moved_bytes - before - wanted.nbytes)
        assert moved == [GRAD.nbytes + WEIGHT.nbytes, 0, 0]
        client.put("grad", 2 * GRAD)  # another tensor of that name
        assert np.allclose(client.conv_bwd_data(grad, weight), 2 * wanted)
        for name in ("grad", "weight"):
            client.drop(name)
    until(lambda: not len(gpu.residents))  # nothing is left on the device


def test_a_result_that_is_kept_is_on_the_device_at_once(server: LiveServer, gpu: FakeGpu) -> None:
    with convgrad.Client(server.url, max_retries=0) as client:
        weight = client.put("weight", WEIGHT)
        client.conv_bwd_data(GRAD, weight)  # the weight is there
        before = gpu.uploaded_bytes
        kept = client.with_options(store={"grad_input": "g"}).conv_bwd_data(GRAD, weight)
        assert isinstance(kept, convgrad.Stored)
        assert gpu.uploaded_bytes - before == GRAD.nbytes
        before = gpu.uploaded_bytes
        found = client.conv_fwd(kept, weight)
        assert gpu.uploaded_bytes == before
        # Its copy on the host is the same.
        assert (client.conv_fwd(client.fetch("g"), WEIGHT) == found).all()
        # The next step's takes its name, and in its time its file.
        again = client.with_options(store={"grad_input": "g"}).conv_bwd_data(2 * GRAD, weight)
        before = gpu.uploaded_bytes
        assert np.allclose(client.conv_fwd(again, weight), 2 * found, rtol=1e-5, atol=1e-5)
        assert gpu.uploaded_bytes == before


def test_a_kept_result_that_fails_leaves_nothing_that_counts(
    server: LiveServer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_SPARE_S", 0.1)
    good, failing = gpu.run, [True]

    def run(*arguments: Any, **more: Any) -> Any:
        outcome = good(*arguments, **more)
        if failing:
            raise InvalidProblem("it was not right")
        return outcome

    monkeypatch.setattr(gpu, "run", run)
    with convgrad.Client(server.url, max_retries=0) as client:
        keeping = client.with_options(store={"grad_input": "g"})
        with pytest.raises(convgrad.InvalidProblem):
            keeping.conv_bwd_data(GRAD, WEIGHT)
        with pytest.raises(convgrad.NotFound):
            client.fetch("g")
        failing.clear()
        kept = keeping.conv_bwd_data(GRAD, WEIGHT)
        wanted = client.conv_fwd(client.fetch("g"), WEIGHT)
        assert (client.conv_fwd(kept, WEIGHT) == wanted).all()
        client.drop("g")
    until(lambda: not len(gpu.residents))


def test_a_large_result_in_parts_is_on_its_device_too(
    server: LiveServer, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 80_000)
    tensor_layout_of.cache_clear()
    image = np.random.default_rng(2).standard_normal((1, 4, 144, 144), np.float32)
    try:
        with convgrad.Client(server.url, max_retries=0) as client:
            weight = client.put("weight", WEIGHT)
            client.conv_bwd_data(GRAD, weight)  # the weight is there
            keeping = client.with_options(store={"grad_input": "g"})
            answer = keeping.call(convgrad.calls.conv_bwd_data(image, weight))
            assert answer.report.pieces == 7
            before = gpu.uploaded_bytes
            found = client.conv_fwd(answer.outputs, weight)
            # A part's rows do not lie side by side: they are copied there once they are computed.
            assert gpu.uploaded_bytes == before
            assert (client.conv_fwd(client.fetch("g"), WEIGHT) == found).all()
    finally:
        tensor_layout_of.cache_clear()


def test_a_device_that_is_lost_takes_no_tensor_with_it() -> None:
    with serving_tree(fake_gpu) as server, convgrad.Client(server.url, max_retries=0) as client:
        weight = client.put("weight", WEIGHT)
        wanted = client.conv_bwd_data(GRAD, WEIGHT)
        for _ in range(2):
            assert (client.conv_bwd_data(GRAD, weight) == wanted).all()
            server.kill_worker()
        assert (client.conv_bwd_data(GRAD, weight) == wanted).all()


def test_a_kept_result_outlives_its_device() -> None:
    with serving_tree(fake_gpu) as server, convgrad.Client(server.url, max_retries=0) as client:
        kept = client.with_options(store={"grad_input": "g"}).conv_bwd_data(GRAD, WEIGHT)
        wanted = client.conv_fwd(kept, WEIGHT)
        server.kill_worker()
        assert (client.conv_fwd(kept, WEIGHT) == wanted).all()


def test_of_two_devices_the_one_that_has_a_kept_result_computes_with_it() -> None:
    with serving_tree(one_of_two) as server, convgrad.Client(server.url, max_retries=0) as client:
        answer = client.with_options(store={"grad_input": "g"}).call(
            convgrad.calls.conv_bwd_data(GRAD, WEIGHT)
        )
        # Where both are idle, the other one would be the first to be asked.
        schedule = server.tree.hub.scheduler
        schedule._running = dict(reversed(schedule._running.items()))
        again = client.call(convgrad.calls.conv_fwd(answer.outputs, WEIGHT))
        assert again.report.kernel == answer.report.kernel
        assert again.report.workspace_bytes == WEIGHT.nbytes  # what was uploaded for it
        elsewhere = client.call(convgrad.calls.conv_bwd_data(GRAD, WEIGHT))
        assert elsewhere.report.kernel != answer.report.kernel
