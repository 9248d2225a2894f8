"""Calls whose tensors a server on the same machine reads and writes in shared memory.

Requests use the Open Inference Protocol with Triton's shared-memory extension: a few hundred bytes
over HTTP that give the location of each tensor. The sizes of the outputs are known from the last
answer to a similar request; the first such answer returns them over the connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgrad._body import Body
from convgrad._call import Answer, Call, Stored
from convgrad._exchange import Requests, Target
from convgrad._processes import OfOneProcess
from convgrad._reply import Reply, server_timing_s
from convgrad._shared_regions import ALIGNMENT_BYTES, Region, RegionPool
from convgrad.dtypes import DType
from convgrad.errors import InvalidAnswer, NotFound

__all__ = ["SharedMemory"]

T = TypeVar("T")
R = TypeVar("R")
_JSON = "application/json"
_PROTOCOL = {
    DType.FLOAT16: "FP16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT32: "FP32",
    DType.FLOAT64: "FP64",
    DType.INT32: "INT32",
    DType.INT64: "INT64",
}
_FROM_PROTOCOL = {name: dtype for dtype, name in _PROTOCOL.items()}
# Most kinds of calls whose output sizes are cached.
_MOST_KINDS = 1024


@dataclass(frozen=True)
class _Output:
    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SharedMemory(OfOneProcess):
    """The shared-memory regions of a client, and the requests of calls that use them."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = RegionPool(_register, _unregister)
        self._outputs: dict[Any, tuple[_Output, ...]] = {}
        self._texts: dict[Any, bytes] = {}

    def call(self, call: Call[T]) -> Requests[Answer[T]]:
        """Send a Call and return its answer.

        Raises
        ------
        ClientError
            Shared memory cannot be allocated. Other errors are those of `Client.call`.
        """
        return (yield from self._again_if_restarted(lambda: self._attempt(call)))

    def examine(self, call: Call[Any], target: Callable[[Call[Any]], Target[R]]) -> Requests[R]:
        """Send a Call whose answer contains no tensors, such as a verification.

        ``target`` makes the request of a Call whose tensors are named in ``shared_memory``. Raises
        like `call`.
        """
        return (yield from self._again_if_restarted(lambda: self._examined(call, target)))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Requests[NDArray[Any]]:
        """Allocate an uninitialized array in shared memory."""
        output = _Output("", dtype, shape)
        region = yield from self._pool.take(output.size_bytes)
        return _array(self._pool.lend(region), output, 0)

    def close(self) -> Requests[None]:
        """Release the regions; arrays in them remain valid."""
        return self._pool.close()

    def _again_if_restarted(self, attempt: Callable[[], Requests[R]]) -> Requests[R]:
        try:
            return (yield from attempt())
        except NotFound:
            # A restarted server knows none of the regions.
            self._pool.forget_all()
            return (yield from attempt())

    @contextmanager
    def _held(self) -> Iterator[list[Region]]:
        """Collect the regions that a request uses; if it fails, they are never used again."""
        held: list[Region] = []
        try:
            yield held
        except BaseException:
            # The server may still be using them, even though the request failed.
            for region in held:
                self._pool.drop(region)
            raise

    def _attempt(self, call: Call[T]) -> Requests[Answer[T]]:
        with self._held() as held:
            places = yield from self._places(call, held)
            inputs = list(held)
            kind = _kind(call)
            known = None if self._pool.is_full else self._outputs.get(kind)
            # The shapes of stored tensors, and so of the outputs, are not known here.
            if call.parameters.keys() & {"stored", "store"}:
                known = None
            into = None
            if known is not None:
                size_bytes = sum(_aligned(output.size_bytes) for output in known)
                into = yield from self._pool.take(size_bytes)
                held.append(into)
            text = self._text(kind, call, places, known, into)
            target = Target(
                "POST",
                f"v2/models/{call.operation}/infer",
                Body(_JSON, [text]),
                lambda reply, attempts: self._read(call, reply, attempts, known, into),
            )
            answer: Answer[T] = yield target
        for region in inputs:
            self._pool.give(region)
        return answer

    def _examined(self, call: Call[Any], target: Callable[[Call[Any]], Target[R]]) -> Requests[R]:
        with self._held() as held:
            places = yield from self._places(call, held)
            shared = {
                name: {
                    "region": places[name][0],
                    "offset": places[name][1],
                    "dtype": array.dtype.name,
                    "shape": list(array.shape),
                }
                for name, array in call.tensors.items()
            }
            parameters = {**call.parameters, "shared_memory": shared}
            answer: R = yield target(replace(call, tensors={}, parameters=parameters))
        for region in held:
            self._pool.give(region)
        return answer

    def _places(self, call: Call[Any], held: list[Region]) -> Requests[dict[str, tuple[str, int]]]:
        """Copy tensors that are not in a region into one; return the location of each tensor."""
        places, elsewhere, end = {}, {}, 0
        for name, array in call.tensors.items():
            place = self._pool.place_of(array)
            if place is not None:
                places[name] = place
            else:
                elsewhere[name] = end
                end = _aligned(end + array.nbytes)
        if elsewhere:
            region = yield from self._pool.take(end)
            held.append(region)
            for name, start in elsewhere.items():
                array = call.tensors[name]
                into = region.bytes[start : start + array.nbytes]
                np.copyto(into.view(array.dtype).reshape(array.shape), array)
                places[name] = (region.name, start)
        return places

    def _text(
        self,
        kind: Any,
        call: Call[Any],
        places: Mapping[str, tuple[str, int]],
        known: tuple[_Output, ...] | None,
        into: Region | None,
    ) -> bytes:
        """Return the request body, cached by kind of call and tensor locations."""
        key = kind, tuple(places.values()), known, None if into is None else into.name
        text = self._texts.get(key)
        if text is None:
            text = json.dumps(_request(call, places, known, into)).encode()
            if len(self._texts) >= _MOST_KINDS:
                self._texts.clear()
            self._texts[key] = text
        return text

    def _read(
        self,
        call: Call[T],
        reply: Reply,
        attempts: int,
        known: tuple[_Output, ...] | None,
        into: Region | None,
    ) -> Answer[T]:
        from convgrad.contract import Report

        try:
            head, data = _split(reply)
            report = Report.model_validate(head["parameters"])
            kept, found = _outputs(head["outputs"])
            if into is not None and found != known:
                raise ValueError("the outputs differ from those of the same request before")
            arrays: dict[str, Any] = dict(kept)
            at = 0
            source = data if into is None else self._pool.lend(into)
            for output in found:
                arrays[output.name] = _array(source, output, at)
                at += output.size_bytes if into is None else _aligned(output.size_bytes)
        except (ValueError, KeyError, TypeError) as refused:
            raise InvalidAnswer(
                f"the answer cannot be read: {refused}", request_id=reply.request_id
            ) from refused
        if into is None:
            self._remember(call, found)
        return Answer(
            call.read(arrays), report, reply.request_id, server_timing_s(reply.headers), attempts
        )

    def _remember(self, call: Call[Any], outputs: tuple[_Output, ...]) -> None:
        while len(self._outputs) >= _MOST_KINDS:
            self._outputs.pop(next(iter(self._outputs)), None)
        self._outputs[_kind(call)] = outputs


