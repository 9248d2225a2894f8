"""Rows of gpu.jsonl whose kernels have changed since they were measured; see `make readme`.

    python -m tests.perf.stale [--drop]

Says which they are; with ``--drop`` they leave the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.sources import KERNELS, source_hash

__all__ = ["stale_rows", "why_stale"]

GPU = Path(__file__).resolve().parent / "results" / "gpu.jsonl"


def why_stale(row: Mapping[str, Any]) -> str | None:
    """What has changed since a row was measured; None where nothing has."""
    sources = row.get("sources")
    if sources is None:
        return "it does not say from which sources it was measured"
    changed = [
        name
        for name, hashed in sources.items()
        if not (KERNELS / name).exists() or source_hash(name) != hashed
    ]
    return f"{', '.join(changed)} changed" if changed else None


def stale_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row that no longer holds."""
    found = []
    for row in rows:
        if (reason := why_stale(row)) is not None:
            what = " ".join(row[name] for name in ("op", "layer", "dtype", "layout"))
            found.append(f"{what} at {row['git_sha']}: {reason}")
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drop", action="store_true", help="take them out of the file")
    asked = parser.parse_args(given)
    lines = GPU.read_text(encoding="utf-8").splitlines(keepends=True)
    good = [line for line in lines if why_stale(json.loads(line)) is None]
    print(*stale_rows(map(json.loads, lines)), sep="\n")
    print(f"{len(lines) - len(good)} of {len(lines)} rows of {GPU.name} no longer hold")
    if asked.drop:
        GPU.write_text("".join(good), encoding="utf-8")
        return 0
    return int(len(good) < len(lines))


if __name__ == "__main__":
    sys.exit(main())
