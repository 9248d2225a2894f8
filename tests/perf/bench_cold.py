"""How long the kernels of a layer take to compile that nobody has asked for before.

    python -m tests.perf.bench_cold [--layers resnet_56_3x3_64 ...] [--ops conv_bwd_data ...]

Needs no GPU: plans are the H200's. For each layer of the suite and operation: the time from a plan
to all of its kernels, compiled side by side into an empty cache, beside that of its slowest kernel
alone, which it should exceed by half at most where there are as many free cores as kernels. A line
for each goes to tests/perf/results/cold.jsonl, in place of an older run's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from convgrad.contract import OPERATIONS
from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import find_nvrtc
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.problems import Problem
from convgrad_service.process import usable_cores
from convgrad_service.server.warm_up import read_warm_up
from tests.perf.provenance import cpu_model, origin

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "cold.jsonl"


def problems_of(layer: dict[str, Any], dtype: str, layout: str) -> list[Problem]:
    """What a warm-up file of this layer would have computed."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layers.json"
        path.write_text(json.dumps({"dtype": dtype, "layout": layout, "layers": [layer]}))
        return read_warm_up(path)


def measured(problem: Problem) -> dict[str, Any] | None:
    """Of one problem; None where its kernels need no compiling."""
    steps = plan_for(problem, H200, FAMILIES).steps
    instances = list(dict.fromkeys(one.instance for one in steps if isinstance(one, Launch)))
    with TemporaryDirectory() as folder:
        compiler = Compiler(find_nvrtc(), H200.architecture, Path(folder) / "cache")
        began_s = time.perf_counter()
        compiled = compiler.compile_ahead(instances)
        if compiled is None:
            return None  # an image's build has compiled them
        compiled.result()
        all_s = time.perf_counter() - began_s
        alone_s = []
        for instance in instances:
            began_s = time.perf_counter()
            compiler.compile(instance)
            alone_s.append(time.perf_counter() - began_s)
        compiler.close()
    return {
        "kernels": [one.name for one in instances],
        "all_s": round(all_s, 3),
        "slowest_s": round(max(alone_s), 3),
        "one_after_another_s": round(sum(alone_s), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--ops", nargs="*", default=[name for name in OPERATIONS if "_b" in name])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", default="NHWC")
    asked = parser.parse_args()
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # else NVRTC finds the kernels that it has compiled
    suite = json.loads((HERE / "suite" / "layers.json").read_text(encoding="utf-8"))
    where = origin(f"{cpu_model()}, {usable_cores()} cores", {"nvrtc": str(find_nvrtc().version)})
    rows = []
    for layer in suite:
        if layer["kind"] not in ("conv", "maxpool") or layer["ndim"] != 2:
            continue
        if asked.layers and layer["name"] not in asked.layers:
            continue
        for problem in problems_of(layer, asked.dtype, asked.layout):
            if problem.operation not in asked.ops or (found := measured(problem)) is None:
                continue
            row = {"bench": "cold", "layer": layer["name"], "op": problem.operation, **found}
            rows.append({**row, "dtype": asked.dtype, "layout": asked.layout, **where})
            ratio = found["all_s"] / found["slowest_s"]
            print(
                f"{layer['name']:28} {problem.operation:24} {len(found['kernels'])} kernels "
                f"{found['all_s']:6.2f} s, {ratio:4.2f}x the slowest",
                flush=True,
            )
    RESULTS.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
