"""Priorities of threads: those that compute must not keep the event loop waiting."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

__all__ = ["give_way", "switch_soon"]

# High enough that a thread that wakes briefly runs at once; low enough that computing keeps most of
# a core when other processes run too.
NICENESS = 5
# Of linux/prctl.h.
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1000


def give_way() -> None:
    """Lower the calling thread's priority, where the system has priorities for threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Added to the process's own niceness, which only the superuser may lower.
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(nicer, 19))


def switch_soon(seconds: float) -> None:
    """Let a thread that holds the interpreter keep others waiting for ``seconds`` only.

    For the whole process, if called before it starts threads: they inherit the slack of timers.
    """
    sys.setswitchinterval(seconds)
    if sys.platform == "linux":
        # Linux may wake a waiting thread 50 us late, which would double the wait.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
