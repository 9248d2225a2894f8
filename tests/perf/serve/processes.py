"""What a server's processes have spent: CPU seconds and page faults, as Linux counts them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Spent", "per_request", "server_processes", "spent_by"]

HUB = "hub"
_PREFIX = "convgrad-"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Spent:
    """By one process since it began, or between two moments."""

    user_s: float = 0.0
    system_s: float = 0.0
    faults: int = 0

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.system_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.user_s + other.user_s, self.system_s + other.system_s, self.faults + other.faults
        )

    def __sub__(self, before: Spent) -> Spent:
        return Spent(
            self.user_s - before.user_s,
            self.system_s - before.system_s,
            self.faults - before.faults,
        )


def spent_by(process_id: int) -> Spent:
    """All threads of a process; nothing where it has ended."""
    _, fields = _stat(process_id)
    if not fields:
        return Spent()
    user, system = (int(fields[number]) / _TICKS_PER_S for number in (11, 12))
    return Spent(user, system, int(fields[7]))


def server_processes(hub: int) -> dict[str, int]:
    """The processes of a server by what they do, such as hub, http-0, http-1, worker-0.

    A server of a single HTTP front end has it in the hub.
    """
    found = {HUB: hub}
    counts: dict[str, int] = {}
    for process_id, name in sorted(_children(hub)):
        role = name.removeprefix(_PREFIX)
        found[f"{role}-{counts.setdefault(role, 0)}"] = process_id
        counts[role] += 1
    return found


def per_request(
    before: Mapping[str, Spent], after: Mapping[str, Spent], requests: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of CPU and page faults of each process for one request."""
    return {
        role: {
            "user_ms": round(spent.user_s / requests * 1e3, 3),
            "system_ms": round(spent.system_s / requests * 1e3, 3),
            "faults": round(spent.faults / requests, 1),
        }
        for role, spent in ((role, after[role] - before[role]) for role in after)
    }


def _children(parent: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*"):
        name, fields = _stat(int(entry.name))
        if fields and int(fields[1]) == parent and name.startswith(_PREFIX):
            yield int(entry.name), name


def _stat(process_id: int) -> tuple[str, list[str]]:
    """A process's name, and what follows it in its stat."""
    with contextlib.suppress(OSError):  # it has ended
        text = Path(f"/proc/{process_id}/stat").read_text()
        name, _, rest = text.partition("(")[2].rpartition(") ")
        return name, rest.split()
    return "", []
