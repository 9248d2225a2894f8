"""Writes the README's tables from the stored results and the settings (`make readme`).

Each table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A test asks that the README
is what this script would write, so a figure there always has a record behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from convgrad_service.settings import markdown_table

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = Path(__file__).parent / "results"

Record = Mapping[str, Any]


def records(bench: str) -> list[Record]:
    """The stored measurements of one benchmark; none where it has not run."""
    path = RESULTS / f"{bench}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def source(rows: list[Record], command: str) -> str:
    """One sentence: the command, the machine, the day and the versions behind a table."""
    first = rows[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return (
        f"`{command}` on {first['device']}, {first['utc'][:10]}, commit {first['git_sha'][:7]} "
        f"({versions}); medians."
    )


def wire_table() -> str:
    """Decoding and encoding, as the server runs it (its malloc settings) and untuned."""
    rows = [row for row in records("wire") if row["stage"] == "total"]
    if not rows:
        return ""
    lines = [
        "| 64 MiB of float32 tensors | malloc | ms | GB/s of tensors | peer | peer, ms |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        rate = "a view, no copy" if row["ours_ms"] < 1 else f"{row['gb_per_s']:.1f}"
        lines.append(
            f"| {row['direction']} | {_MALLOC[row['malloc']]} | {row['ours_ms']:.3g} | {rate} | "
            f"{row['peer']} | {row['peer_ms']:.3g} |"
        )
    return "\n".join([*lines, "", source(rows, "make bench-wire")])


_MALLOC = {"default": "as shipped by glibc", "served": "as the server sets it"}

TABLES: Mapping[str, Callable[[], str]] = {"wire": wire_table, "settings": markdown_table}


def rendered(text: str) -> str:
    """``text`` with every table made afresh."""
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        body = table().strip()
        text = between.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))
