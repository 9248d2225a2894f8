"""A server of its own for a load to meet, and what it holds of the machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["OUT", "ROOT", "Served", "held_bytes", "server"]

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
    code = "import sys; from convgrad_service.command import serve; sys.exit(serve(sys.argv[1:]))"
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


def held_bytes(process: int) -> int:
    """The memory of a process and all that it started; what they share counts once."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = dict(tuple(map(int, line.split())) for line in listed.splitlines())
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(_share_bytes(pid) for pid in family)


def _share_bytes(process: int) -> int:
    """Linux' proportional set size: a page that two processes map is half of each."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended meanwhile
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
