"""Every operation, rank and dtype through tritonclient, unchanged: HTTP and gRPC, sync and asyncio.

Answers go through the exact gate, and every way gives the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
from numpy.typing import NDArray

from convgrad_service.backends.cpu import CpuBackend
from tests.support.kernels.harness import check, drawn
from tests.support.numerics.arrays import DTYPES, canonical, request_arrays
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case
from tests.support.numerics.one_per_rank import ONE_PER_RANK
from tests.support.oip_server import OipServer, serving_oip
from tests.support.triton_clients import inputs, parameters

_IN_JSON = ("float32", "float64")


@pytest.fixture(scope="module")
def oip() -> Iterator[OipServer]:
    with serving_oip(CpuBackend()) as server:
        yield server


@pytest.fixture(scope="module")
def over_http(oip: OipServer) -> Iterator[Any]:
    with http_client.InferenceServerClient(oip.http) as client:
        yield client


@pytest.fixture(scope="module")
def over_grpc(oip: OipServer) -> Iterator[Any]:
    with grpc_client.InferenceServerClient(oip.grpc) as client:
        yield client


def found(result: Any, names: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    return {name: result.as_numpy(name) for name in names}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ONE_PER_RANK, ids=lambda case: case.id)
def test_every_way_gives_the_right_answer(
    over_http: Any, over_grpc: Any, seed: int, case: Case, dtype: str
) -> None:
    tensors, wanted = drawn(seed, case, dtype, "exact")
    arrays = request_arrays(case, tensors, None)
    answers = {}
    for way, client, module in (("http", over_http, http_client), ("grpc", over_grpc, grpc_client)):
        result = client.infer(case.operation, inputs(module, arrays), parameters=parameters(case))
        answers[way] = found(result, wanted)
    if dtype in _IN_JSON:
        result = over_http.infer(
            case.operation,
            inputs(http_client, arrays, binary_data=False),
            outputs=[http_client.InferRequestedOutput(name, binary_data=False) for name in wanted],
            parameters=parameters(case),
        )
        answers["json"] = found(result, wanted)
    outputs = {
        name: canonical(case.operation, name, array, None, case.groups)
        for name, array in answers["grpc"].items()
    }
    check(outputs, wanted, "exact", f"seed {seed}, {case.id} {dtype}")
    for way, answer in answers.items():
        for name, array in answer.items():
            assert_same_bits(array, answers["grpc"][name], f"{way} {name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_asyncio_clients_give_the_same(
    oip: OipServer, over_grpc: Any, seed: int, dtype: str
) -> None:
    async def ask() -> None:
        async with (
            http_aio.InferenceServerClient(oip.http) as http,
            grpc_aio.InferenceServerClient(oip.grpc) as grpc,
        ):
            for case in ONE_PER_RANK:
                tensors, wanted = drawn(seed, case, dtype, "exact")
                arrays = request_arrays(case, tensors, None)
                name, kept = case.operation, {"parameters": parameters(case)}
                expected = over_grpc.infer(name, inputs(grpc_client, arrays), **kept)
                results = await asyncio.gather(
                    http.infer(name, inputs(http_client, arrays), **kept),
                    grpc.infer(name, inputs(grpc_client, arrays), **kept),
                )
                for result in results:
                    for output in wanted:
                        assert_same_bits(
                            result.as_numpy(output), expected.as_numpy(output), f"{case.id}"
                        )

    asyncio.run(ask())
