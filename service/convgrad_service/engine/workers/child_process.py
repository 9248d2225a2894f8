"""Child processes: started from scratch, not forked, and never orphaned.

A fork would copy locks and GPU contexts in whatever state they are. A child exits when its channel
to the parent closes; if it is stuck, the kernel kills it when the parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

START_S = 300
"""The longest start, for children that hang; compiling a GPU's first kernels takes seconds."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
# What starting a child needs temporarily: three socket pairs and Popen's pipes.
_RESERVED_DESCRIPTORS = 16

# Passes on sys.path, so that the child imports the same code.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from convgrad_service.engine.workers.child_process import main; main()"
)
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def spawn(
    name: str,
    target: Callable[..., None],
    *arguments: Any,
    descriptors: Sequence[int],
    sockets: Sequence[socket.SocketKind],
) -> tuple[subprocess.Popen[bytes], list[socket.socket]]:
    """Start a process that inherits ``descriptors`` and an end of a new pair of each socket.

    It runs ``target(*arguments, *ends)``, where ``ends`` are the descriptors of its sockets, and
    ``target`` is importable. ``name`` is the process name that ``ps`` shows. Returns the process
    and the other end of each pair. Raises OSError.
    """
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as afterwards:
        ours, theirs = [], []
        for kind in sockets:
            end, other = socket.socketpair(socket.AF_UNIX, kind)
            ours.append(on_error.enter_context(end))
            theirs.append(afterwards.enter_context(other).fileno())
        process = subprocess.Popen(  # noqa: S603 - this interpreter, our own code
            [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), name],
            stdin=subprocess.PIPE,
            pass_fds=[*descriptors, *theirs],
        )
        assert process.stdin is not None  # noqa: S101
        with process.stdin as start:
            pickle.dump((os.getpid(), name, target, (*arguments, *theirs)), start)
        on_error.pop_all()
    return process, ours


class Backoff:
    """Exponential backoff without an end."""

    def __init__(self) -> None:
        self.failures = 0

    def failed(self) -> float:
        """Count a failure; return the seconds to wait before the next attempt."""
        self.failures += 1
        return float(min(_FIRST_PAUSE_S * 2 ** min(self.failures - 1, 10), _LONGEST_PAUSE_S))

    def succeeded(self) -> None:
        """Start again with the shortest pause."""
        self.failures = 0


class Children:
    """The state of a server's child processes, for health checks and metrics.

    ``missing`` holds the front ends that are not serving; the scheduler tracks workers. ``changed``
    is called when it changes. The counters are by process name.
    """

    def __init__(self) -> None:
        self.missing: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.hung: Counter[str] = Counter()
        self.failed_starts: Counter[str] = Counter()
        self.changed: Callable[[], None] = lambda: None

    def lost(self, name: str) -> None:
        """Record that a front end is not serving."""
        self.missing.add(name)
        self.changed()

    def serves(self, name: str) -> None:
        """Record that a front end is serving."""
        self.missing.discard(name)
        self.changed()


class DescriptorReserve:
    """Descriptors held back so that children can start when connections use up the rest."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._fill()

    @contextlib.contextmanager
    def spent(self) -> Iterator[None]:
        """Free the descriptors for the block, in which nothing may be awaited."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Free the descriptors for good."""
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()

    def _fill(self) -> None:
        # As many as there are now; more become free as children exit.
        with contextlib.suppress(OSError):
            while len(self._held) < _RESERVED_DESCRIPTORS:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def main() -> None:
    """Run the function that the parent has sent; the child's entry point."""
    parent, name, target, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NAME, name.encode()[:15])
    if os.getppid() != parent:
        return  # it died before PR_SET_PDEATHSIG took effect
    # Terminals and service managers send them to every process; the parent handles them.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    target(*arguments)
