"""Splits an answer into several responses, each with the rows that became final since the last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from numpy.typing import NDArray

from convgrad_service.problems.base import TensorSpec

MAX_PART_BYTES = 256 * 2**20
"""Approximate limit of the rows of one output in one response."""


class Rows(NamedTuple):
    """A range of an output's rows: indices of its first axis whose extent is not 1.

    Outputs are never empty or zero-dimensional: such problems are refused.
    """

    axis: int
    start: int
    stop: int

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return a view of these rows."""
        index = (*(slice(None),) * self.axis, slice(self.start, self.stop))
        found: NDArray[Any] = array[index]
        return found


def row_bytes(spec: TensorSpec) -> int:
    """Return the size of one row, the least of an output that a response can hold."""
    return spec.size_bytes // spec.shape[_axis(spec.shape)]


class AnswerParts:
    """Tracks which rows of each output have been sent, and which may be sent next.

    ``final_bytes`` returns how many bytes of an output are final, and ``until`` waits for more; see
    `Progress`.
    """

    def __init__(
        self,
        outputs: Mapping[str, NDArray[Any]],
        final_bytes: Callable[[str], int],
        until: Callable[[str, int], Awaitable[int]],
    ) -> None:
        self._outputs = outputs
        self._final_bytes, self._until = final_bytes, until
        self._sent = dict.fromkeys(outputs, 0)

    @property
    def complete(self) -> bool:
        """Whether `next` has returned all rows."""
        return all(self._sent[name] == _rows(array) for name, array in self._outputs.items())

    async def next(self) -> Mapping[str, Rows]:
        """Wait for at least one more final row, unless complete; return all that are final."""
        for name, array in self._outputs.items():
            if self._sent[name] < _rows(array):
                await self._until(name, _row_bytes(array) * (self._sent[name] + 1))
                break
        found = {}
        for name, array in self._outputs.items():
            size, start = _row_bytes(array), self._sent[name]
            most = max(1, MAX_PART_BYTES // size)
            stop = min(start + most, self._final_bytes(name) // size, _rows(array))
            if stop > start:
                found[name] = Rows(_axis(array.shape), start, stop)
                self._sent[name] = stop
        return found


def _axis(shape: tuple[int, ...]) -> int:
    return next((axis for axis, extent in enumerate(shape) if extent != 1), 0)


def _rows(array: NDArray[Any]) -> int:
    rows: int = array.shape[_axis(array.shape)]
    return rows


def _row_bytes(array: NDArray[Any]) -> int:
    return array.nbytes // _rows(array)
