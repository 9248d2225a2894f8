"""In how many pieces a problem fits a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable

from convgrad.errors import DeviceOutOfMemory
from convgrad_service.problems.base import Problem

__all__ = ["parts_for"]

MOST_PARTS = 2**16


def parts_for(problem: Problem, room_bytes: int, needed: Callable[[Problem], int]) -> int:
    """The fewest parts, by powers of two, of which each needs at most ``room_bytes``.

    Raises:
        DeviceOutOfMemory: not even the smallest parts fit.
    """
    size, parts, pieces = needed(problem), 1, 1
    while size > room_bytes and parts <= MOST_PARTS:
        parts *= 2
        split = problem.split(parts)
        if len(split) == pieces:
            break  # cut as finely as it can be
        pieces = len(split)
        size = needed(max((piece.problem for piece in split), key=lambda part: part.memory_bytes))
    if size <= room_bytes:
        return parts
    raise DeviceOutOfMemory(
        f"{problem.operation} needs {size} bytes of GPU memory even in {pieces} pieces; "
        f"expected at most {room_bytes}"
    )
