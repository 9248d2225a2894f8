"""JSON bodies: the fields of a request, and the tensors of an answer.

Base64 strings are nearly all of a large body. Long ones are views of the body that are decoded
once, block by block, straight into their tensors' memory. Answers are encoded block by block from
the arrays' memory, when they are sent. The base64 never becomes a Python string.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from convgrad.contract import Operation, Report, refuse_unknown
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad.wire.json_tensors import FORMS, Base64Text, Form, decode_tensor, encode_tensor
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import dtype_of
from convgrad_service.engine.execution import Execution, Filler, Source
from convgrad_service.engine.memory.arena import Lease
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.engine.request import SMALL_BYTES, blank
from convgrad_service.engine.telemetry.record import Timings
from convgrad_service.http_api.body import Body, Text
from convgrad_service.http_api.transport import EncodedLater
from convgrad_service.long_json import LongValues, blocks_of, dumps

# Fits the cache, and is a multiple of four characters (three bytes).
_BLOCK_BYTES = 3 * 2**18
_BLOCK_CHARACTERS = _BLOCK_BYTES // 3 * 4
_BASE64 = LongValues(
    ("npy", "data"),
    '""',
    min_bytes=16 * 1024,
    wrap=lambda text: text,
    advice='send large tensors as "npy" or "data"',
)
# This form is for human readers: an element takes some twenty characters and a microsecond, against
# five characters in base64.
_MAX_VALUES = 2**20


class TextReader:
    """See `Reader`: the whole body is in the arena until its tensors have been read from it."""

    def __init__(self, content_type: str) -> None:
        self._content_type = content_type
        self._text = Text(memoryview(b""))
        self._fillers: dict[str, Filler] = {}

    async def head(self, body: Body, pipeline: Pipeline) -> Hashable | None:
        self._text = await body.whole(pipeline.engine)
        return None

    @property
    def body_lease(self) -> Lease | None:
        return self._text.lease

    @property
    def decodes_inline(self) -> bool:
        return self._text.lease is None

    async def fill(self, body: Body, execution: Execution, timings: Timings) -> None:
        sources: dict[str, Source] = {**execution.request.tensors(), **self._fillers}
        with timings.stage("decode"):
            await execution.fill(sources, body_lease=self._text.lease)
        self.close()

    def close(self) -> None:
        self._text.release()


def describe_json_request(
    body: bytes | bytearray | memoryview, operation: Operation
) -> tuple[dict[str, Any], dict[str, Filler]]:
    """Return a request's fields, and the fillers of those tensors that are still blank.

    A tensor with long base64 is a blank of its shape and dtype until its filler is called with its
    memory. The fields are ready for `convgrad.contract.validate`.

    Raises
    ------
    MalformedRequest
        The body is not a JSON object, has an unknown field, or a tensor cannot be read. The fillers
        raise it too.
    """
    fields = parse_json_body(body)
    refuse_unknown(operation.request, fields)
    fillers: dict[str, Filler] = {}
    stored = {
        name: _stored_name(value, name)
        for name in operation.tensors
        if isinstance(value := fields.get(name), dict) and "stored" in value
    }
    if "response" not in fields:
        fields["response"] = _form_of(fields, operation)
    if stored:
        others = fields.get("stored")
        fields["stored"] = {**(others if isinstance(others, dict) else {}), **stored}
    for name in operation.tensors:
        if name in stored:
            del fields[name]
        # An optional tensor may be null; decoding refuses a null required one.
        if name in fields and (fields[name] is not None or name in operation.required_tensors):
            fields[name], filler = described_tensor(fields[name], name)
            if filler is not None:
                fillers[name] = filler
    return fields, fillers


def _form_of(fields: Mapping[str, Any], operation: Operation) -> str:
    """Return the form of the first tensor that is not stored."""
    given = (fields.get(name) for name in operation.tensors)
    forms = (form for tensor in given if isinstance(tensor, dict) for form in FORMS & tensor.keys())
    return next(forms, "npy")


def _stored_name(tensor: Mapping[str, Any], field: str) -> str:
    name = tensor["stored"]
    if len(tensor) > 1 or not isinstance(name, str):
        raise MalformedRequest(
            f'{field}: expected "stored" to be the name of a tensor, and no other key, got '
            f"{shown(tensor)}"
        )
    return name


def described_tensor(tensor: Any, name: str) -> tuple[NDArray[Any], Filler | None]:
    """Return a tensor's array and, if that is still blank, its filler.

    Raises
    ------
    MalformedRequest
        The tensor cannot be read.
    """
    deferred: list[DeferredBase64] = []

    def defer(text: Base64Text) -> bytes | DeferredBase64:
        if not (isinstance(text, memoryview) and DeferredBase64.worth(text)):
            return b64decode(text)
        deferred.append(DeferredBase64(text, name))
        return deferred[-1]

    try:
        array = decode_tensor(tensor, name=name, b64decode=defer)
    except (MalformedRequest, ValueError):
        # Escapes in the text make the size wrong; then decode now.
        return decode_tensor(tensor, name=name, b64decode=b64decode), None
    used = [text for text in deferred if text.used]
    return array, used[0].fill if used else None


def parse_json_body(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Parse a body; long strings under ``npy`` and ``data`` become views of the bytes between their
    quotes."""
    return _BASE64.parse_object(memoryview(body).cast("B"), "the body")


