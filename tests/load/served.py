"""Starts a server for a load test, and measures its memory and CPU time."""

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
    "split_cores",
]

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "load"


class Served(NamedTuple):
    """A server's addresses and process id."""

    url: str
    grpc: str
    process: int


@contextmanager
def server(**settings: str) -> Iterator[Served]:
    """Run `convgrad serve` with these settings until the block ends."""
    environment = {**os.environ, "CONVGRAD_LOG_LEVEL": "warning", **settings}
    # Not the installed command, so that this tree's code runs.
    code = "from convgrad_service.server.command import serve; raise SystemExit(serve())"
    command = [sys.executable, "-c", code, "--port", "0", "--grpc-port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        # One line per port, once both listen.
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
    """Pin this process, and those started within the block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def split_cores(clients: int = 1) -> tuple[Set[int], Set[int]]:
    """Divide the cores between a server and its clients.

    The clients get ``clients`` cores, at most half of all. A single core is shared.
    """
    cores = sorted(os.sched_getaffinity(0))
    split = len(cores) - max(1, min(clients, len(cores) // 2))
    return set(cores[:split]) or {cores[-1]}, set(cores[split:])


def held_bytes(process: int) -> int:
    """Return the memory of a process and its descendants; shared pages count once."""
    return sum(_share_bytes(pid) for pid in _family(process))


def cpu_s(process: int) -> float:
    """Return the CPU time of a process and its running descendants."""
    spent = (_stat(pid)[_USER_TIME : _SYSTEM_TIME + 1] for pid in _family(process))
    return sum(int(ticks) for times in spent for ticks in times) / os.sysconf("SC_CLK_TCK")


def busy_s() -> float:
    """Return the CPU time of the whole machine since its start."""
    _, user, nice, system, _, _, interrupts, soft, *_ = Path("/proc/stat").read_text().split()[:9]
    return sum(map(int, (user, nice, system, interrupts, soft))) / os.sysconf("SC_CLK_TCK")


def _family(process: int) -> set[int]:
    # From /proc, not ps: a process with gRPC's threads cannot safely fork.
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    parents = {pid: int(stat[_PARENT]) for pid in running if (stat := _stat(pid))}
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


# Indices of fields in /proc/PID/stat after the program's name, see proc(5).
_PARENT, _USER_TIME, _SYSTEM_TIME = 1, 11, 12


def _stat(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat; none if the process has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name may contain parentheses


def _share_bytes(process: int) -> int:
    """Return the proportional set size: a page mapped by two processes counts half for each."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # the process has ended
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
