"""Base64 of megabytes in a JSON body, decoded once, straight into its tensor's memory.

It is nearly all of a large body, and never becomes a Python string: it stays a view of the body.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.json_tensors import Base64Text, decode_tensor
from convgrad_service.engine.execution import Filler
from convgrad_service.engine.request import SMALL_BYTES, blank
from convgrad_service.long_json import LongValues

# Fits the cache, and is a multiple of four characters (three bytes).
_BLOCK_CHARACTERS = 2**20
LONG_BASE64 = LongValues(
    ("npy", "data"),
    '""',
    min_bytes=16 * 1024,
    wrap=lambda text: text,
    advice='send large tensors as "npy" or "data"',
)


def long_tensor(tensor: dict[str, Any], name: str) -> tuple[NDArray[Any], Filler | None]:
    """Return the array of a tensor with long base64 and, if that is still blank, its filler.

    Raises
    ------
    MalformedRequest
        The tensor cannot be read.
    """
    deferred: list[_DeferredBase64] = []

    def defer(text: Base64Text) -> bytes | _DeferredBase64:
        if not (isinstance(text, memoryview) and len(text) > SMALL_BYTES and len(text) % 4 == 0):
            return b64decode(text)
        deferred.append(_DeferredBase64(text, name))
        return deferred[-1]

    try:
        array = decode_tensor(tensor, name=name, b64decode=defer)
    except (MalformedRequest, ValueError):
        # Escapes in the text make the size wrong; then decode now.
        return decode_tensor(tensor, name=name, b64decode=b64decode), None
    used = [text for text in deferred if text.used]
    return array, used[0].fill if used else None


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


class _DeferredBase64(DeferredTensor):
    """Long base64, not decoded yet.

    The size of invalid base64 may be wrong; then it does not match the shape, or `fill` refuses it.
    """

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
            f"{self._name}: its text is not base64 (A-Z a-z 0-9 + / with = padding at its "
            "end, without line breaks)"
        )
