"""Parses the JSON of an inference request; long lists of numbers are parsed later, in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.json_values import array_from_values
from convgrad.wire.sentences import shown
from convgrad_service.long_json import LongValues

__all__ = ["NumberList", "parse_request_text"]

# A block takes the parser a few milliseconds, in which no other thread runs.
_BLOCK_BYTES = 64 * 1024


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


_NUMBERS = LongValues(
    ("data",),
    "[]",
    min_bytes=16 * 1024,
    wrap=NumberList,
    advice="send tensors as binary data, or data as one flat list",
)


def parse_request_text(text: memoryview) -> dict[str, Any]:
    """Parse a request; long flat lists under ``data`` become a `NumberList`.

    Raises
    ------
    MalformedRequest
        The text is not a JSON object, or too long without these lists.
    """
    return _NUMBERS.parse_object(text, "the request")
