"""Processes that belong to this one: started afresh, never forked, and never left behind.

A fork would copy threads' locks and a GPU's context in whatever state they are in. A child ends
when its channel to the parent closes; should it be stuck where it cannot notice, the system ends
it with the parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main", "spawn"]

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
