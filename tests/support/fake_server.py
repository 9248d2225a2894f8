"""A server that is a function: answers of any kind for `httpx.MockTransport`, and what was asked.

It reads requests and writes answers with the wire's own code; `test_real_server` holds the SDK
against the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

import convgrad
from convgrad.wire import json_tensors, safetensors

REPORT = {
    "backend": "fake",
    "kernel": "by_hand",
    "flops": 1000,
    "bytes": 100,
    "compute_s": 0.001,
    "pieces": 1,
    "workspace_bytes": 0,
}
SAFETENSORS = "application/vnd.safetensors"
Tensors = Mapping[str, NDArray[Any]]
Reply = httpx.Response | Exception


def answer(tensors: Tensors, form: str = SAFETENSORS, **headers: str) -> httpx.Response:
    """A 200 with these tensors."""
    if form == SAFETENSORS:
        chunks = safetensors.encode(tensors, {"report": json.dumps(REPORT)})
        content = b"".join(bytes(memoryview(chunk)) for chunk in chunks)
    else:
        fields = {name: json_tensors.encode_tensor(array, "npy") for name, array in tensors.items()}
        content = json.dumps({**fields, "report": REPORT}).encode()
    return httpx.Response(
        200, content=content, headers={"Content-Type": form, "X-Request-Id": "at-server", **headers}
    )


def problem(code: str, detail: str = "because", **headers: str) -> httpx.Response:
    """The problem+json of an error code."""
    row = convgrad.errors.CODES[code]
    body = {"code": code, "detail": detail, "status": row.http_status, "request_id": "at-server"}
    return httpx.Response(
        row.http_status,
        content=json.dumps(body).encode(),
        headers={"Content-Type": "application/problem+json", **headers},
    )


@dataclass
class FakeServer:
    """Gives ``replies`` one after another, the last one forever, and keeps every request."""

    replies: Iterable[Reply | Callable[[httpx.Request], Reply]]
    requests: list[httpx.Request] = field(default_factory=list)
    slept_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._replies: Iterator[Any] = iter(self.replies)
        self._next: Any = None

    def client(self, **options: Any) -> convgrad.Client:
        http = httpx.Client(transport=httpx.MockTransport(self.handle))
        return convgrad.Client(
            "http://server", http_client=http, sleep=self.slept_s.append, **options
        )

    def async_client(self, **options: Any) -> convgrad.AsyncClient:
        async def sleep(seconds: float) -> None:
            self.slept_s.append(seconds)

        async def handle(request: httpx.Request) -> httpx.Response:
            await request.aread()
            return self._reply(request)

        http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
        return convgrad.AsyncClient("http://server", http_client=http, sleep=sleep, **options)

    def sent(self, index: int = -1) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The tensors and parameters of a request."""
        request = self.requests[index]
        if request.headers["Content-Type"] == SAFETENSORS:
            tensors, metadata = safetensors.decode(request.content)
            return tensors, json.loads(metadata.get("parameters", "{}"))
        fields = json.loads(request.content)
        is_tensor = {
            name: isinstance(value, dict) and "npy" in value for name, value in fields.items()
        }
        return (
            {
                name: json_tensors.decode_tensor(value, name=name)
                for name, value in fields.items()
                if is_tensor[name]
            },
            {name: value for name, value in fields.items() if not is_tensor[name]},
        )

    def handle(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._reply(request)

    def _reply(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self._next = next(self._replies, self._next)
        reply = self._next(request) if callable(self._next) else self._next
        if isinstance(reply, Exception):
            raise reply
        assert isinstance(reply, httpx.Response)
        # Sent more than once, a response must be a new one each time.
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)


def ones(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.ones(shape, dtype)
