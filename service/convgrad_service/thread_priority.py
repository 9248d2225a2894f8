"""Computing gives way: a thread that computes for seconds must not keep the event loop waiting."""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["give_way"]

# Enough that a thread which wakes for a moment runs at once, and little enough that computing keeps
# most of a core beside other processes.
NICENESS = 5


def give_way() -> None:
    """Lower the calling thread's priority, where the system has priorities for threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Beside what the process was started with: only the superuser may take niceness away.
        nicer = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(nicer, 19))
