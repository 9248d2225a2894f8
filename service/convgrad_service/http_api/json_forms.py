"""JSON bodies: the fields of a request, and the tensors of an answer.

Base64 strings are nearly all of a large body. Long ones are views of the body that are decoded
once, straight into their tensors' memory. pybase64 encodes straight from the arrays' memory; the
base64 never becomes a Python string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Operation, Report, refuse_unknown
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad.wire.json_tensors import FORMS, Base64Text, Form, decode_tensor, encode_tensor
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import dtype_of
from convgrad_service.http_api.base64_tensors import (
    DeferredBase64,
    EncodedLater,
    b64decode,
    encoded_later,
)
from convgrad_service.long_json import LongValues, blocks_of, dumps

__all__ = [
    "describe_json_request",
    "described_tensor",
    "json_answer",
    "parse_json_body",
    "refuse_endless_values",
    "stored_tensor",
]

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


def describe_json_request(
    body: bytes | bytearray | memoryview, operation: Operation
) -> tuple[dict[str, Any], dict[str, Callable[[NDArray[Any]], None]]]:
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
    fillers: dict[str, Callable[[NDArray[Any]], None]] = {}
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


def described_tensor(
    tensor: Any, name: str
) -> tuple[NDArray[Any], Callable[[NDArray[Any]], None] | None]:
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
