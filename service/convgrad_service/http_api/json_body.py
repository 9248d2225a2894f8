"""Parses a JSON request body at the speed of its base64.

Base64 strings are nearly all of a large body, and a JSON parser would copy each at least twice. So
long strings are cut out as views (finding the closing quote is a memory search), the remaining few
hundred bytes are parsed strictly, and each view is decoded once, straight into its tensor's memory.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Operation, refuse_unknown
from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.json_tensors import FORMS, Base64Text, decode_tensor
from convgrad.wire.sentences import shown
from convgrad_service.http_api.base64_tensors import DeferredBase64, b64decode

__all__ = [
    "decode_json_request",
    "describe_json_request",
    "described_tensor",
    "parse_json_body",
]

# Below this the two steps cost more than they save.
_SMALL_BODY_BYTES = 64 * 1024
_LONG_STRING_BYTES = 1024
# Limit of the text that is parsed. The parser makes up to 60 bytes of objects from three of text
# and blocks all other threads: this bounds a hostile body to some 50 MB and 0.2 s. It is enough for
# a hundred thousand numbers, more than anybody writes by hand.
_MAX_TEXT_BYTES = 2 * 2**20
_MAX_QUOTES = 200_000

# Windows in which quotes are searched. They double, so that a short string costs a short copy, but
# still fit the cache.
_FIRST_WINDOW_BYTES = 64
_LAST_WINDOW_BYTES = 128 * 1024


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
        beside = fields.get("stored")
        fields["stored"] = {**(beside if isinstance(beside, dict) else {}), **stored}
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
            f'{field}: expected "stored" to be the name of a tensor and to stand alone, got '
            f"{shown(tensor)}"
        )
    return name


def decode_json_request(
    body: bytes | bytearray | memoryview, operation: Operation
) -> dict[str, Any]:
    """Decode a request with all tensors filled, in newly allocated memory."""
    fields, fillers = describe_json_request(body, operation)
    for name, fill in fillers.items():
        array = np.empty(fields[name].shape, fields[name].dtype)
        fill(array)
        array.flags.writeable = False
        fields[name] = array
    return fields


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
    """Parse a body; long strings become views of the bytes between their quotes.

    Long strings are allowed only under the keys ``npy`` and ``data``.
    """
    view = memoryview(body).cast("B")
    if len(view) <= _SMALL_BODY_BYTES:
        return strict_json.loads_object(view, "the body")
    cut = _cut_long_strings(view)
    remaining = dict(cut.strings)

    def restore(pairs: strict_json.Pairs) -> dict[str, Any]:
        return {
            key: remaining.pop(value, value)
            if key in ("npy", "data") and isinstance(value, str)
            else value
            for key, value in pairs
        }

    fields = strict_json.loads(cut.text, "the body", pairs_hook=restore, position=cut.position)
    for string in remaining.values():
        raise MalformedRequest(
            f"the body: a string of {len(string)} bytes stands where no tensor's base64 belongs"
        )
    if not isinstance(fields, dict):
        raise MalformedRequest(f"the body: expected a JSON object, got {shown(fields)}")
    return fields


@dataclass
class _Cut:
    """A body whose long strings are replaced by placeholder strings."""

    text: bytearray = field(default_factory=bytearray)
    strings: dict[str, memoryview] = field(default_factory=dict)
    text_positions: list[int] = field(default_factory=list)
    body_positions: list[int] = field(default_factory=list)
    # Random, so that no client can forge a placeholder.
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def keep(self, part: memoryview) -> None:
        if len(self.text) + len(part) > _MAX_TEXT_BYTES:
            raise MalformedRequest(
                f"the body holds more than {_MAX_TEXT_BYTES} bytes beside its base64 strings; "
                f'send large tensors as "npy" or "data"'
            )
        self.text += part

    def replace(self, string: memoryview, end: int) -> None:
        placeholder = f"{self.key}-{len(self.strings)}"
        self.strings[placeholder] = string
        self.text += placeholder.encode("ascii")
        self.text_positions.append(len(self.text))
        self.body_positions.append(end)

    def position(self, index: int) -> int:
        """Map an index of the text to the body, approximately within strings."""
        cuts = bisect_right(self.text_positions, index)
        if cuts == 0:
            return index
        return self.body_positions[cuts - 1] + index - self.text_positions[cuts - 1]


def _cut_long_strings(view: memoryview) -> _Cut:
    # Outside of a string a quote can only open one, so quotes alone delimit strings,
    # in valid JSON; of invalid JSON enough is kept for the parser to refuse it.
    cut = _Cut()
    quotes = _Quotes(view)
    kept = 0
    while (opening := quotes.find(quotes.position)) >= 0:
        if opening - kept > _MAX_TEXT_BYTES:
            break  # `keep` below refuses it
        closing = quotes.closing(opening + 1)
        if closing < 0:
            raise MalformedRequest(
                f"the body is not JSON: the string that begins at byte {opening} does not end"
            )
        if closing - opening > _LONG_STRING_BYTES:
            cut.keep(view[kept : opening + 1])
            cut.replace(view[opening + 1 : closing], closing)
            kept = closing
    cut.keep(view[kept:])
    return cut


class _Quotes:
    """Finds quotes in order, in time linear in the body and with a limit on their number."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._found = 0
        self.position = 0

    def find(self, start: int) -> int:
        """Return the next quote at or after ``start``, or -1; ``position`` moves past it."""
        window_bytes = _FIRST_WINDOW_BYTES
        while start < len(self._view):
            found = bytes(self._view[start : start + window_bytes]).find(b'"')
            if found >= 0:
                self._count()
                self.position = start + found + 1
                return start + found
            start += window_bytes
            window_bytes = min(2 * window_bytes, _LAST_WINDOW_BYTES)
        return -1

    def closing(self, start: int) -> int:
        """Return the quote that closes the string whose text begins at ``start``, or -1."""
        quote = self.find(start)
        while quote >= 0 and self._is_escaped(start, quote):
            if quote - start > _LONG_STRING_BYTES:
                raise MalformedRequest(
                    f"the body: the long string that begins at byte {start} holds an escaped "
                    f"quote, so it is not base64"
                )
            quote = self.find(quote + 1)
        return quote

    def _is_escaped(self, start: int, quote: int) -> bool:
        """Whether an odd number of backslashes precedes ``quote``."""
        backslashes, window_bytes, end = 0, 1, quote
        while end > start:
            window = bytes(self._view[max(start, end - window_bytes) : end])
            run = len(window) - len(window.rstrip(b"\\"))
            backslashes += run
            if run < len(window):
                break
            end -= run
            window_bytes = min(2 * window_bytes, _LAST_WINDOW_BYTES)
        return backslashes % 2 == 1

    def _count(self) -> None:
        self._found += 1
        if self._found > _MAX_QUOTES:
            raise MalformedRequest(
                f"the body holds more than {_MAX_QUOTES // 2} strings, which no request needs"
            )
