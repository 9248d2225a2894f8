"""JSON with values of megabytes, parsed and written without stalling other threads.

Python's parser copies every string at least twice and makes an object of every number, and both it
and the encoder hold the interpreter's lock until they are done. So long values are cut out of a
text as views, the rest of it, at most `MAX_TEXT_BYTES`, is parsed strictly, and long lists are
written in blocks.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.strict_json import dumps

MAX_TEXT_BYTES = 2 * 2**20
"""Limit of a text without its long values. The parser makes up to 60 bytes of objects from three
of text: this bounds a hostile text to some 50 MB and 0.2 s. It is enough for a hundred thousand
numbers, more than anybody writes by hand."""

NUMBERS_AT_ONCE = 4096
"""How many numbers take the encoder a few milliseconds."""
# Windows in which a delimiter is searched. They double, so that a short value costs a short copy,
# but still fit the cache.
_FIRST_WINDOW_BYTES, _LAST_WINDOW_BYTES = 256, 128 * 1024


class LongValues:
    """The values that are cut out of a text: strings, or flat lists, under certain keys.

    Parameters
    ----------
    keys
        The keys of objects whose values are cut out.
    delimiters
        What encloses a value: two quotes, or two brackets.
    min_bytes
        Shorter values, and texts, are parsed as they are.
    wrap
        Called with the bytes between the delimiters; returns the value.
    advice
        How to send what is too long, for the error message.
    """

    def __init__(
        self,
        keys: Sequence[str],
        delimiters: str,
        min_bytes: int,
        wrap: Callable[[memoryview], Any],
        advice: str,
    ) -> None:
        self.min_bytes = min_bytes
        self._keys, self._wrap, self._advice = frozenset(keys), wrap, advice
        self._opening, self._closing = (mark.encode() for mark in delimiters)
        # An escaped quote before it would be part of another key.
        begins = rf'(?<!\\)"(?:{"|".join(keys)})"[ \t\r\n]*:[ \t\r\n]*{re.escape(delimiters[0])}'
        self._begins = re.compile(begins.encode())

    def parse_object(self, text: memoryview, what: str) -> dict[str, Any]:
        """Parse ``text``, which error messages call ``what``.

        Raises
        ------
        MalformedRequest
            The text is not a JSON object, or exceeds `MAX_TEXT_BYTES` without its long values.
        """
        if len(text) <= self.min_bytes:
            return strict_json.loads_object(text, what)
        # Random, so that no client can forge a placeholder.
        token = secrets.token_hex(8)
        values: dict[str, memoryview] = {}
        kept, at = bytearray(), 0
        # Where the values were, in the kept and the whole text.
        kept_ends, ends = [0], [0]

        def keep(end: int) -> None:
            if len(kept) + end - at > MAX_TEXT_BYTES:
                raise MalformedRequest(
                    f"{what} has more than {MAX_TEXT_BYTES:,} bytes of JSON besides long values of "
                    f"{' and '.join(sorted(self._keys))}; {self._advice}"
                )
            kept.extend(text[at:end])

        while begins := self._begins.search(text, at, min(len(text), at + MAX_TEXT_BYTES)):
            start = begins.end()
            end = self._end(text, start)
            if end - start < self.min_bytes:
                keep(start)
                at = start
                continue
            keep(start - 1)
            placeholder = f"{token}-{len(values)}"
            values[placeholder] = text[start:end]
            kept.extend(b'"%s"' % placeholder.encode())
            at = end + 1
            kept_ends.append(len(kept))
            ends.append(at)
        keep(len(text))

        def restored(pairs: strict_json.Pairs) -> dict[str, Any]:
            return {
                key: self._wrap(values[value])
                if key in self._keys and isinstance(value, str) and value in values
                else value
                for key, value in pairs
            }

        def position(index: int) -> int:
            cut = bisect_right(kept_ends, index) - 1
            return ends[cut] + index - kept_ends[cut]

        return strict_json.loads_object(kept, what, pairs_hook=restored, position=position)

    def _end(self, text: memoryview, start: int) -> int:
        """Return the end of the value that begins at ``start``, or ``start`` if it is not plain."""
        at, size = start, _FIRST_WINDOW_BYTES
        while at < len(text):
            window = bytes(text[at : at + size])
            end = window.find(self._closing)
            before = end if end >= 0 else len(window)
            if self._opening != self._closing and window.find(self._opening, 0, before) >= 0:
                return start  # a list of lists
            if end >= 0:
                # An escaped quote, or a backslash that is escaped itself.
                return start if text[at + end - 1] == ord("\\") else at + end
            at += len(window)
            size = min(2 * size, _LAST_WINDOW_BYTES)
        return start


def blocks_of(value: Any) -> Iterator[bytes]:
    """Encode a value as `dumps` does, rectangular nested lists of numbers in several blocks."""
    count = _count(value)
    if count <= NUMBERS_AT_ONCE:
        yield dumps(value)
        return
    step = NUMBERS_AT_ONCE * len(value) // count
    separator = b"["
    for start in range(0, len(value), max(1, step)):
        yield separator
        if step:
            yield dumps(value[start : start + step])[1:-1]
        else:
            yield from blocks_of(value[start])
        separator = b","
    yield b"]"


def _count(value: Any) -> int:
    """Count the numbers in rectangular nested lists."""
    return len(value) * _count(value[0]) if isinstance(value, list) and value else 1