def json_answer(
    outputs: Mapping[str, NDArray[Any]],
    report: Report,
    form: Form,
    store: Mapping[str, str] = MappingProxyType({}),
) -> list[bytes | memoryview | EncodedLater]:
    """Encode ``{"grad_input": {...}, "report": {...}}`` with tensors in ``form``.

    Base64 is encoded block by block when it is sent. Of outputs in ``store`` only the name there is
    sent, and their elements are not read.
    """
    chunks: list[bytes | memoryview | EncodedLater] = [b"{"]
    for name, array in outputs.items():
        chunks.append(dumps(name) + b":{")
        if name in store:
            chunks.append(dumps(stored_tensor(array, store[name]))[1:-1])
        else:
            chunks.extend(_members(encode_tensor(array, form, b64encode=_Base64)))
        chunks.append(b"},")
    chunks.append(b'"report":' + report.model_dump_json().encode() + b"}")
    return chunks


def stored_tensor(array: NDArray[Any], name: str) -> dict[str, Any]:
    """Describe an output that was stored."""
    return {"stored": name, "dtype": dtype_of(array).value, "shape": list(array.shape)}


class _Base64:
    """The base64 of consecutive parts; the size of all but the last is a multiple of 3 bytes."""

    def __init__(self, parts: list[bytes | memoryview]) -> None:
        self.chunks = [block for part in parts for block in encoded_later(part)]


def _members(encoded: Mapping[str, Any]) -> Iterator[bytes | EncodedLater]:
    separator = b""
    for key, value in encoded.items():
        yield separator + dumps(key) + b":"
        if isinstance(value, _Base64):
            yield b'"'
            yield from value.chunks
            yield b'"'
        else:
            yield b"".join(blocks_of(value))
        separator = b","


def refuse_endless_values(elements: int, form: Form) -> None:
    """Raise ProblemTooLarge if ``values`` are requested for too many elements."""
    if form == "values" and elements > _MAX_VALUES:
        raise ProblemTooLarge(
            f'response "values" is for at most {_MAX_VALUES:,} elements and the answer has '
            f'{elements:,}; ask for "npy" or "data"'
        )


def b64decode(text: Base64Text) -> bytes:
    """Decode strict base64, from a string or from the raw text of a JSON string."""
    try:
        return pybase64.b64decode(text, validate=True)
    except ValueError:
        # JSON allows any character to be escaped; \/ occurs in practice, but rarely.
        if isinstance(text, str) or b"\\" not in (escaped := bytes(text)):
            raise
        return pybase64.b64decode(json.loads(b'"' + escaped + b'"'), validate=True)


class DeferredTensor:
    """A tensor's data, which subclasses read once its destination is known.

    See `convgrad.wire.shapes.Deferred`.
    """

    def __init__(self, data: memoryview, name: str) -> None:
        self._data, self._name = data, name
        self._offset: int | None = None

    @property
    def used(self) -> bool:
        """Whether a tensor refers to it."""
        return self._offset is not None

    def later(self, dtype: DType, shape: tuple[int, ...], offset: int) -> NDArray[Any]:
        """See `Deferred.later`."""
        self._offset = offset
        return blank(shape, dtype, name=self._name)


class DeferredBase64(DeferredTensor):
    """Long base64, not decoded yet.

    The size of invalid base64 may be wrong; then it does not match the shape, or `fill` refuses it.
    """

    @staticmethod
    def worth(text: memoryview) -> bool:
        """Whether a text is long enough to be deferred, and may be base64."""
        return len(text) > SMALL_BYTES and len(text) % 4 == 0

    def __len__(self) -> int:
        return len(self._data) // 4 * 3 - bytes(self._data[-2:]).count(b"=")

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        first = start // 3
        return b64decode(self._data[first * 4 : -(-stop // 3) * 4])[start - 3 * first :][
            : max(stop - start, 0)
        ]

    def fill(self, target: NDArray[Any]) -> None:
        """Decode what follows the offset into a contiguous array of the same size."""
        assert self._offset is not None  # noqa: S101
        place = target.reshape(-1).view(np.uint8).data
        # Blocks start at whole groups; skip what precedes the tensor in the first one.
        before = self._offset % 3
        text = self._data[self._offset // 3 * 4 :]
        end = 0
        for start in range(0, len(text), _BLOCK_CHARACTERS):
            block = text[start : start + _BLOCK_CHARACTERS]
            try:
                decoded = pybase64.b64decode(block, validate=True)
            except ValueError:
                raise self._refusal() from None
            part = memoryview(decoded)[before:]
            before = 0
            # Padding within the text makes a block short.
            if len(part) > len(place) - end:
                raise self._refusal()
            place[end : end + len(part)] = part
            end += len(part)
        if end != len(place):
            raise self._refusal()

    def _refusal(self) -> MalformedRequest:
        return MalformedRequest(
            f"{self._name}: its text is not base64 (only A-Z a-z 0-9 + / and the right = padding "
            "at its end, no line breaks)"
        )


def encoded_later(part: bytes | memoryview) -> Iterator[EncodedLater]:
    """Split ``part`` into blocks whose base64 can be concatenated."""
    view = memoryview(part).cast("B")
    for start in range(0, len(view), _BLOCK_BYTES):
        yield EncodedLater(view[start : start + _BLOCK_BYTES])
