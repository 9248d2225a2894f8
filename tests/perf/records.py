"""What benchmarks stored in `results/`, for the tables and plots that are made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Record", "commits", "records", "source", "source_line"]

RESULTS = Path(__file__).parent / "results"

Record = Mapping[str, Any]


def records(bench: str) -> list[Record]:
    """The stored measurements of one benchmark; none where it has not run."""
    path = RESULTS / f"{bench}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def source(rows: list[Record], command: str, commits: str) -> str:
    """The command, the machine, the day, the commits and the versions behind a table."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return f"`{command}` on {first['device']}, {first['utc'][:10]}, at {commits} ({versions})"


def source_line(rows: list[Record], command: str) -> str:
    """The line below a table of medians: where its rows come from, and every commit of theirs."""
    return f"{source(rows, command, ', '.join(commits(rows)))}; medians."


def commits(rows: list[Record]) -> list[str]:
    """Every commit at which one of the rows was measured, in the rows' order."""
    return list(dict.fromkeys(row["git_sha"][:7] for row in rows))
