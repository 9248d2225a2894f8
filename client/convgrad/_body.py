"""Encodes Calls as request bodies and decodes answers into arrays, for each wire format.

With safetensors nothing is copied: a request is a list of buffers, mostly the memory of the arrays
themselves, and the arrays of an answer are views of the buffer that received it. With JSON the
arrays are encoded as base64 block by block while they are sent.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from convgrad._call import Call, Stored
from convgrad.contract import Report
from convgrad.errors import InvalidAnswer, MalformedRequest
from convgrad.wire import json_tensors, safetensors

__all__ = ["WIRES", "Body", "Buffer", "Wire", "decode_answer", "writable"]

Buffer: TypeAlias = bytes | bytearray | memoryview
Decoded: TypeAlias = tuple[dict[str, Any], Report]
"""The outputs by name, arrays or `Stored` for those kept on the server; and the report."""

# Large enough for few calls, small enough that httpx's copy of each chunk stays in the cache.
_CHUNK_BYTES = 1 << 20
# Bytes of an array per megabyte of base64; a multiple of 3, so that encoded blocks concatenate.
_BASE64_BLOCK_BYTES = 3 << 18


@dataclass(frozen=True)
class Base64:
    """Base64 of ``source``, encoded only while it is sent, to save memory."""

    source: memoryview

    @property
    def nbytes(self) -> int:
        return -(-self.source.nbytes // 3) * 4

    def encoded(self) -> bytes:
        return binascii.b2a_base64(self.source, newline=False)


@dataclass(frozen=True)
class Body:
    """The body of a request. Every iteration starts from the beginning, so a retry can resend it.

    ``on_chunk`` is called with the number of bytes taken so far, before each chunk and after the
    last, and may raise to stop the upload.
    """

    content_type: str
    buffers: Sequence[Buffer | Base64]

    @property
    def total_bytes(self) -> int:
        return sum(
            buffer.nbytes if isinstance(buffer, Base64) else memoryview(buffer).nbytes
            for buffer in self.buffers
        )

    def views(self) -> Iterator[memoryview]:
        """Yield the nonempty buffers as bytes."""
        for buffer in self.buffers:
            view = memoryview(buffer.encoded() if isinstance(buffer, Base64) else buffer)
            if view.nbytes:  # memoryview cannot cast an empty buffer
                yield view.cast("B")

    def chunks(self, on_chunk: Callable[[int], None]) -> Iterator[memoryview]:
        taken = 0
        for view in self.views():
            for start in range(0, view.nbytes, _CHUNK_BYTES):
                on_chunk(taken)
                chunk = view[start : start + _CHUNK_BYTES]
                yield chunk
                taken += chunk.nbytes
        on_chunk(taken)

    async def async_chunks(self, on_chunk: Callable[[int], None]) -> AsyncIterator[memoryview]:
        for chunk in self.chunks(on_chunk):
            yield chunk


@dataclass(frozen=True)
class Wire:
    """A wire format: how to encode a request and decode an answer."""

    media_type: str
    encode: Callable[[Call[Any]], Sequence[Buffer | Base64]]
    decode: Callable[[NDArray[np.uint8]], Decoded]

    def body(self, call: Call[Any]) -> Body:
        return Body(self.media_type, self.encode(call))


def decode_answer(content_type: str, content: NDArray[np.uint8]) -> Decoded:
    """Decode the arrays and the report of a 200 answer.

    The arrays are writable, and nothing else uses their memory.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    wire = _BY_MEDIA_TYPE.get(media_type)
    if wire is None:
        known = " or ".join(_BY_MEDIA_TYPE)
        raise InvalidAnswer(f"expected an answer of type {known}, got {content_type!r}")
    try:
        return wire.decode(content)
    except (ValueError, KeyError, TypeError, MalformedRequest) as refused:
        raise InvalidAnswer(f"the answer cannot be read: {refused}") from refused


def _encode_safetensors(call: Call[Any]) -> Sequence[Buffer]:
    metadata = {"parameters": json.dumps(call.parameters)} if call.parameters else {}
    return safetensors.encode(call.tensors, metadata)


def _decode_safetensors(content: NDArray[np.uint8]) -> Decoded:
    tensors, metadata = safetensors.decode(content.data)
    report = Report.model_validate_json(metadata["report"])
    arrays = {name: writable(array) for name, array in tensors.items()}
    return {**arrays, **_stored(json.loads(metadata.get("stored", "{}")))}, report


def _encode_json(call: Call[Any]) -> Sequence[Buffer | Base64]:
    body: list[Buffer | Base64] = []
    for name, array in call.tensors.items():
        tensor = json_tensors.encode_tensor(array, "npy", b64encode=_base64_blocks)
        blocks = tensor.pop("npy")
        # The other keys come first, so that the object ends with the base64 text.
        others = "".join(f"{json.dumps(key)}:{json.dumps(tensor[key])}," for key in tensor)
        body.append(f'{"," if body else "{"}{json.dumps(name)}:{{{others}"npy":"'.encode())
        body.extend(blocks)
        body.append(b'"}')
    parameters = json.dumps(call.parameters)
    if not body:
        return [parameters.encode()]
    body.append(f",{parameters[1:]}".encode() if call.parameters else b"}")
    return body


def _base64_blocks(parts: list[bytes | memoryview]) -> list[Base64]:
    return [
        Base64(memoryview(part)[start : start + _BASE64_BLOCK_BYTES])
        for part in parts
        for start in range(0, len(part), _BASE64_BLOCK_BYTES)
    ]


def _decode_json(content: NDArray[np.uint8]) -> Decoded:
    fields = json.loads(content.tobytes())
    if not isinstance(fields, dict):
        raise TypeError(f"expected a JSON object, got {type(fields).__name__}")
    report = Report.model_validate(fields.pop("report"))
    stored = {name: each for name, each in fields.items() if "stored" in each}
    tensors = {
        name: writable(json_tensors.decode_tensor(value, name=name))
        for name, value in fields.items()
        if name not in stored
    }
    return {**tensors, **_stored(stored)}, report


def _stored(descriptions: Mapping[str, Any]) -> dict[str, Stored]:
    """Make a `Stored` for each output that the server kept."""
    return {name: Stored.described(each, each["stored"]) for name, each in descriptions.items()}


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """Return a writable array, copied only if the memory of ``array`` is immutable."""
    # Views of the receive buffer can be made writable; views of immutable bytes (JSON) cannot.
    try:
        array.flags.writeable = True
    except ValueError:
        return array.copy()
    return array


WIRES: Mapping[str, Wire] = MappingProxyType(
    {
        "safetensors": Wire(
            "application/vnd.safetensors", _encode_safetensors, _decode_safetensors
        ),
        "json": Wire("application/json", _encode_json, _decode_json),
    }
)
_BY_MEDIA_TYPE = {wire.media_type: wire for wire in WIRES.values()}
