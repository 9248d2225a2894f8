"""When kernels are loaded: while nothing else computes, since the driver lets others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LoadGate"]

LONGEST_WAIT_S = 0.02
"""How long a load waits for a moment at which nothing computes; then it does not wait any more."""


class LoadGate:
    """Keeps loading kernels apart from computing. Thread-safe.

    The driver loads a kernel in a third of a millisecond if the GPU is idle. If it is not, the
    driver first waits for what runs, and all other threads' calls for that. So a load waits until
    nothing computes, up to ``LONGEST_WAIT_S``; what begins to compute meanwhile does not wait for
    it, only for loads that have begun.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._computing = 0
        self._loading = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count as computing; wait first for loads that have begun."""
        with self._changed:
            while self._loading:
                self._changed.wait()
            self._computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._computing -= 1
                if not self._computing:
                    self._changed.notify_all()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wait until nothing computes, or long enough; let nothing begin to compute meanwhile."""
        until_s = time.monotonic() + LONGEST_WAIT_S
        with self._changed:
            while self._computing and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            self._loading += 1
        try:
            yield
        finally:
            with self._changed:
                self._loading -= 1
                self._changed.notify_all()
