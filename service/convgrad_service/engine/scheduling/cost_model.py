"""How long a problem will take, learnt from those that ran: for Retry-After and the lanes."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["CostModel", "Sized"]

# One byte of memory traffic is counted as this many FLOPs: the balance of a machine that does
# 100 GFLOP/s and moves 10 GB/s. It only has to rank a pooling and a convolution sensibly.
_FLOPS_PER_BYTE = 10

# What is believed before anything ran: a modest CPU. Ten microseconds' worth of it, so that the
# first measurement of any weight replaces it.
_FIRST_GUESS_PER_S = 2e10

# Older measurements fade by this factor with every new one (about the last twenty count).
_FADE = 0.95


class Sized(Protocol):
    """What is known of a problem's size before it runs."""

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
        """The size of ``problem`` in units in which the pace is measured."""
        return float(min(problem.flops + _FLOPS_PER_BYTE * problem.compulsory_bytes, 10**300))

    def estimate_s(self, cost: float) -> float:
        """Seconds that work of this cost is expected to take."""
        return cost * self._seconds / self._cost

    def learn(self, cost: float, seconds: float) -> None:
        """Take in that work of this cost took so many seconds."""
        if cost <= 0 or seconds <= 0:
            return
        with self._lock:
            self._cost = self._cost * _FADE + cost
            self._seconds = self._seconds * _FADE + seconds
