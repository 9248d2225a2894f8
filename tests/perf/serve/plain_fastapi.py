"""The JSON peer: the route one writes first, with FastAPI, pydantic and base64."""

from __future__ import annotations

import base64
import sys

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import Base64Bytes, BaseModel

from tests.perf.serve.sizes import OPERATION, SIZES


class Tensor(BaseModel):
    data: Base64Bytes
    dtype: str
    shape: list[int]


class Request(BaseModel):
    input: Tensor
    kernel_size: int
    response: str


class Answer(BaseModel):
    output: dict[str, str | list[int]]


READY: dict[tuple[int, ...], bytes] = {
    size.input_shape: np.ones(size.output_shape, np.float32).tobytes() for size in SIZES.values()
}
app = FastAPI()


@app.post(f"/{OPERATION}")
def pool(request: Request) -> Answer:
    tensor = np.frombuffer(request.input.data, request.input.dtype)
    tensor = tensor.reshape(request.input.shape)
    tensor.sum()
    ready = READY[tuple(request.input.shape)]
    text = base64.b64encode(ready).decode()
    return Answer(output={"data": text, "dtype": "float32", "shape": list(tensor.shape)})


if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        log_level="error",
    )
