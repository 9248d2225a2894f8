"""What this process may use of its host: memory and cores, as its control groups limit them.

A container's limits are those of its cgroup, or of one above it: version 2 (``memory.max``,
``cpu.max``), version 1 (``memory.limit_in_bytes``, ``cpu.cfs_quota_us``), or both, each for some
controllers.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["memory_bytes", "usable_cores"]

PROCESS = Path("/proc/self")


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
