"""``/time``, ``/plan`` and ``/layers`` on a real server, as their callers use them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.examinations import PLANS, TIMINGS
from convgrad.contract.timing import PlanExplained, TimedPlan
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.security.keys import hash_of, new_key
from tests.support.http_server import LiveServer, serving
from tests.support.raw_http import read_all

LAYER = "mb2ic8ih9oc8oh9kh3ph1"
SMALL = {"budget_s": 0.05, "peers": "none", "standard_error": 0.5}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with serving(CpuBackend(threads=1), log_level="error", max_timings=2) as live:
        yield live


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_explains_its_plan(http: httpx.Client, operation: str) -> None:
    fields = PLANS[operation].example
    answer = http.get(f"/plan/{operation}", params={**fields, "dtype": "bfloat16"})
    assert answer.status_code == 200, answer.text
    found = PlanExplained.model_validate(answer.json())
    assert found.plan.kernel
    assert found.flops >= found.valid_flops >= 0
    assert found.reference.seconds > 0
    dtypes = {spec.dtype for name, spec in found.inputs.items() if name != "indices"}
    assert dtypes == {"bfloat16"}
    assert set(found.outputs) <= set(OPERATIONS[operation].outputs)


def test_a_plan_takes_lists_as_json(http: httpx.Client) -> None:
    query = {
        "shapes": '{"grad_output": [1, 4, 5], "weight": [4, 2, 3]}',
        "padding": "[[1, 0]]",
        "groups": "2",
    }
    found = http.get("/plan/conv_bwd_data", params=query).json()
    assert found["outputs"]["grad_input"]["shape"] == [1, 4, 6]
    for query, sentence in (
        ({"stride": "[1", "layer": LAYER}, "stride"),
        ({"result_grad_input": "1"}, "unknown field"),
    ):
        answer = http.get("/plan/conv_bwd_data", params=query)
        assert answer.status_code == 400
        assert sentence in answer.json()["detail"]
    twice = http.get("/plan/conv_bwd_data?batch=1&batch=2")
    assert "twice" in twice.json()["detail"]


def test_layers_are_said_in_every_dialect(http: httpx.Client) -> None:
    found = http.get("/layers", params={"layer": "ck_headline"}).json()
    assert found["output_size"] == [36, 36]
    for words in found["spellings"].values():
        other = http.get("/layers", params={"layer": words}).json()
        assert other["output_size"] == [36, 36]
    assert "networks" in http.get("/layers").json()["suites"]
    assert len(http.get("/layers", params={"suite": "resnet50"}).json()["layers"]) > 10
    assert http.get("/layers", params={"layer": "x"}).status_code == 400
    other = http.get("/layers", params={"layer": LAYER, "batch": 5}).json()
    assert other["batch"] == 5
    pooling = {"layer": "AdaptiveAvgPool2d(output_size=(7, 3)) on 1x5x14x14"}
    assert http.get("/layers", params=pooling).json()["adaptive_size"] == [7, 3]
    refused = http.get("/layers", params={"layer": LAYER, "batch": "many"})
    assert "batch is 'many'; expected a number" in refused.json()["detail"]
    refused = http.get("/layers", params={"layer": [LAYER, "ck_headline"]})
    assert refused.json()["detail"] == 'the query has "layer" twice'


def test_http_1_0_gets_no_events(server: LiveServer) -> None:
    """It has no chunked coding, without which events cannot be sent."""
    operation = "maxpool2d_fwd"
    body = json.dumps({**TIMINGS[operation].example, **SMALL}).encode()
    for accept, status in ((b"text/event-stream", 406), (b"text/event-stream, */*", 200)):
        with server.connect(60) as connection:
            connection.sendall(
                b"POST /time/%s HTTP/1.0\r\nContent-Type: application/json\r\nAccept: %s\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (operation.encode(), accept, len(body), body)
            )
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert b"transfer-encoding" not in answer


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_timed(http: httpx.Client, operation: str) -> None:
    answer = http.post(f"/time/{operation}", json={**TIMINGS[operation].example, **SMALL})
    assert answer.status_code == 200, answer.text
    found = TimedPlan.model_validate(answer.json())
    assert set(found.timings) == {"cold", "warm", "back_to_back"}
    for timed in found.timings.values():
        assert timed.samples >= 3
        assert 0 < timed.min_s <= timed.p25_s <= timed.median_s <= timed.p75_s <= timed.max_s
        assert timed.reference_share == pytest.approx(found.reference.seconds / timed.median_s)
    assert found.candidates[0].chosen
    assert found.again is not None
    assert found.again.path == f"/time/{operation}"


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_a_timing_tells_how_it_goes(http: httpx.Client) -> None:
    headers = {"accept": "text/event-stream"}
    body = {"layer": LAYER, **SMALL}
    with http.stream("POST", "/time/conv_bwd_data", json=body, headers=headers) as response:
        assert response.status_code == 202
        assert response.headers["content-type"] == "text/event-stream"
        told = list(events(response))
    assert told[-1][0] == "result"
    TimedPlan.model_validate(told[-1][1])
    assert {name for name, _ in told[:-1]} <= {"queued", "running"}


class Waiting(threading.Thread):
    """A timing by its own client, with the events that the client received."""

    def __init__(self, server: LiveServer, key: str = "", **fields: Any) -> None:
        super().__init__(daemon=True)
        self.told: list[tuple[str, Any]] = []
        self._server, self._fields, self._key = server, fields, key
        self.start()

    def run(self) -> None:
        headers = {"accept": "text/event-stream"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        body = {"layer": LAYER, "peers": "none", "standard_error": 1e-9, **self._fields}
        try:
            with (
                httpx.Client(base_url=self._server.url, timeout=60) as client,
                client.stream("POST", "/time/conv_bwd_data", json=body, headers=headers) as answer,
            ):
                self._socket = answer.extensions["network_stream"].get_extra_info("socket")
                for event in events(answer):
                    self.told.append(event)
        except httpx.HTTPError:
            self.told.append(("closed", None))

    def until(self, name: str) -> Any:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for event, data in self.told:
                if event == name:
                    return data
            time.sleep(0.01)
        raise AssertionError(f"no {name} in {self.told}")

    def close(self) -> None:
        """Leave while the server is still at it."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join(30)


