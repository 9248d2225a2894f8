"""A soak test: realistic mixes in turn for a given time, measuring memory after each.

    python -m tests.load.soak --locust build/load-tools/bin/locust --duration 20m

No request may fail, and memory may not grow: the median of the last quarter is compared with that
of the second. During the first, caches fill.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tests.load.results import store
from tests.load.run import USERS, locust
from tests.load.served import held_bytes, server

MIXES = ("resnet50", "mobilenet", "small")
MAX_GROWTH_BYTES = 32 * 2**20
# Mean pause of a user between two requests, so that the machine is not saturated.
PAUSE_S = 0.2
_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def soak(program: Path, duration_s: float, turn_s: float) -> list[dict[str, Any]]:
    """Run the mixes in turn; return one row per turn."""
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    with server() as served:
        while (at_s := time.monotonic() - began_s) < duration_s:
            mix = MIXES[len(rows) % len(MIXES)]
            users = str(USERS[mix])
            length = ["-u", users, "-r", users, "-t", f"{turn_s:.0f}s", "--pause", str(PAUSE_S)]
            found = locust(program, served, "soak", "--mix", mix, *length)
            row = {
                "at_s": round(at_s),
                "mix": mix,
                "answered": sum(one["answered"] for one in found.values()),
                "refused": sum(one["refused"] for one in found.values()),
                "failed": sum(one["failed"] for one in found.values()),
                "p99_s": max(one["p99_s"] or 0.0 for one in found.values()),
                "held_bytes": held_bytes(served.process),
            }
            rows.append(row)
            print(
                f"{row['at_s']:6} s  {mix:10} {row['answered']:6} answered {row['failed']:3} "
                f"failed  p99 {row['p99_s']:.3f} s  {row['held_bytes'] / 2**20:7.1f} MiB",
                flush=True,
            )
    return rows


def verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Return what failed."""
    missed = [f"{row['failed']} failed at {row['at_s']} s" for row in rows if row["failed"]]
    if len(rows) < 8:
        missed.append(f"{len(rows)} turns are too few to see growth in; expected 8 or more")
        return missed
    quarter = len(rows) // 4
    early, late = (
        statistics.median(row["held_bytes"] for row in some)
        for some in (rows[quarter : 2 * quarter], rows[-quarter:])
    )
    if late - early > MAX_GROWTH_BYTES:
        missed.append(f"the server grew by {(late - early) / 2**20:.0f} MiB")
    return missed


def _duration_s(text: str) -> float:
    found = re.fullmatch(r"([0-9.]+)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a number and s, m or h, such as 20m; got {text}"
        )
    return float(found[1]) * _UNITS_S[found[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--locust", type=Path, required=True, help="Locust's executable")
    parser.add_argument("--duration", type=_duration_s, default=1200.0, help="such as 20m or 8h")
    parser.add_argument("--store", action="store_true", help="store the figures as results")
    options = parser.parse_args()
    turn_s = min(60.0, options.duration / 12)
    rows = soak(options.locust, options.duration, turn_s)
    if options.store:
        store("soak", rows, ["numpy", "uvicorn", "httptools", "uvloop"])
    missed = verdict(rows)
    for one in missed:
        print(f"missed: {one}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
