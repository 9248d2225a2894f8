"""Thread priorities: threads that compute must not delay the event loop."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

__all__ = ["lower_priority", "set_switch_interval"]

# High enough that briefly waking threads of normal priority run at once; low enough that computing
# keeps most of a core beside other processes.
NICENESS = 5
# Of linux/prctl.h.
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1000


def lower_priority() -> None:
    """Lower the calling thread's priority, where the system has priorities for threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Added to the process's own niceness, which only the superuser may lower.
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(nicer, 19))


def set_switch_interval(seconds: float) -> None:
    """Set how long a thread may hold the interpreter lock while others wait for it.

    Call it before the process starts threads, which inherit the timer slack set here.
    """
    sys.setswitchinterval(seconds)
    if sys.platform == "linux":
        # Linux may wake a waiting thread 50 us late, which would double the wait.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_SLACK_NS), 0, 0, 0)
