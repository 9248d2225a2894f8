"""Processes that belong to this one: started afresh, never forked, and never left behind.

A fork would copy threads' locks and a GPU's context in whatever state they are in. A child ends
when its channel to the parent closes; should it be stuck where it cannot notice, the system ends
it with the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["Backoff", "Children", "DescriptorReserve", "main", "spawn"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# What starting a child takes for a moment: three pairs of sockets, and the pipes of Popen.
_RESERVED_DESCRIPTORS = 16

# The parent's path, so that the child finds the same code wherever it was imported from.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from convgrad_service.engine.workers.child_process import main; main()"
)
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def spawn(
    name: str, target: Callable[..., None], *arguments: Any, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start ``target(*arguments)`` in a process that keeps these descriptors, by their numbers.

    ``target`` is a function of a module. ``name`` is for the system's list of processes.
    """
    process = subprocess.Popen(  # noqa: S603 - this interpreter, our own code
        [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), name],
        stdin=subprocess.PIPE,
        pass_fds=descriptors,
    )
    assert process.stdin is not None  # noqa: S101
    with process.stdin as start:
        pickle.dump((os.getpid(), name, target, arguments), start)
    return process


class Backoff:
    """Pauses between attempts that fail: longer and longer, and never the last."""

    def __init__(self) -> None:
        self.failures = 0

    def failed(self) -> float:
        """Count a failure; how long to wait before the next attempt, in seconds."""
        self.failures += 1
        return float(min(_FIRST_PAUSE_S * 2 ** min(self.failures - 1, 10), _LONGEST_PAUSE_S))

    def succeeded(self) -> None:
        """Begin with short pauses again."""
        self.failures = 0


class Children:
    """What is known of the processes that a server keeps alive, for health and metrics.

    ``missing`` are front ends that do not serve; a worker that is missing the scheduler knows of.
    ``changed`` is called when they have changed. Counters are by the child's name.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.hung: Counter[str] = Counter()
        self.failed_starts: Counter[str] = Counter()
        self.changed: Callable[[], None] = lambda: None

    def lost(self, name: str) -> None:
        """A front end does not serve any more, or not yet again."""
        self.missing.add(name)
        self.changed()

    def serves(self, name: str) -> None:
        """A front end serves."""
        self.missing.discard(name)
        self.changed()


class DescriptorReserve:
    """File descriptors kept so that a child can be started when connections have taken the rest."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._fill()

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """While it lasts the descriptors are free; nothing may be awaited in it."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Keep none any more."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def _fill(self) -> None:
        # As many as there are: what a child has kept comes back when it ends.
        with contextlib.suppress(OSError):
            while len(self._held) < _RESERVED_DESCRIPTORS:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def main() -> None:
    """What a child runs: the function that its parent sent."""
    parent, name, target, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, name.encode()[:15])
    if os.getppid() != parent:
        return  # it ended before it could be watched
    # A terminal's Ctrl-C reaches every process; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    target(*arguments)
