"""A server of its own for a load to meet, and what it takes of the machine's memory and cores."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "OUT",
    "ROOT",
    "Served",
    "busy_s",
    "cpu_s",
    "held_bytes",
    "on_cores",
    "server",
    "shared_out",
]

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "load"


class Served(NamedTuple):
    """Where a server listens, and its process."""

    url: str
    grpc: str
    process: int


@contextmanager
def server(**settings: str) -> Iterator[Served]:
    """`convgrad serve` with these settings beside the defaults, until the block ends."""
    environment = {**os.environ, "CONVGRAD_LOG_LEVEL": "warning", **settings}
    # Not the installed command, so that it is this tree's code wherever Python's is from.
    code = "from convgrad_service.server.command import serve; raise SystemExit(serve())"
    command = [sys.executable, "-c", code, "--port", "0", "--grpc-port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        # One line each, once both listen.
        urls = [process.stdout.readline().strip().rpartition(" ")[2] for _ in range(2)]
        if not all(urls):
            raise SystemExit("the server did not start")
        yield Served(urls[0], urls[1].partition("://")[2], process.pid)
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdout.close()


@contextmanager
def on_cores(cores: Set[int]) -> Iterator[None]:
    """What is started within the block, and what that starts, runs on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def shared_out(clients: int = 1) -> tuple[Set[int], Set[int]]:
    """The machine's cores for a server, and as many others for its clients, half of all at most;
    where there is but one, it for both."""
    cores = sorted(os.sched_getaffinity(0))
    split = len(cores) - max(1, min(clients, len(cores) // 2))
    return set(cores[:split]) or {cores[-1]}, set(cores[split:])


def held_bytes(process: int) -> int:
    """The memory of a process and all that it started; what they share counts once."""
    return sum(_share_bytes(pid) for pid in _family(process))


def cpu_s(process: int) -> float:
    """Seconds of a core that a process has used, with all that it started and that still run."""
    spent = (_stat(pid)[_USER_TIME : _SYSTEM_TIME + 1] for pid in _family(process))
    return sum(int(ticks) for times in spent for ticks in times) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """Seconds of a core that everything on the machine has used since it started."""
    _, user, nice, system, _, _, interrupts, soft, *_ = Path("/proc/stat").read_text().split()[:9]
    return sum(map(int, (user, nice, system, interrupts, soft))) / os.sysconf("SC_CLK_TCK")


def _family(process: int) -> set[int]:
    # From /proc and not by ps: in a process with gRPC's threads none can safely be started.
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    parents = {pid: int(stat[_PARENT]) for pid in running if (stat := _stat(pid))}
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


# Of the fields of /proc/<pid>/stat after the program's name, see proc(5).
_PARENT, _USER_TIME, _SYSTEM_TIME = 1, 11, 12


def _stat(process: int) -> list[str]:
    """Those fields; none of a process that has ended meanwhile."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name may hold anything, brackets too


def _share_bytes(process: int) -> int:
    """Linux' proportional set size: a page that two processes map is half of each."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended meanwhile
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
