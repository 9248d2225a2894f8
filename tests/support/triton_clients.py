"""Requests in the words of Triton's client libraries."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from numpy.typing import NDArray
from tritonclient.utils import shared_memory

import convgrad
from tests.support.numerics.arrays import Arrays
from tests.support.numerics.cases import Case

_PROTOCOL = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "int32": "INT32",
    "int64": "INT64",
}


def inputs(module: ModuleType, arrays: Arrays, **how: Any) -> list[Any]:
    made = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, array.shape, _PROTOCOL[array.dtype.name])
        made.append(tensor.set_data_from_numpy(np.ascontiguousarray(array), **how))
    return made


def parameters(case: Case) -> dict[str, Any]:
    """Scalars as they are, lists and objects as JSON text."""
    return {
        name: json.dumps(value) if isinstance(value, list | tuple | dict) else value
        for name, value in case.params.items()
    }


SHM = Path("/dev/shm")  # noqa: S108 - what is tested


@contextmanager
def region(size_bytes: int) -> Iterator[tuple[str, Any]]:
    """A file in /dev/shm, made as tritonclient's users make it: its name and handle."""
    name = f"convgrad_test_{uuid.uuid4().hex}"
    handle = shared_memory.create_shared_memory_region(name, f"/{name}", size_bytes)
    try:
        yield name, handle
    finally:
        shared_memory.destroy_shared_memory_region(handle)


Array = NDArray[Any]


Pool = Callable[[Array, int], Array]


def pooling(transport: str, http: str, grpc: str) -> tuple[Pool, Callable[[], None]]:
    """A max pooling over one transport, and what closes its client."""
    if transport == "sdk":
        sdk = convgrad.Client(f"http://{http}", max_retries=0)
        return lambda array, size: sdk.maxpool2d_fwd(array, size).output, sdk.close
    module: Any = http_client if transport == "http" else grpc_client
    client = module.InferenceServerClient(http if transport == "http" else grpc)

    def pool(array: Array, size: int) -> Array:
        given = module.InferInput("input", array.shape, "FP32").set_data_from_numpy(array)
        parameters = {"kernel_size": size}
        answer = client.infer(
            "maxpool2d_fwd", [given], parameters=parameters, request_id=uuid.uuid4().hex
        )
        output: Array = answer.as_numpy("output")
        return output

    return pool, client.close
