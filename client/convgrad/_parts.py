"""Reads an answer while the server still computes it, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad._display import fields_text
from convgrad._reply import Receiver
from convgrad.errors import InvalidAnswer, MalformedRequest
from convgrad.wire import safetensors

__all__ = ["PARTS_WIRE", "Part", "PartReader"]

PARTS_WIRE = "safetensors"
"""The wire format whose header is complete before the first element is computed."""


class Part(NamedTuple):
    """Rows ``start`` to ``stop`` of an output along ``axis``, its first dimension that is not 1.

    ``array`` holds these rows. It is a view of ``whole``, the complete output, which later parts
    continue to fill.
    """

    output: str
    axis: int
    start: int
    stop: int
    array: NDArray[Any]
    whole: NDArray[Any]

    def __repr__(self) -> str:
        return fields_text("Part", self._asdict().items())


@dataclass(slots=True)
class _Arriving:
    """An output being received; its data begins ``begin`` bytes into the answer."""

    name: str
    whole: NDArray[Any]
    begin: int
    axis: int = field(init=False)
    rows: int = field(init=False)
    read: int = 0

    def __post_init__(self) -> None:
        shape = self.whole.shape
        self.axis = next((axis for axis, extent in enumerate(shape) if extent != 1), 0)
        self.rows = shape[self.axis]

    def next(self, arrived_bytes: int) -> Part | None:
        """Return the rows that arrived since the last call, if any."""
        row_bytes = self.whole.nbytes // self.rows
        start, stop = self.read, min(max(arrived_bytes - self.begin, 0) // row_bytes, self.rows)
        if stop <= start:
            return None
        self.read = stop
        found = self.whole[(*(slice(None),) * self.axis, slice(start, stop))]
        return Part(self.name, self.axis, start, stop, found, self.whole)


class PartReader:
    """Extracts the parts of an answer from its `Receiver`."""

    def __init__(self) -> None:
        self._arriving: list[_Arriving] | None = None

    def read(self, receiver: Receiver) -> Iterator[Part]:
        """Yield the parts that arrived since the last call; an error answer has none.

        Raises
            InvalidAnswer
        """
        memory, arrived_bytes = receiver.memory, receiver.arrived_bytes
        if memory is None or not receiver.is_of(safetensors.MEDIA_TYPE):
            return
        if self._arriving is None:
            try:
                self._arriving = _described(memory, arrived_bytes)
            except MalformedRequest as refused:
                raise InvalidAnswer(f"the answer cannot be read: {refused}") from refused
        for output in self._arriving or ():
            part = output.next(arrived_bytes)
            if part is not None:
                yield part


def _described(memory: NDArray[np.uint8], arrived_bytes: int) -> list[_Arriving] | None:
    """Return the outputs that the answer's header announces, or None until it has arrived."""
    arrived = memory[:arrived_bytes].data
    if len(arrived) < 8 or len(arrived) < (data_at := safetensors.header_bytes(arrived)):
        return None
    layout = safetensors.layout(arrived[:data_at], memory.size - data_at)
    found = []
    for name, placed in layout.tensors.items():
        begin, end = data_at + placed.begin, data_at + placed.end
        tensor = memory[begin:end].view(placed.dtype.numpy).reshape(placed.shape)
        found.append(_Arriving(name, tensor, begin))
    return found
