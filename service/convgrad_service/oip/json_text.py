"""Parses the JSON of an inference request without stalling other threads on long number lists.

A JSON parser makes an object of every number, and holds the interpreter's lock until it is done. So
long flat lists under the key ``data`` are cut out as views, the rest is parsed strictly, and the
lists are converted block by block once their dtype is known.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.json_values import array_from_values
from convgrad.wire.sentences import shown

__all__ = ["MAX_TEXT_BYTES", "NumberList", "parse_request_text"]

MAX_TEXT_BYTES = 2 * 2**20
"""Limit of the text beside long flat lists: objects, short lists and nested ones."""

_LONG_LIST_BYTES = 16 * 1024
# A block takes the parser a few milliseconds, in which no other thread runs.
_BLOCK_BYTES = 64 * 1024
_WINDOW_BYTES = 128 * 1024
_LIST_BEGINS = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*\[')


def parse_request_text(text: memoryview) -> dict[str, Any]:
    """Parse a request; long flat lists under ``data`` become a `NumberList`.

    Raises
    ------
    MalformedRequest
        The text is not a JSON object, or exceeds `MAX_TEXT_BYTES` without its long flat lists.
    """
    if len(text) <= _LONG_LIST_BYTES:
        return strict_json.loads_object(text, "the request")
    # Random, so that no client can forge a placeholder.
    token = secrets.token_hex(8)
    lists: dict[str, NumberList] = {}
    kept, at = bytearray(), 0
    while (
        begins := _LIST_BEGINS.search(text, at, min(len(text), at + MAX_TEXT_BYTES))
    ) is not None:
        start = begins.end()
        end = _list_end(text, start)
        if end - start < _LONG_LIST_BYTES:
            _keep(kept, text[at:start])
            at = start
            continue
        _keep(kept, text[at : start - 1])
        placeholder = f"{token}-{len(lists)}"
        lists[placeholder] = NumberList(text[start:end])
        kept += b'"' + placeholder.encode("ascii") + b'"'
        at = end + 1
    _keep(kept, text[at:])

    def restored(pairs: strict_json.Pairs) -> dict[str, Any]:
        return {
            key: lists.get(value, value) if key == "data" and isinstance(value, str) else value
            for key, value in pairs
        }

    return strict_json.loads_object(kept, "the request", pairs_hook=restored)


def _list_end(text: memoryview, start: int) -> int:
    """Return the end of the list that begins at ``start``, or ``start`` if it is not flat."""
    at = start
    while at < len(text):
        window = bytes(text[at : at + _WINDOW_BYTES])
        close = window.find(b"]")
        opened = window.find(b"[", 0, close if close >= 0 else len(window))
        if opened >= 0:
            return start
        if close >= 0:
            return at + close
        at += len(window)
    return start


def _keep(kept: bytearray, part: memoryview) -> None:
    if len(kept) + len(part) > MAX_TEXT_BYTES:
        raise MalformedRequest(
            f"the request has more than {MAX_TEXT_BYTES:,} bytes of JSON beside flat lists of "
            "numbers; send tensors as binary data, or data as one flat list"
        )
    kept += part


class NumberList:
    """A long flat list of JSON numbers, not parsed yet; ``text`` is what its brackets enclose."""

    def __init__(self, text: memoryview) -> None:
        self._text = text

    def check(self, shape: tuple[int, ...], *, name: str) -> None:
        """Raise MalformedRequest if the text is too short for a tensor of ``shape``."""
        # A number and its comma take at least two characters.
        if math.prod(shape) > len(self._text) // 2 + 1:
            raise self._refused(shape, name, "fewer")

    def fill(self, target: NDArray[Any], dtype: DType, *, name: str) -> None:
        """Parse the numbers into ``target``, a contiguous array of ``dtype``.

        Raises
        ------
        MalformedRequest
            The list has another length, or an element that is no number of ``dtype``.
        """
        flat = target.reshape(-1)
        filled = 0
        for block in self._blocks():
            numbers = strict_json.loads(b"[" + block + b"]", f"{name}: data")
            if filled + len(numbers) > flat.size:
                raise self._refused(target.shape, name, "more")
            flat[filled : filled + len(numbers)] = array_from_values(numbers, dtype, name=name)
            filled += len(numbers)
        if filled < flat.size:
            raise self._refused(target.shape, name, "fewer")

    def _blocks(self) -> Iterator[bytes]:
        at = 0
        while at < len(self._text):
            block = bytes(self._text[at : at + _BLOCK_BYTES])
            more = at + len(block) < len(self._text)
            if more:
                comma = block.rfind(b",")
                if comma < 0:
                    raise MalformedRequest("data is not JSON: an element of its list does not end")
                block = block[:comma]
            if not block.strip() or (more and at + len(block) + 1 == len(self._text)):
                raise MalformedRequest("data is not JSON: its list has an empty element")
            yield block
            at += len(block) + more

    def _refused(self, shape: tuple[int, ...], name: str, how: str) -> MalformedRequest:
        return MalformedRequest(
            f"{name}: data holds {how} numbers than the {shown(math.prod(shape))} of its shape "
            f"{shown(shape)}"
        )
