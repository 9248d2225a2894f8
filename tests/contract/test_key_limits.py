"""Limits of API keys through every front end of a server: one count, whatever the way in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import convgrad
from convgrad.wire.json_tensors import encode_tensor
from convgrad_service.security.keys import hash_of, new_key
from tests.support.fake_backends import GatedByFile
from tests.support.http_server import EXAMPLE, JSON
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

LIMITS = {
    "ada": "max_inflight=2",
    "bob": "max_inflight_bytes=64KiB",
    "eve": "max_requests_per_s=0.01",
    "root": "max_inflight=none",
}


class Limited(NamedTuple):
    server: TreeServer
    keys: Mapping[str, str]
    gate: Path

    def headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[name]}"}

    def post(self, name: str, content: bytes = EXAMPLE) -> httpx.Response:
        # A connection of its own, so that any of the front ends may take it.
        return httpx.post(
            f"{self.server.url}/conv_bwd_data",
            content=content,
            headers={"Content-Type": JSON, **self.headers(name)},
            timeout=60,
        )

    def infer(self, name: str, side: int = 8) -> np.ndarray[Any, Any]:
        tensor = triton_grpc.InferInput("input", [1, 1, side, side], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 1, side, side), np.float32))
        with triton_grpc.InferenceServerClient(self.server.grpc) as client:
            answer = client.infer(
                "maxpool2d_fwd",
                [tensor],
                parameters={"kernel_size": 2},
                headers=self.headers(name),
            )
        found: np.ndarray[Any, Any] = answer.as_numpy("output")
        return found

    def requests(self, name: str) -> int:
        used = self.server.tree.hub.quotas.used
        return used[name].requests if name in used else 0

    def comes_to(self, name: str, wanted: float, **labels: str) -> None:
        """Wait until a metric is so much."""
        until(lambda: self.metric(name, **labels) == wanted)

    def metric(self, name: str, **labels: str) -> float:
        headers = self.headers("root")
        text = httpx.get(f"{self.server.url}/metrics", headers=headers, timeout=60).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    folder = tmp_path_factory.mktemp("keys")
    keys = {name: new_key() for name in LIMITS}
    lines = [f"{name}:{hash_of(key)} {LIMITS[name]}" for name, key in keys.items()]
    (folder / "keys").write_text("\n".join(lines))
    gate = folder / "open"
    make = partial(GatedByFile, gate)
    with serving_tree(make, slots=8, api_keys=folder / "keys", http_workers=2) as server:
        yield Limited(server, keys, gate)


@pytest.fixture
def closed(limited: Limited) -> Iterator[Limited]:
    """Nothing is answered until the gate is opened."""
    limited.gate.unlink(missing_ok=True)
    yield limited
    limited.gate.touch()
    until(lambda: not any(limited.requests(name) for name in LIMITS))


def test_requests_over_http_and_grpc_count_together(closed: Limited) -> None:
    with ThreadPoolExecutor(4) as sending:
        posted = sending.submit(closed.post, "ada")
        asked = sending.submit(closed.infer, "ada")
        until(lambda: closed.requests("ada") == 2)
        refused = closed.post("ada")
        assert refused.status_code == 429
        assert refused.json()["code"] == "overloaded"
        assert "the API key 'ada' has 2 requests in flight" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) == 1
        with pytest.raises(InferenceServerException, match="key 'ada' has 2 requests") as error:
            closed.infer("ada")
        assert error.value.status() == str(grpc.StatusCode.UNAVAILABLE)
        # Another key's work is its own.
        others = [sending.submit(closed.post, "root") for _ in range(2)]
        closed.comes_to("convgrad_key_inflight_requests", 2, key="ada")
        closed.gate.touch()
        assert posted.result().status_code == 200
        assert asked.result().shape == (1, 1, 4, 4)
        assert [other.result().status_code for other in others] == [200, 200]
    until(lambda: closed.requests("ada") == 0)
    # What a front end has seen is told within a moment.
    closed.comes_to("convgrad_key_refused_total", 2, key="ada", limit="inflight")
    closed.comes_to("convgrad_key_requests_total", 2, key="ada", code="overloaded")
    closed.comes_to("convgrad_key_requests_total", 2, key="ada", code="ok")
    # By transport too, gRPC's among them.
    for transport in ("http", "grpc"):
        closed.comes_to("convgrad_requests_total", 1, transport=transport, code="overloaded")


def test_bytes_over_http_and_grpc_count_together(closed: Limited) -> None:
    side = 96  # 36 KiB in, 9 KiB out
    with ThreadPoolExecutor(2) as sending:
        asked = sending.submit(closed.infer, "bob", side)
        until(lambda: closed.metric("convgrad_key_inflight_bytes", key="bob") > 45_000)
        with pytest.raises(InferenceServerException, match="key 'bob' hold 46,080 of the 65,536"):
            closed.infer("bob", side)
        refused = closed.post("bob", _pointwise(64))
        assert refused.status_code == 429
        assert "key 'bob'" in refused.json()["detail"]
        never = closed.post("bob", _pointwise(256))
        assert never.status_code == 413
        assert "API key 'bob' may have in flight" in never.json()["detail"]
        closed.gate.touch()
        asked.result()
    closed.comes_to("convgrad_key_inflight_bytes", 0, key="bob")
    closed.comes_to("convgrad_key_refused_total", 3, key="bob", limit="inflight_bytes")


def test_stored_tensors_count_while_they_are_sent(closed: Limited) -> None:
    array = np.zeros(20_000, np.float32)
    with convgrad.Client(closed.server.url, headers=closed.headers("bob"), max_retries=0) as client:
        with pytest.raises(convgrad.ProblemTooLarge, match="API key 'bob'"):
            client.put("large", array)
        client.put("small", array[:1000])
    closed.comes_to("convgrad_key_inflight_bytes", 0, key="bob")


def test_a_rate_holds_over_all_front_ends(limited: Limited) -> None:
    limited.gate.touch()
    codes = [limited.post("eve").status_code for _ in range(6)]
    assert codes == [200] + [429] * 5
    refused = limited.post("eve")
    assert "'eve' sends more than 0.01 requests a second" in refused.json()["detail"]
    assert 90 <= int(refused.headers["retry-after"]) <= 100


def test_a_caller_who_leaves_frees_its_place(closed: Limited) -> None:
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{closed.server.url}/conv_bwd_data",
                content=EXAMPLE,
                headers={"Content-Type": JSON, **closed.headers("ada")},
                timeout=httpx.Timeout(60, read=0.3),
            )
        until(lambda: closed.requests("ada") == 0)


def test_a_front_end_that_dies_frees_its_keys_places(closed: Limited) -> None:
    with ThreadPoolExecutor(4) as sending:
        sent = [sending.submit(closed.post, "ada") for _ in range(2)]
        until(lambda: closed.requests("ada") == 2)
        for process in closed.server.tree.front_processes:
            process.kill()
        for one in sent:
            assert isinstance(one.exception(), httpx.TransportError)
        closed.gate.touch()  # what its worker computes must end first
        until(lambda: closed.requests("ada") == 0)

        def answered() -> bool:
            try:
                return closed.post("ada").status_code == 200
            except httpx.TransportError:
                return False  # its successor does not listen yet

        until(answered)


def _pointwise(side: int) -> bytes:
    """A JSON body for /conv_bwd_data whose tensors are about twice side² floats."""
    grad_output = np.zeros((1, 1, side, side), np.float32)
    weight = np.zeros((1, 1, 1, 1), np.float32)
    return json.dumps(
        {
            "grad_output": encode_tensor(grad_output, "npy"),
            "weight": encode_tensor(weight, "npy"),
        }
    ).encode()
