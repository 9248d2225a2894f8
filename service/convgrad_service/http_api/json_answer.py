"""Encodes a JSON answer in chunks.

pybase64 encodes straight from the arrays' memory; the base64 never becomes a Python string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad.errors import ProblemTooLarge
from convgrad.wire.json_tensors import Form, encode_tensor
from convgrad.wire.shapes import dtype_of
from convgrad_service.http_api.base64_tensors import EncodedLater, encoded_later
from convgrad_service.long_json import blocks_of, dumps

__all__ = ["json_answer", "refuse_endless_values", "stored_tensor"]

# This form is for human readers: an element takes some twenty characters and a microsecond, against
# five characters in base64.
_MAX_VALUES = 2**20


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