def test_two_clients_time_one_after_the_other(server: LiveServer, http: httpx.Client) -> None:
    first = Waiting(server, budget_s=2.0)
    first.until("running")
    second = Waiting(server, budget_s=0.05)
    assert second.until("queued") == {"position": 0}
    # A third is one too many, and is told so before its body is read.
    refused = http.post("/time/conv_bwd_data", json={"layer": LAYER, **SMALL})
    assert refused.status_code == 429
    assert "2 timings are queued or running" in refused.json()["detail"]
    assert "retry-after" in refused.headers
    # Nothing else computes meanwhile either, and all of it does afterwards.
    body = OPERATIONS["conv_bwd_data"].example
    assert http.post("/conv_bwd_data", json=body).status_code == 200
    assert any(name == "result" for name, _ in first.told)
    second.until("result")
    first.join(30)
    second.join(30)
    names = [name for name, _ in second.told]
    assert names[-2:] == ["running", "result"]
    server.wait_until_idle()


def test_who_leaves_cancels_a_timing(server: LiveServer, http: httpx.Client) -> None:
    running = Waiting(server, budget_s=5.0)
    running.until("running")
    waiting = Waiting(server, budget_s=5.0)
    waiting.until("queued")
    began_s = time.monotonic()
    waiting.close()
    running.close()
    server.wait_until_idle()
    assert time.monotonic() - began_s < 4
    assert http.post("/time/conv_bwd_data", json={"layer": LAYER, **SMALL}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "status", "sentence"),
    [
        ({"budget_s": 1e3}, 400, "times for at most 5 s"),
        ({"budget_s": 0}, 400, "budget_s"),
        ({"standard_error": 0}, 400, "standard_error"),
        ({"grad_output": {"values": [1], "dtype": "float32"}}, 400, "unknown field"),
        ({"store": {"ours_grad_input": "x"}}, 400, "no outputs to be stored"),
        ({"stored": {"weight": "x"}}, 400, "it has none"),
        ({"layer": "mb1000ic512ih512oc512kh3ph1"}, 413, "at most"),
        ({"layer": "mb1ic2048ih2048oc2048kh3ph1"}, 413, "at most"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    http: httpx.Client, fields: dict[str, Any], status: int, sentence: str
) -> None:
    answer = http.post("/time/conv_bwd_data", json={"layer": LAYER, **fields})
    assert answer.status_code == status, answer.text
    assert sentence in answer.json()["detail"]


def test_what_fails_after_the_events_began_is_an_event(http: httpx.Client) -> None:
    headers = {"accept": "text/event-stream", "x-request-timeout": "0.3"}
    body = {"layer": "mb8ic64ih56oc64kh5ph2", "budget_s": 5, "standard_error": 1e-9}
    with http.stream("POST", "/time/conv_bwd_data", json=body, headers=headers) as response:
        assert response.status_code == 202
        told = list(events(response))
    assert told[-1][0] == "error"
    assert told[-1][1]["code"] == "deadline-exceeded"


def test_a_key_has_a_quota_of_its_own(tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("ada", "bob")}
    file = tmp_path / "keys"
    file.write_text("\n".join(f"{name}:{hash_of(key)}" for name, key in keys.items()))
    with serving(
        CpuBackend(threads=1), log_level="error", api_keys=file, key_max_timings=1
    ) as server:
        first = Waiting(server, keys["ada"], budget_s=1.0)
        first.until("running")

        def timed(name: str) -> httpx.Response:
            return httpx.post(
                f"{server.url}/time/conv_bwd_data",
                json={"layer": LAYER, **SMALL},
                headers={"authorization": f"Bearer {keys[name]}"},
                timeout=60,
            )

        refused = timed("ada")
        assert refused.status_code == 429
        assert "1 of this key's timings are queued or running" in refused.json()["detail"]
        assert timed("bob").status_code == 200
        first.join(30)
        assert timed("ada").status_code == 200
        assert httpx.post(f"{server.url}/time/conv_bwd_data", json={}).status_code == 401
        headers = {"authorization": f"Bearer {keys['ada']}"}
        metrics = httpx.get(f"{server.url}/metrics", headers=headers).text
        assert "/timings" not in metrics


def test_openapi_describes_all_of_it(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for operation in OPERATIONS:
        assert "post" in document["paths"][f"/verify/{operation}"]
        assert "202" in document["paths"][f"/time/{operation}"]["post"]["responses"]
        assert "get" in document["paths"][f"/plan/{operation}"]
    assert "Verification" in document["components"]["schemas"]
