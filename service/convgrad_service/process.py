"""A process: what it may use of its host, priorities of its threads, errors without tracebacks.

A container's limits are those of its cgroup, or of one above it: version 2 (``memory.max``,
``cpu.max``), version 1 (``memory.limit_in_bytes``, ``cpu.cfs_quota_us``), or both, each for some
controllers. Threads that compute must not delay the event loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

PROCESS = Path("/proc/self")
# High enough that briefly waking threads of normal priority run at once; low enough that computing
# keeps most of a core that other processes use too.
NICENESS = 5
# Of linux/prctl.h.
_PR_SET_TIMERSLACK, _SLACK_NS = 29, 1000
E = TypeVar("E", bound=BaseException)


def memory_bytes(process: Path = PROCESS) -> int | None:
    """Return the memory that this process's cgroup may use; None if the system does not say.

    It is the smallest limit of all enclosing cgroups and the host's memory.
    """
    limits = [_host_bytes()]
    for group in _groups(process, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += _numbers(group / name)[:1]
    return min((limit for limit in limits if limit is not None), default=None)


def usable_cores(process: Path = PROCESS) -> int:
    """Return the cores that this process may use, by its affinity and its cgroups' quotas."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _groups(process, "cpu"):
        granted = _numbers(group / "cpu.max")
        if not granted:
            granted = _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(granted) == 2 and granted[0] > 0 and granted[1] > 0:
            cores = min(cores, math.ceil(granted[0] / granted[1]))
    return max(cores, 1)


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _numbers(file: Path) -> list[int]:
    """Return the numbers in a file; none if it is missing or contains ``max``."""
    with contextlib.suppress(OSError, ValueError):
        return [int(word) for word in file.read_text(encoding="ascii").split()]
    return []


def _groups(process: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may limit it, innermost first."""
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = [_mount(line) for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        for kind, root, point, options in mounts:
            if controllers:
                if kind != "cgroup" or controller not in {*controllers.split(",")} & {*options}:
                    continue
            elif kind != "cgroup2":
                continue
            # Inside a container the mount's root may be the container's own group.
            own = Path(path)
            group = point / own.relative_to(root) if own.is_relative_to(root) else point
            yield from (each for each in (group, *group.parents) if each.is_relative_to(point))
            break


def _mount(line: str) -> tuple[str, str, Path, list[str]]:
    """Parse a line of mountinfo into type, root in the file system, mount point and options."""
    left, _, right = line.partition(" - ")
    fields, (kind, _, options) = left.split(), right.split(" ", 2)
    return kind, fields[3], Path(fields[4]), options.split(",")


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


def without_traceback(error: E) -> E:
    """Return the error without its traceback, cause and context.

    Their frames hold the request's arrays. A frame that keeps the error in a variable makes a cycle
    of both, and the garbage collector, which counts objects and not bytes, may not run for long.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
