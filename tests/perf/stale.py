"""Rows of GPU results whose kernels have changed since they were measured; see `make readme`.

    python -m tests.perf.stale [--drop]

A row is stale if its kernel's sources changed, or if another kernel is planned for its layer. Says
which they are; with ``--drop`` they leave their files. `bench_gpu` and `bench_networks` measure
them again with ``--stale``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.sources import KERNELS, source_hash
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.perf.layer_problems import problem_of

__all__ = ["BENCHES", "stale_rows", "standing_keys", "why_stale"]

RESULTS = Path(__file__).resolve().parent / "results"
SUITE = Path(__file__).resolve().parent / "suite"
SUITES = (SUITE / "networks.json", SUITE / "other_networks.json")
# Whose rows say from which sources they were measured.
BENCHES = ("gpu", "networks", "network_types", "other_networks", "poolings")


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
    if changed:
        return f"{', '.join(changed)} changed"
    if row.get("bench") != "networks":
        return None
    planned = _planned(row)
    return None if planned == row["kernel"] else f"{planned} is planned"


def _planned(row: Mapping[str, Any]) -> str:
    """The kernel that is planned for a row of networks."""
    layer = {**_layers()[row["layer"]], "N": row["batch"]}
    problem = problem_of(layer, row["dtype"], row["layout"], row["op"])
    if "precision" in row:
        problem = replace(problem, precision=row["precision"])
    return plan_for(problem, H200, FAMILIES).kernel


@cache
def _layers() -> dict[str, dict[str, Any]]:
    listed = (json.loads(suite.read_text(encoding="utf-8")) for suite in SUITES)
    return {layer["name"]: layer for layers in listed for layer in layers}


def stale_rows(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each row that no longer holds."""
    found = []
    for row in rows:
        if (reason := why_stale(row)) is not None:
            what = " ".join(
                str(row[name])
                for name in ("op", "layer", "batch", "dtype", "layout")
                if name in row
            )
            found.append(f"{what} at {row['git_sha']}: {reason}")
    return found


def standing_keys(
    path: Path, key_of: Callable[[Mapping[str, Any]], tuple[Any, ...]]
) -> set[tuple[Any, ...]]:
    """The keys of a file's rows that still hold."""
    if not path.exists():
        return set()
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {key_of(row) for row in rows if why_stale(row) is None}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drop", action="store_true", help="take them out of the files")
    asked = parser.parse_args(given)
    stale = 0
    for bench in BENCHES:
        path = RESULTS / f"{bench}.jsonl"
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        good = [line for line in lines if why_stale(json.loads(line)) is None]
        print(*stale_rows(map(json.loads, lines)), sep="\n")
        print(f"{len(lines) - len(good)} of {len(lines)} rows of {path.name} no longer hold")
        stale += len(lines) - len(good)
        if asked.drop:
            path.write_text("".join(good), encoding="utf-8")
    return int(stale > 0 and not asked.drop)


if __name__ == "__main__":
    sys.exit(main())
