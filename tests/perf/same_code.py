"""Which rows older than their kernels' sources still hold: they were measured of the same code.

    python -m tests.perf.same_code [--results network_types.jsonl] [--store]

Plans and compiles each such row of networks.jsonl, or of the given file of bench_networks, in the
working tree and in a checkout of the commit that it was measured at, for an H200. Where every
launch has the same instructions, but for where arguments lie, and the same grid and shared memory,
the figures hold; with ``--store`` such rows get the hashes of today's sources. Needs PyTorch,
NVRTC, cuobjdump on the PATH and the repository's history, but no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "perf" / "results" / "networks.jsonl"
SUITE = ROOT / "tests" / "perf" / "suite" / "networks.json"
KEY = ("op", "layer", "batch", "dtype", "layout")
Code = list[list[Any]]


def instructions_hash(cubin: bytes) -> str:
    """Return a hash of a cubin's instructions, in which arguments have no offsets."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = ["cuobjdump", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*?;)", text)
    assert lines, text[:200]
    plain = re.sub(r"c\[0x0\]\[0x[0-9a-f]+\]", "c[0x0][]", "\n".join(lines))
    return hashlib.sha256(plain.encode()).hexdigest()


def describe(rows: Sequence[Mapping[str, Any]], *, compiled: bool) -> list[Code]:
    """Return each row's launches as the imported tree plans them: grid, block, memory, and if
    ``compiled`` the code."""
    from convgrad_service.backends.cuda.compile import Compiler
    from convgrad_service.backends.cuda.families import FAMILIES
    from convgrad_service.backends.cuda.nvrtc import find_nvrtc
    from convgrad_service.plans.cuda.device import H200
    from convgrad_service.plans.cuda.planner import plan_for
    from convgrad_service.plans.cuda.program import Launch

    # Of this tree, as older ones have it elsewhere.
    problem_of = runpy.run_path(str(ROOT / "tests/perf/layer_problems.py"))["problem_of"]
    layers = {layer["name"]: layer for layer in json.loads(SUITE.read_text(encoding="utf-8"))}
    with tempfile.TemporaryDirectory() as folder:
        compiler = Compiler(find_nvrtc(), H200.architecture, Path(folder))

        @cache
        def code_of(instance: Any) -> str:
            return instructions_hash(compiler.cubin(instance).code)

        def launches_of(row: Mapping[str, Any]) -> list[Launch]:
            layer = {**layers[row["layer"]], "N": row["batch"]}
            problem = problem_of(layer, row["dtype"], row["layout"], row["op"])
            if row["dtype"] == "float32":
                problem = replace(problem, precision=row.get("precision") or "high")
            steps = plan_for(problem, H200, FAMILIES).steps
            return [step for step in steps if isinstance(step, Launch)]

        def code(step: Launch) -> list[Any]:
            how = [step.instance.entry, step.grid, step.block, step.shared_bytes, step.cluster]
            return [*how, code_of(step.instance)] if compiled else how

        try:
            planned = [launches_of(row) for row in rows]
            if compiled:
                # Side by side, into the cache.
                compiler.compile_all({step.instance: None for row in planned for step in row})
            return [[code(step) for step in row] for row in planned]
        finally:
            compiler.close()


def described_in(tree: Path, rows: Sequence[Mapping[str, Any]], *, compiled: bool) -> list[Code]:
    """Return what `describe` returns with the modules of another tree."""
    paths = [tree, tree / "client", tree / "service", *os.environ.get("PYTHONPATH", "").split(":")]
    ran = subprocess.run(
        [sys.executable, __file__, "--describe", *(["--compiled"] if compiled else [])],
        input=json.dumps([{name: row.get(name) for name in (*KEY, "precision")} for row in rows]),
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"{tree}: {ran.stderr}")
    found: list[Code] = json.loads(ran.stdout.splitlines()[-1])
    return found


def holding(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return whether each row's launches are those of the commit that it was measured at."""
    found = [False] * len(rows)
    for sha in sorted({row["git_sha"] for row in rows}):
        same = [i for i, row in enumerate(rows) if row["git_sha"] == sha]
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            git = ["git", "-C", str(ROOT), "worktree"]
            subprocess.run([*git, "add", "-q", "--detach", str(tree), sha], check=True)
            try:
                # What is launched otherwise need not be compiled.
                for compiled in (False, True):
                    own = [rows[i] for i in same]
                    both = (described_in(one, own, compiled=compiled) for one in (tree, ROOT))
                    same = [i for i, a, b in zip(same, *both, strict=True) if a == b]
            finally:
                subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        for i in same:
            found[i] = True
    return found


def main() -> None:
    from convgrad_service.backends.cuda.sources import source_hash
    from tests.perf.stale import why_stale

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--store", action="store_true", help="store the sources that rows hold for")
    parser.add_argument("--describe", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.describe:
        print(json.dumps(describe(json.loads(sys.stdin.read()), compiled=asked.compiled)))
        return
    rows = [json.loads(line) for line in asked.results.read_text(encoding="utf-8").splitlines()]
    stale = [row for row in rows if row.get("sources") and why_stale(row)]
    for row, holds in zip(stale, holding(stale) if stale else [], strict=True):
        print("holds " if holds else "differs", *(row[name] for name in KEY), row["kernel"])
        if holds:
            row["sources"] = {name: source_hash(name) for name in row["sources"]}
    if asked.store:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        asked.results.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
