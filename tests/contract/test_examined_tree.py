"""Verifying and timing where front ends are processes of their own, by the SDK."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

import convgrad
from convgrad import check, layers
from convgrad_service.backends.cpu import CpuBackend
from tests.support.tree_server import TreeServer, serving_tree

pytestmark = pytest.mark.processes

LAYER = "mb2ic8ih9oc8oh9kh3ph1"


def one_thread(device: int) -> CpuBackend:
    return CpuBackend(threads=1)


@pytest.fixture(scope="module")
def tree() -> Iterator[TreeServer]:
    with serving_tree(one_thread, http_workers=2) as server:
        yield server


@pytest.fixture
def client(tree: TreeServer) -> Iterator[convgrad.Client]:
    with convgrad.Client(tree.url, max_retries=0) as made:
        yield made


def test_a_client_verifies_times_and_explains(client: convgrad.Client) -> None:
    shapes, parameters = layers.arguments("conv_bwd_data", layers.parse(LAYER))
    tensors = {name: check.draw(name, shape, "float32", 4) for name, shape in shapes.items()}
    mine = client.conv_bwd_data(**tensors, **parameters)
    # By several connections, so that both front ends are asked.
    for _ in range(4):
        with convgrad.Client(client._options.base_url) as other:
            found = other.verify("conv_bwd_data", mine, layer=LAYER, seed=4, second=mine)
        assert found.passed, found.findings
        bits = found.outputs["grad_input"].bits
        assert bits.equal_to_ours
        assert bits.equal_to_second
    found = client.verify("conv_bwd_data", mine, **tensors, **parameters)
    assert found.inputs.drawn == ()
    kept = client.put("w", tensors["weight"])
    sent = {**tensors, "weight": kept}
    assert client.verify("conv_bwd_data", mine, **sent, **parameters).passed
    timed = client.time("conv_bwd_data", layer=LAYER, budget_s=0.1, peers="none")
    assert timed.timings["warm"].samples >= 3
    plan = client.plan("conv_bwd_data", layer=LAYER, dtype="bfloat16", layout="NHWC")
    assert plan.inputs["weight"].shape == (8, 3, 3, 8)
    with pytest.raises(convgrad.MalformedRequest, match="there is no operation"):
        client.plan("conv_bwd")
    with pytest.raises(convgrad.MalformedRequest, match="unknown field"):
        client.time("conv_bwd_data", layers=LAYER)


def test_an_asynchronous_client_does_too(tree: TreeServer) -> None:
    async def scenario() -> None:
        async with convgrad.AsyncClient(tree.url) as client:
            plan = await client.plan("conv_fwd", layer=LAYER)
            shapes, parameters = layers.arguments("conv_fwd", layers.parse(LAYER))
            tensors = {name: check.draw(name, shape, "float32") for name, shape in shapes.items()}
            mine = await client.conv_fwd(**tensors, **parameters)
            mine[0, 0, 0, 0] += 1
            found, timed = await asyncio.gather(
                client.verify("conv_fwd", mine, layer=LAYER),
                client.time("conv_fwd", layer=LAYER, budget_s=0.1, peers="none"),
            )
        assert plan.outputs["output"].shape == (2, 8, 9, 9)
        assert [finding.code for finding in found.findings] == ["single-element"]
        assert timed.plan.kernel == plan.plan.kernel

    asyncio.run(scenario())


def test_positions_are_told_through_front_ends(tree: TreeServer) -> None:
    told: list[list[tuple[str, dict[str, int]]]] = []

    def timing(budget_s: float) -> None:
        own: list[tuple[str, dict[str, int]]] = []
        told.append(own)
        body = {"layer": LAYER, "peers": "none", "standard_error": 1e-9, "budget_s": budget_s}
        headers = {"accept": "text/event-stream"}
        url = f"{tree.url}/time/conv_bwd_data"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    own.append((name, json.loads(line[6:])))

    threads = []
    for budget_s in (2.0, 0.1):
        threads.append(threading.Thread(target=timing, args=(budget_s,)))
        threads[-1].start()
        end = time.monotonic() + 20
        while not (len(told) == len(threads) and told[-1]) and time.monotonic() < end:
            time.sleep(0.01)
    for thread in threads:
        thread.join(60)
    assert told[0][0][0] == "running"
    assert told[1][0] == ("queued", {"position": 0})
    assert [own[-1][0] for own in told] == ["result", "result"]
