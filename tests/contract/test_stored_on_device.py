"""Stored tensors stay on the device that computes with them: a fake one, see `tests.fake_gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import convgrad
from convgrad_service.engine import stored
from tests.contract.server import LiveServer, serving
from tests.contract.tree_server import serving_tree, until
from tests.fake_gpu import FakeGpu, fake_gpu

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
    with convgrad.Client(server.url, retries=0) as client:
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
    until(lambda: not gpu._residents)  # nothing is left on the device


def test_what_a_request_stores_is_kept_there_once_it_is_used(
    server: LiveServer, gpu: FakeGpu
) -> None:
    with convgrad.Client(server.url, retries=0) as client:
        weight = client.put("weight", WEIGHT)
        kept = client.with_options(store={"grad_input": "g"}).conv_bwd_data(GRAD, weight)
        assert isinstance(kept, convgrad.Stored)
        wanted = client.conv_fwd(client.fetch("g"), WEIGHT)
        for _ in range(2):
            before = gpu.moved_bytes
            assert (client.conv_fwd(kept, weight) == wanted).all()
        assert gpu.moved_bytes - before == wanted.nbytes


def test_a_device_that_is_lost_takes_no_tensor_with_it() -> None:
    with serving_tree(fake_gpu) as server, convgrad.Client(server.url, retries=0) as client:
        weight = client.put("weight", WEIGHT)
        wanted = client.conv_bwd_data(GRAD, WEIGHT)
        for _ in range(2):
            assert (client.conv_bwd_data(GRAD, weight) == wanted).all()
            server.kill_worker()
        assert (client.conv_bwd_data(GRAD, weight) == wanted).all()
