"""Every GPU kernel under compute-sanitizer, over small problems; the outcome is stored as data.

    python tests/kernels/gpu_sanitize.py [--tools memcheck racecheck initcheck] [--draws 1500]
        [--sources depthwise pool_]

Named cases run on the general kernels and on those that plans choose; then, so that every fast
kernel is met, as many random ones as it takes (see covering.py) of so many draws for each class
of layer and dtype. With ``--sources`` it is the random ones alone, of kernels whose sources' names
start so. The tools run side by side. A line for each goes to tests/perf/results/gpu_checks.jsonl.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from convgrad_service.backends.cuda import CudaBackend
from convgrad_service.backends.cuda.device import describe, import_cupy
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.weight_tile import WeightTile
from convgrad_service.backends.cuda.memory import Lane
from convgrad_service.plans.cuda_program import Instance
from tests.arrays import DTYPES, draw, integers, rng_for
from tests.cases import EPILOGUES, FROM_CONV, FROM_CONV3D, FUSED, Case, conv_cases, pool_cases
from tests.geometries import Conv
from tests.kernels.covering import Covered, covering_quickly, instances_of
from tests.kernels.cuda_backends import general
from tests.kernels.gpu_check import RESULTS, compile_all, driver, git_sha, versions
from tests.kernels.harness import answers, with_layouts

TOOLS = ("memcheck", "racecheck", "initcheck")
# Few and small: a tool makes every access many times slower.
NAMES = ("plain", "stride_beyond_kernel", "depthwise", "groups_4", "3d_plain")
EVEN = Conv(1, 64, 64, (9, 10), (3, 3), padding=1)
PADDED = Conv(1, 67, 35, (6, 5), (3, 3), 2, 1)
CASES: list[Case] = [
    *(case for op in FROM_CONV for case in conv_cases(op) if case.name in NAMES),
    *(make(name, conv) for name, conv in (("even", EVEN), ("padded", PADDED))
      for make in FROM_CONV.values()),
    *(next(iter(conv_cases(op))) for op in FROM_CONV3D),
    *(case for n in (2, 3) for way in ("fwd", "bwd")
      for case in list(pool_cases(f"maxpool{n}d_{way}"))[:3]),
    *FUSED[:2],
    *EPILOGUES[:2],
]  # fmt: skip


def run_all(covering: list[Covered], named: bool, shard: int, shards: int) -> None:
    """This shard's part of the cases, each with every family of kernels; nothing here looks at the
    answers."""
    sets = [general(GatherTile(), WeightTile()), general(GatherDirect(), WeightDirect()), FAMILIES]
    # A pool would hand out memory that an earlier problem has written, which initcheck trusts.
    import_cupy().cuda.set_allocator(None)
    # One copy for all outputs takes the gaps between them along, which nobody ever writes.
    whole = Lane.download

    def one_by_one(lane: Lane, tensors: Iterable[tuple[int, Any]], base: int) -> None:
        for tensor in tensors:
            whole(lane, [tensor], base)

    Lane.download = one_by_one  # type: ignore[method-assign,assignment]
    backends = [CudaBackend(families=families) for families in sets]
    for case in CASES[shard::shards] if named else ():
        layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
        tensors = draw(case, rng_for(0, case.id), DTYPES["bfloat16"], integers)
        for backend in backends:
            answers(backend, case, tensors, layouts[-1])
    for one in covering[shard::shards]:
        tensors = draw(one.case, rng_for(0, one.case.id), DTYPES[one.dtype], integers)
        answers(backends[-1], one.case, tensors, one.layout)
    print("ran all cases", flush=True)


def sanitized(
    tool: str, timeout_s: float, covering: Path, named: bool, shards: int
) -> dict[str, Any]:
    """What one tool found, in processes side by side."""
    with ThreadPoolExecutor(shards) as pool:
        found = list(
            pool.map(
                lambda shard: _shard(tool, timeout_s, covering, named, shard, shards),
                range(shards),
            )
        )
    errors = [one["errors"] for one in found]
    return {
        "tool": tool,
        "exit_code": max(one["exit_code"] for one in found),
        "errors": None if None in errors else sum(errors),
        "finished": all(one["finished"] for one in found),
        "seconds": max(one["seconds"] for one in found),
        "output": "".join(one["output"] for one in found),
    }


def _shard(
    tool: str, timeout_s: float, covering: Path, named: bool, shard: int, shards: int
) -> dict[str, Any]:
    command = ["compute-sanitizer", f"--tool={tool}", "--print-limit=20", "--error-exitcode=9"]
    started = time.perf_counter()
    try:
        ran = subprocess.run(
            [
                *command,
                sys.executable,
                __file__,
                "--inner",
                str(covering),
                "--shard",
                str(shard),
                "--shards",
                str(shards),
                *([] if named else ["--random"]),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {
            "exit_code": 124,
            "errors": None,
            "finished": False,
            "seconds": timeout_s,
            "output": "",
        }
    found = re.findall(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+)", ran.stdout)
    return {
        "exit_code": ran.returncode,
        "errors": sum(int(a or b) for a, b in found) if found else None,
        "finished": "ran " in ran.stdout,
        "seconds": round(time.perf_counter() - started, 1),
        "output": "" if ran.returncode == 0 else (ran.stdout[:6000] + ran.stderr[-1000:]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--git-sha", default=git_sha())
    parser.add_argument("--tools", nargs="*", default=TOOLS)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each tool")
    parser.add_argument("--draws", type=int, default=1500, help="for each class and dtype")
    parser.add_argument("--shards", type=int, default=4, help="processes for each tool")
    parser.add_argument("--sources", nargs="*", default=[], help="what their names start with")
    parser.add_argument("--random", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shard", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--inner", type=Path, help="run the cases and this file's, under no tool")
    asked = parser.parse_args()
    if asked.inner:
        covering = pickle.loads(asked.inner.read_bytes())  # noqa: S301 - written below
        run_all(covering, not asked.random, asked.shard, asked.shards)
        return 0
    device = describe(0)
    covering = covering_quickly(device, FAMILIES, asked.draws)
    needed = None
    if asked.sources:
        wanted = tuple(asked.sources)
        covering = [
            one for one in covering if any(new.source.startswith(wanted) for new in one.new)
        ]
        needed = {
            instance
            for one in covering
            for instance in instances_of(one.case, one.dtype, one.layout, device, FAMILIES)
        }
    # Beside the tools, which would each compile all of them one after another.
    compile_all(device.architecture, needed)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(asked.tools)) as pool:
        cases = Path(folder) / "covering.pickle"
        cases.write_bytes(pickle.dumps(covering))
        outcomes = list(
            pool.map(
                lambda tool: sanitized(tool, asked.timeout, cases, not asked.sources, asked.shards),
                asked.tools,
            )
        )
    met = frozenset[Instance]().union(*(one.new for one in covering))
    instances = {one for one in FAMILIES.instances() if device.architecture in one.architectures}
    for outcome in outcomes:
        output = outcome.pop("output")
        if output:
            print(f"--- {outcome['tool']}\n{output}")
        line = {
            "bench": "gpu_sanitize",
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "git_sha": asked.git_sha,
            "device": device.name,
            "driver": driver(),
            "versions": versions(),
            "cases": len(covering) + (0 if asked.sources else len(CASES)),
            "instances_covered": len(met & instances),
            "instances": len(instances),
            "command": ["python", "tests/kernels/gpu_sanitize.py", *sys.argv[1:]],
            **outcome,
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line))
    return int(any(outcome["exit_code"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
