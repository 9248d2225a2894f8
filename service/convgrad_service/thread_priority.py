"""Lowers the priority of threads that compute, so that the event loop need not wait for them."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["give_way"]

# High enough that a thread that wakes briefly runs at once; low enough that computing keeps most of
# a core when other processes run too.
NICENESS = 5


def give_way() -> None:
    """Lower the calling thread's priority, where the system has priorities for threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Added to the process's own niceness, which only the superuser may lower.
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(nicer, 19))