def _register(region: Region) -> Target[None]:
    fields = {"key": f"/{region.name}", "offset": 0, "byte_size": region.size_bytes}
    return _control(region.name, "register", json.dumps(fields).encode())


def _unregister(name: str) -> Target[None]:
    return _control(name, "unregister", b"{}")


def _control(name: str, what: str, body: bytes) -> Target[None]:
    path = f"v2/systemsharedmemory/region/{name}/{what}"
    return Target("POST", path, Body(_JSON, [body]), lambda reply, attempts: None)


def _outputs(described: Any) -> tuple[dict[str, Stored], tuple[_Output, ...]]:
    """Split an answer's outputs into those stored on the server and those sent."""
    kept, sent = {}, []
    for each in described:
        name, dtype, shape = each["name"], _FROM_PROTOCOL[each["datatype"]], tuple(each["shape"])
        if (stored := each.get("parameters", {}).get("stored")) is not None:
            kept[name] = Stored(stored, shape, dtype)
        else:
            sent.append(_Output(name, dtype, shape))
    return kept, tuple(sent)


def _kind(call: Call[Any]) -> Any:
    """Return a key that determines the shapes and dtypes of a call's outputs."""
    tensors = tuple((name, array.shape, array.dtype) for name, array in call.tensors.items())
    return call.operation, tensors, json.dumps(call.parameters, sort_keys=True)


def _request(
    call: Call[Any],
    places: Mapping[str, tuple[str, int]],
    outputs: tuple[_Output, ...] | None,
    into: Region | None,
) -> dict[str, Any]:
    request: dict[str, Any] = {
        "inputs": [
            {
                "name": name,
                "datatype": _PROTOCOL[DType(array.dtype.name)],
                "shape": array.shape,
                "parameters": _placed(*places[name], array.nbytes),
            }
            for name, array in call.tensors.items()
        ],
        "parameters": {
            name: json.dumps(value) if isinstance(value, list | tuple | dict) else value
            for name, value in call.parameters.items()
        },
    }
    if outputs is None or into is None:
        request["parameters"]["binary_data_output"] = True
        return request
    request["outputs"], at = [], 0
    for output in outputs:
        where = _placed(into.name, at, output.size_bytes)
        request["outputs"].append({"name": output.name, "parameters": where})
        at += _aligned(output.size_bytes)
    return request


def _placed(name: str, offset: int, size_bytes: int) -> dict[str, Any]:
    return {
        "shared_memory_region": name,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size_bytes,
    }


def _split(reply: Reply) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Split an answer into its JSON and the binary data after it."""
    length = reply.headers.get("inference-header-content-length")
    end = len(reply.content) if length is None else int(length)
    head = json.loads(reply.content[:end].tobytes())
    if not isinstance(head, dict):
        raise TypeError(f"expected a JSON object, got {type(head).__name__}")
    return head, reply.content[end:]


def _array(source: NDArray[np.uint8], output: _Output, offset: int) -> NDArray[Any]:
    found = source[offset : offset + output.size_bytes]
    if found.size != output.size_bytes:
        raise ValueError(f"{output.name} takes {output.size_bytes:,} bytes, got {found.size:,}")
    array = found.view(output.dtype.numpy).reshape(output.shape)
    # After the JSON text, the data may start at any byte.
    return array if array.flags.aligned else array.copy()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
