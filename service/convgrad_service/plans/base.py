"""The part of a plan that is common to all devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "ceil_div", "round_up"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernel that runs a problem, and why preferred kernels do not.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    workspace_bytes : int
        Memory beyond inputs and outputs, over all threads.
    pieces : int
        Number of pieces that the problem is split into.
    passed_over : tuple of (str, str)
        Rejected kernels, each with the reason, in the order of preference.
    """

    kernel: str
    workspace_bytes: int
    pieces: int = 1
    passed_over: tuple[tuple[str, str], ...] = ()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not less than ``value``."""
    return -(-value // unit) * unit
