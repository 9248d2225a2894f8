"""How many parts a problem must be split into to fit a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable

from convgrad.errors import DeviceOutOfMemory
from convgrad_service.problems.base import Problem

__all__ = ["parts_that_fit"]

MAX_PARTS = 2**16


def parts_that_fit(problem: Problem, room_bytes: int, needed: Callable[[Problem], int]) -> int:
    """Return the smallest power of two of parts that each need at most ``room_bytes``.

    Parameters
    ----------
    needed : callable
        Returns the bytes that a problem needs on the device.

    Raises
    ------
    DeviceOutOfMemory
        Not even the smallest parts fit.
    """
    size, parts, pieces = needed(problem), 1, 1
    while size > room_bytes and parts <= MAX_PARTS:
        parts *= 2
        split = problem.split(parts)
        if len(split) == pieces:
            break  # the problem cannot be split any further
        pieces = len(split)
        size = needed(max((piece.problem for piece in split), key=lambda part: part.memory_bytes))
    if size <= room_bytes:
        return parts
    raise DeviceOutOfMemory(
        f"{problem.operation} needs {size} bytes of GPU memory even in {pieces} pieces; "
        f"expected at most {room_bytes}"
    )
