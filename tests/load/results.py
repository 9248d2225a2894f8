"""Load results as data: `tests/perf/results/load.jsonl`, a line a measurement."""

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
    """Put the rows of one kind of run in the place of those of the last.

    ``packages`` are what they depend on beside the service; those found here are noted.
    """
    stamp = stamped(packages)
    if not _changed_beside_results():
        stamp["git_sha"] = str(stamp["git_sha"]).removesuffix("-dirty")
    kept = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    kept = [line for line in kept if json.loads(line)["run"] != run]
    made = [json.dumps({"bench": "load", "run": run, **row, **stamp}) for row in rows]
    RESULTS.write_text("".join(line + "\n" for line in [*kept, *made]), encoding="utf-8")


def stamped(packages: Sequence[str]) -> dict[str, Any]:
    """What every row says of where it comes from; ``packages`` as in `store`."""
    versions = {name: metadata.version(name) for name in packages if _installed(name)}
    return {
        **origin(device(), versions),
        "system": f"{platform.system()} {platform.release()}",
    }


def device() -> str:
    """The machine, as results name it."""
    return f"{cpu_model()}, {os.cpu_count()} cores"


def _changed_beside_results() -> bool:
    """Whether what was measured is not what was committed; figures stored before do not count."""
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
