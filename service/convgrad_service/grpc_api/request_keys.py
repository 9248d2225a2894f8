"""Cache keys of small inference requests; see `Transport.head`.

A key is a message without its id and its tensors' elements. The position of the elements is known
once a similar message has been parsed, so messages are compared with earlier ones of equal length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from convgrad.contract import Operation
from convgrad_service.engine.pipeline import Pipeline
from convgrad_service.oip.request import InferRequest, Region, Span

__all__ = ["Notes", "RequestKeys", "SplitMessage"]

# Tags of a request's first fields, which are strings.
_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A
_MAX_SHORT = 0x7F
_MAX_KEY_BYTES = 4096
# Entries are looked up by message length, with a few variants for each length.
_MAX_LENGTHS, _MAX_EACH = 256, 4


class Extent(NamedTuple):
    """The bytes of one input in a message without its id."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Notes:
    """What is reused for similar requests: the request without its id, and the extents of its
    tensors in the message, or None if those may differ in the next message."""

    request: InferRequest
    extents: tuple[Extent, ...] | None = None


class SplitMessage:
    """A serialized request, split into its id (empty if it cannot be found) and the rest."""

    def __init__(self, message: bytes) -> None:
        self.text, self.id = message, b""
        at = 0
        for tag in (_NAME, _VERSION):
            at = _end_of(message, at, tag) or at
        end = _end_of(message, at, _ID)
        if end is not None and (found := message[at + 2 : end]).isascii():
            self.text, self.id = message[:at] + message[end:], found
        self.cut_bytes = len(message) - len(self.text)


def _end_of(message: bytes, at: int, tag: int) -> int | None:
    """Return the end of a short field with this tag; None if another one is at ``at``."""
    if message[at : at + 1] != bytes((tag,)) or at + 1 >= len(message):
        return None
    return at + 2 + message[at + 1] if message[at + 1] <= _MAX_SHORT else None


class RequestKeys:
    """The layouts of the latest requests."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, list[tuple[Operation, tuple[Extent, ...]]]] = OrderedDict()

    def find(
        self, split: SplitMessage, owner: str, pipeline: Pipeline
    ) -> tuple[Operation, Hashable] | None:
        """Return operation and key of a message, if the pipeline has cached that key."""
        for operation, extents in self._seen.get(len(split.text), ()):
            key = _key(split.text, extents, owner)
            if pipeline.knows(operation, key):
                return operation, key
        return None

    def learn(
        self, split: SplitMessage, request: InferRequest, owner: str
    ) -> tuple[Hashable, tuple[Extent, ...]] | None:
        """Return the key and extents of a parsed message, or None if it cannot be cached."""
        extents = tuple(
            Extent(
                tensor.name,
                start := tensor.source.start - split.cut_bytes,
                start + tensor.source.size_bytes,
            )
            for tensor in request.inputs
            if isinstance(tensor.source, Span)
        )
        key = _key(split.text, extents, owner)
        if (
            split.id != request.id.encode()
            or len(key[1]) > _MAX_KEY_BYTES
            or not all(isinstance(tensor.source, Span | Region) for tensor in request.inputs)
            or list(extents) != sorted(extents, key=lambda extent: extent.begin)
        ):
            return None
        seen = self._seen.setdefault(len(split.text), [])
        if (request.operation, extents) not in seen:
            seen.insert(0, (request.operation, extents))
            del seen[_MAX_EACH:]
        self._seen.move_to_end(len(split.text))
        if len(self._seen) > _MAX_LENGTHS:
            self._seen.popitem(last=False)
        return key, extents


def _key(text: bytes, extents: tuple[Extent, ...], owner: str) -> tuple[str, bytes, int, str]:
    """Return a request without its tensors' elements, and its length."""
    begins = [0, *(extent.end for extent in extents)]
    ends = [*(extent.begin for extent in extents), len(text)]
    rest = b"".join([text[begin:end] for begin, end in zip(begins, ends, strict=True)])
    return "ModelInfer", rest, len(text), owner
