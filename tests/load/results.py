"""Stores load results in `tests/perf/results/load.jsonl`, one line per measurement."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.perf.provenance import cpu_model, origin

__all__ = ["RESULTS", "device", "stamped", "store"]

RESULTS = Path(__file__).resolve().parents[1] / "perf" / "results" / "load.jsonl"


def store(run: str, rows: Iterable[Mapping[str, Any]], packages: Sequence[str]) -> None:
    """Replace the stored rows of one kind of run.

    ``packages`` are packages whose versions to record, if they are installed.
    """
    stamp = stamped(packages)
    if not _changed_beside_results():
        stamp["git_sha"] = str(stamp["git_sha"]).removesuffix("-dirty")
    kept = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    kept = [line for line in kept if json.loads(line)["run"] != run]
    made = [json.dumps({"bench": "load", "run": run, **row, **stamp}) for row in rows]
    RESULTS.write_text("".join(line + "\n" for line in [*kept, *made]), encoding="utf-8")


def stamped(packages: Sequence[str]) -> dict[str, Any]:
    """Return the provenance of a row; ``packages`` as in `store`."""
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    return {
        **origin(device(), versions),
        "system": f"{platform.system()} {platform.release()}",
    }


def device() -> str:
    """Return the name of this machine in results."""
    return f"{cpu_model()}, {os.cpu_count()} cores"


def _changed_beside_results() -> bool:
    """Return whether the working tree has uncommitted changes other than results."""
    listed = subprocess.run(
        ["git", "diff", "--name-only", "HEAD"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    folder = "tests/perf/results/"
    return any(not path.startswith(folder) for path in listed.stdout.splitlines())


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
