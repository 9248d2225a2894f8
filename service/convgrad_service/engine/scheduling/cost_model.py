"""An estimate of how long problems take, learned from those that ran.

It sets Retry-After, tells large problems from small ones, and detects hung workers.
"""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["CostModel", "Sized"]

# One byte of memory traffic counts as this many FLOPs: the balance of a machine with 100 GFLOP/s
# and 10 GB/s. It only has to rank pooling against convolution sensibly.
_FLOPS_PER_BYTE = 10

# The initial guess, a modest CPU. It weighs ten microseconds, so any measurement outweighs it.
_FIRST_GUESS_PER_S = 2e10

# Each measurement scales older ones by this factor, so about the last twenty count.
_DECAY = 0.95


class Sized(Protocol):
    """The size of a problem."""

    @property
    def flops(self) -> int: ...

    @property
    def compulsory_bytes(self) -> int: ...


class CostModel:
    """A running estimate of cost units per second. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cost = _FIRST_GUESS_PER_S * 1e-5
        self._seconds = 1e-5

    @staticmethod
    def cost(problem: Sized) -> float:
        """Return the cost of ``problem``, in FLOPs and their equivalent in memory traffic."""
        return float(min(problem.flops + _FLOPS_PER_BYTE * problem.compulsory_bytes, 10**300))

    def estimate_s(self, cost: float) -> float:
        """Return the seconds that work of this cost is expected to take."""
        return cost * self._seconds / self._cost

    def learn(self, cost: float, seconds: float) -> None:
        """Record that work of this cost took ``seconds``."""
        if cost <= 0 or seconds <= 0:
            return
        with self._lock:
            self._cost = self._cost * _DECAY + cost
            self._seconds = self._seconds * _DECAY + seconds
