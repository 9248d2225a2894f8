"""Every operation, rank and dtype over HTTP, in both forms, through both gates.

What is sent and read here goes through the standard library and the safetensors package, not our
own codecs: a mistake that those make both ways would not be seen by the SDK's tests.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS
from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import JSON, SAFETENSORS, serving
from tests.support.kernels.harness import GATES, check, drawn
from tests.support.numerics.arrays import DTYPES, Arrays, canonical, request_arrays
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import FROM_CONV, FROM_PASSES, Case
from tests.support.numerics.one_per_rank import ONE_PER_RANK

_NUMPY = {**DTYPES, "int64": np.dtype(np.int64), "int32": np.dtype(np.int32)}
_SHORT = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "I64": "int64"}


def test_every_operation_has_a_case_of_every_rank() -> None:
    ranks = {
        name: {case.ndim for case in ONE_PER_RANK if case.operation == name} for name in OPERATIONS
    }
    anywhere = (*FROM_CONV, *FROM_PASSES)
    assert all(ranks[name] == {1, 2, 3} for name in anywhere), ranks
    assert all(ranks.values()), ranks


@pytest.fixture(scope="module")
def computing(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client of a new server, or of the one that runs at ``--url``."""
    with contextlib.ExitStack() as until_done:
        url = request.config.getoption("--url")
        if url is None:
            server = until_done.enter_context(serving(CpuBackend(), log_level="error"))
            url = server.url
        yield until_done.enter_context(httpx.Client(base_url=url, timeout=60))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ONE_PER_RANK, ids=lambda case: case.id)
def test_both_forms_pass_both_gates(
    computing: httpx.Client, seed: int, case: Case, dtype: str, gate: str
) -> None:
    tensors, wanted = drawn(seed, case, dtype, gate)
    arrays = request_arrays(case, tensors, None)
    answers = {
        form: send(computing, case, arrays) for form, send in (("json", _json), ("st", _tensors))
    }
    for form, found in answers.items():
        outputs = {
            name: canonical(case.operation, name, array, None, case.groups)
            for name, array in found.items()
        }
        check(outputs, wanted, gate, f"seed {seed}, {case.id} {dtype} {form}")
    for name, array in answers["json"].items():
        assert_same_bits(array, answers["st"][name], name)


def _json(client: httpx.Client, case: Case, arrays: Arrays) -> Arrays:
    """Tensors are sent and returned in the form "data": base64 of the bytes, dtype and shape."""
    tensors = {
        name: {
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
            "dtype": array.dtype.name,
            "shape": array.shape,
        }
        for name, array in arrays.items()
    }
    body = json.dumps({**tensors, **case.params, "response": "data"})
    answer = _posted(client, case, body.encode(), JSON).json()
    del answer["report"]
    return {
        name: _array(base64.b64decode(tensor["data"]), tensor["dtype"], tensor["shape"])
        for name, tensor in answer.items()
    }


def _tensors(client: httpx.Client, case: Case, arrays: Arrays) -> Arrays:
    """Out and back as safetensors, by the package of that name."""
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    tensors = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.__array_interface__["data"][0],
            data_len=array.nbytes,
        )
        for name, array in kept.items()
    }
    body = safetensors.serialize(tensors, {"parameters": json.dumps(case.params)})
    answer = _posted(client, case, body, SAFETENSORS).content
    return {
        name: _array(tensor["data"], _SHORT[tensor["dtype"]], tensor["shape"])
        for name, tensor in safetensors.deserialize(answer)
    }


def _posted(client: httpx.Client, case: Case, body: bytes, media_type: str) -> httpx.Response:
    answer = client.post(f"/{case.operation}", content=body, headers={"Content-Type": media_type})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == media_type
    return answer


def _array(data: bytes, dtype: str, shape: list[int]) -> NDArray[Any]:
    return np.frombuffer(data, _NUMPY[dtype]).reshape(shape)
