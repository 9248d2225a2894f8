"""The keys under which small requests for inference are remembered, see `Transport.head`.

A key is all of a message but its id and its tensors' elements. Where those lie is known once a
message like it has been parsed, so messages are compared with earlier ones of the same length.
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

# The first fields of a request: texts, each with its length before it.
_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A
_MAX_SHORT = 0x7F
_MAX_KEY_BYTES = 4096
# What is known is found by the length of the message, so many kinds for each.
_MAX_LENGTHS, _MAX_EACH = 256, 4


class Extent(NamedTuple):
    """The bytes of a message, without its id, that are one input's."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Notes:
    """What is needed again for each request like it: the request without its id, and where its
    tensors' elements lie in the message; None where they may lie elsewhere in the next."""

    request: InferRequest
    extents: tuple[Extent, ...] | None = None


class SplitMessage:
    """A serialized request without its id, and the id; together where that is not plain to see."""

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
    """Where a short field with this tag ends; None where another is, or the message is cut off."""
    if message[at : at + 1] != bytes((tag,)) or at + 1 >= len(message):
        return None
    return at + 2 + message[at + 1] if message[at + 1] <= _MAX_SHORT else None


class RequestKeys:
    """The kinds of requests seen last."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, list[tuple[Operation, tuple[Extent, ...]]]] = OrderedDict()

    def find(
        self, split: SplitMessage, owner: str, pipeline: Pipeline
    ) -> tuple[Operation, Hashable] | None:
        """The operation and the key of a message, if what follows from it is remembered."""
        for operation, extents in self._seen.get(len(split.text), ()):
            key = _key(split.text, extents, owner)
            if pipeline.knows(operation, key):
                return operation, key
        return None

    def learn(
        self, split: SplitMessage, request: InferRequest, owner: str
    ) -> tuple[Hashable, tuple[Extent, ...]] | None:
        """The key of a message that has been parsed; None where none can be told."""
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
    """All of a request but its tensors' elements, and its length."""
    begins = [0, *(extent.end for extent in extents)]
    ends = [*(extent.begin for extent in extents), len(text)]
    rest = b"".join([text[begin:end] for begin, end in zip(begins, ends, strict=True)])
    return "ModelInfer", rest, len(text), owner
