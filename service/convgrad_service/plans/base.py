"""The part of a plan that is common to all devices."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan"]


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
