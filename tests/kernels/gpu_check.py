"""Run all tests that need a GPU, and store the outcome and the environment.

    python tests/kernels/gpu_check.py [--git-sha SHA] [--workers 8] [--slow] [pytest's options]

All kernels are compiled first, in parallel; with --lazy, each is compiled when a test needs it,
which is faster for a few tests. With --part 2/5, every fifth test runs, from the second on, so
that a run can be taken up again. A line is appended to tests/perf/results/gpu_checks.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.device import cuda_driver_major, describe, import_cupy
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import find_nvrtc
from convgrad_service.plans.cuda.program import Instance

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "perf" / "results" / "gpu_checks.jsonl"
# It may use nearly all of the GPU's memory. Its slow tests use up to 26 GB each, on the GPU and on
# the host.
ALONE, SLOW_WORKERS = "tests/kernels/test_cuda_backend.py", 4
NOTHING_COLLECTED = 5
PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "numpy", "ml_dtypes", "pytest", "hypothesis")


def compile_all(
    architecture: str, instances: Iterable[Instance] | None = None, *, debug: bool = False
) -> tuple[int, list[str]]:
    """Compile these or all kernels of an architecture into the cache.

    ``debug`` compiles as for tests, otherwise as for the service. Returns the number of kernels and
    the error messages.
    """
    compiler = Compiler(find_nvrtc(cuda_driver_major()), architecture, debug=debug)
    chosen = FAMILIES.instances() if instances is None else instances
    wanted = [one for one in chosen if one.is_for(architecture)]
    return len(wanted), [said[:300] for said in compiler.compile_all(wanted)]


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    found["nvrtc"] = ".".join(map(str, find_nvrtc(cuda_driver_major()).version))
    found["cuda"] = str(import_cupy().cuda.runtime.runtimeGetVersion())
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_sha() -> str:
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ran = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ran.stdout.strip()


def run_tests(command: list[str]) -> dict[str, Any]:
    """Run pytest; return its counts and the names of failed tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        started = time.perf_counter()
        # As many threads of each of many workers would keep the machine busy with themselves.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        full = [*command, f"--junitxml={report}"]
        code = subprocess.run(full, cwd=ROOT, check=False, env=environment).returncode
        # Selecting no test of this part is no error; main checks that any test ran.
        code = 0 if code == NOTHING_COLLECTED else code
        seconds = time.perf_counter() - started
        if not report.exists():
            return {"exit_code": code, "seconds": round(seconds, 1)}
        suite = next(ElementTree.parse(report).iter("testsuite"))  # noqa: S314 - pytest's own
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"exit_code": code, **counts, "seconds": round(seconds, 1), "failed": failed[:50]}


def together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Merge two outcomes: add counts, concatenate names, take the worse exit code."""
    worse = max(first["exit_code"], second["exit_code"])
    names = first.keys() | second.keys()
    added = {
        name: first[name] + second[name] if name in first and name in second else None
        for name in sorted(names)
    }
    return {**added, "exit_code": worse}


def side_by_side(workers: int) -> list[str]:
    """Return the options of pytest-xdist."""
    return ["-n", str(workers)] if workers > 1 else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--git-sha", default=git_sha())
    parser.add_argument("--workers", type=int, default=1, help="needs pytest-xdist beyond 1")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--slow", action="store_true", help="the slow tests, instead of the others")
    parser.add_argument("--lazy", action="store_true", help="compile what the tests need")
    asked, more = parser.parse_known_args()
    device = describe(0)
    started = time.perf_counter()
    kernels, refused = (0, []) if asked.lazy else compile_all(device.architecture, debug=True)
    print(
        f"{kernels} kernels compiled in {time.perf_counter() - started:.1f} s", *refused, sep="\n"
    )
    marks = "gpu and slow" if asked.slow else "gpu and not slow"
    command = [sys.executable, "-m", "pytest", "-m", marks, f"--seed={asked.seed}", "--fresh"]
    # Do not turn warnings of other packages' plugins into errors.
    command += ["-q", "-p", "no:cacheprovider", "-W", "default", *more]
    beside = min(asked.workers, SLOW_WORKERS) if asked.slow else 1
    outcome = together(
        run_tests([*command, *side_by_side(asked.workers), f"--ignore={ALONE}", "tests/kernels"]),
        run_tests([*command, *side_by_side(beside), ALONE]),
    )
    line = {
        "bench": "gpu_checks",
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_sha": asked.git_sha,
        "device": device.name,
        "driver": driver(),
        "versions": versions(),
        "kernels": kernels or "as needed",
        "not_compiled": refused[:50],
        "seed": asked.seed,
        "command": ["python", "tests/kernels/gpu_check.py", *sys.argv[1:]],
        **outcome,
    }
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    return int(outcome["exit_code"] or bool(refused) or not outcome["tests"])


if __name__ == "__main__":
    sys.exit(main())
