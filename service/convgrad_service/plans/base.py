"""What every plan says, whatever the device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which kernel runs a problem, in how many pieces, and why the others do not.

    ``workspace_bytes`` is the memory beyond inputs and outputs, all threads together.
    ``passed_over`` holds a kernel's name and the reason, in the order of preference.
    """

    kernel: str
    workspace_bytes: int
    pieces: int = 1
    passed_over: tuple[tuple[str, str], ...] = ()
