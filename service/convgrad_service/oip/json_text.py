"""The JSON text of an inference request, in which long lists of numbers are not parsed at once.

A JSON parser makes an object of every number and lets no other thread run before it is done. So
long flat lists under the key ``data`` are cut out as views, what is left is parsed strictly, and
the lists become arrays block by block once their element type is known.
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad_service.oip.number_list import NumberList

__all__ = ["MAX_TEXT_BYTES", "parse_request_text"]

MAX_TEXT_BYTES = 2 * 2**20
"""What the parser may see: the protocol's objects, short lists, and nested ones."""

_LONG_LIST_BYTES = 16 * 1024
_WINDOW_BYTES = 128 * 1024
_LIST_BEGINS = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*\[')


def parse_request_text(text: memoryview) -> dict[str, Any]:
    """The JSON object of a request; a long list under ``data`` is a `NumberList`.

    Raises
    ------
    MalformedRequest
        It is no JSON object, or longer than `MAX_TEXT_BYTES` without its long flat lists.
    """
    if len(text) <= _LONG_LIST_BYTES:
        return strict_json.loads_object(text, "the request")
    # A name that no sender can guess, so that no string is taken for a placeholder.
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
    """Where the flat list that begins at ``start`` ends, or ``start`` if it is not flat."""
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
