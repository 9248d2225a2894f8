"""Compiles every GPU kernel that a plan can choose, without a GPU, and reads what each uses.

    python -m tests.perf.compile_kernels [--arch sm_90a ...] [--match gather] [--jobs 2]
        [--afresh] [--store]

Prints one line an instance and fails where one does not compile, or spills registers. What was
found is kept in build/, under a name that follows from everything that a kernel is compiled from:
a run that was interrupted goes on where it was, and only what has changed is compiled again.
With ``--store`` a line that sums it up goes to tests/perf/results/compiled.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from convgrad_service.backends.cuda.compile import Compiler, Resources
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.plans.cuda_device import ARCHITECTURES
from convgrad_service.plans.cuda_program import Instance
from tests.perf.provenance import origin

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "kernel-resources.jsonl"
RESULTS = ROOT / "tests" / "perf" / "results" / "compiled.jsonl"


class Line(NamedTuple):
    architecture: str
    instance: Instance
    resources: Resources | None
    error: str
    seconds: float

    def __str__(self) -> str:
        what = f"{self.architecture:7} {self.instance.name:44}"
        if self.resources is None:
            return f"{what} {self.error}"
        found = self.resources
        return (
            f"{what} {found.registers:4} registers {found.shared_bytes:6} B shared "
            f"{found.stack_bytes:4} B stack {found.spill_store_bytes:4} B spilled "
            f"{self.seconds:5.1f} s"
        )

    @property
    def good(self) -> bool:
        return self.resources is not None and not self.resources.spills


class Kept:
    """What earlier runs found, a line for each kernel, named as its cubin would be."""

    def __init__(self, path: Path, afresh: bool = False) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        if path.exists() and not afresh:
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except json.JSONDecodeError:
                    continue  # its run ended while it wrote
                self._found[line.pop("cubin")] = line

    def get(self, cubin: str) -> tuple[Resources, float] | None:
        line = self._found.get(cubin)
        if line is None:
            return None
        used = {name: value for name, value in line.items() if name != "seconds"}
        return Resources(**used), line["seconds"]

    def put(self, cubin: str, resources: Resources, seconds: float) -> None:
        line = {"cubin": cubin, **asdict(resources), "seconds": round(seconds, 1)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # In one write, after the end of a line that another run may not have ended.
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line))


def compiled(compiler: Compiler, instance: Instance, kept: Kept) -> Line:
    """What an instance uses: as an earlier run found, or compiled now."""
    cubin = compiler.file_name(instance)
    found = kept.get(cubin)
    if found is None:
        started = time.perf_counter()
        try:
            resources = compiler.compile(instance).resources
        except CompileError as error:
            return Line(compiler.architecture, instance, None, str(error), 0.0)
        assert resources is not None, "a kernel that was compiled without the cache"
        found = resources, time.perf_counter() - started
        kept.put(cubin, *found)
    return Line(compiler.architecture, instance, found[0], "", found[1])


def summary(lines: Iterable[Line]) -> dict[str, dict[str, Any]]:
    """For each architecture: how many, how many are good, which are not, what the largest use."""
    of: dict[str, list[Line]] = {}
    for line in lines:
        of.setdefault(line.architecture, []).append(line)
    return {architecture: _summed_up(its) for architecture, its in of.items()}


def _summed_up(lines: Sequence[Line]) -> dict[str, Any]:
    used = [line.resources for line in lines if line.resources]
    return {
        "instances": len(lines),
        "good": sum(line.good for line in lines),
        "refused": [line.instance.name for line in lines if line.resources is None],
        "spilling": [line.instance.name for line in lines if line.resources and not line.good],
        "most_registers": max((one.registers for one in used), default=0),
        "with_a_stack": sum(one.stack_bytes > 0 for one in used),
        "compile_s": round(sum(line.seconds for line in lines), 1),
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--match", default="", help="only instances whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--afresh", action="store_true", help="compile what was compiled before")
    parser.add_argument("--store", action="store_true", help="a line in tests/perf/results")
    asked = parser.parse_args(given)
    try:
        nvrtc = find_nvrtc()
    except CompileError as error:
        parser.exit(1, f"{error}\n")
    compilers = {name: Compiler(nvrtc, name, cache=None) for name in asked.arch}
    work = [
        (compilers[architecture], instance)
        for architecture in asked.arch
        for instance in FAMILIES.instances()
        if instance.is_for(architecture) and asked.match in instance.name
    ]
    version = ".".join(map(str, nvrtc.version))
    print(f"NVRTC {version}, {len(work)} instances", flush=True)
    kept = Kept(KEPT, asked.afresh)
    lines = []
    with ThreadPoolExecutor(asked.jobs) as pool:
        for line in pool.map(lambda item: compiled(item[0], item[1], kept), work):
            print(line, flush=True)
            lines.append(line)
    good = sum(line.good for line in lines)
    print(f"{good} of {len(lines)} compile without spilling")
    if asked.store:
        record = {
            "bench": "compile_kernels",
            **origin("none: compiled for", {"nvrtc": version}),
            "match": asked.match,
            "architectures": summary(lines),
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return int(good < len(lines))


if __name__ == "__main__":
    sys.exit(main())
