"""Every tile of Hopper's dense kernels on the suite's dense layers, and how far the plan's is off.

    python -m tests.perf.sweep_hopper --ops conv_bwd_data --dtypes bfloat16 --layouts NHWC

A line a layer: the time that was expected, what the plan's choice takes, what the fastest takes and
which it is; then the geometric mean of the plan's over the fastest. Every candidate's time goes to
``--out`` as a line of JSON, if that is given. Needs a Hopper GPU, CuPy and PyTorch. Timed as
bench_gpu.py times.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    Schedule,
    candidates,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axis
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems import Problem
from tests.perf.bench_gpu import Bench, outputs_of
from tests.perf.gpu_layers import cases_of

LAYERS = Path(__file__).resolve().parent / "suite" / "layers.json"
OPS = ("conv_bwd_data", "conv_fwd")


class Noted:
    """HopperGather with one schedule, which keeps the work that it is given."""

    name = "hopper_gather"

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._family = HopperGather(True, schedule)
        self.work: ConvWork | None = None

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return self._family.why_not(work, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        self.work = work
        return self._family.launches(work, device)

    def instances(self) -> list[Instance]:
        return []


def planned(
    problem: Problem, device: CudaDevice, schedule: Schedule | None
) -> tuple[CudaPlan, ConvWork]:
    """The problem's plan with this schedule, or the family's own."""
    family = Noted(schedule)
    families = replace(FAMILIES, fwd=(family,), bwd_data=(family,))
    plan = plan_for(problem, device, families)
    assert family.work is not None
    return plan, family.work


def swept(
    bench: Bench, layer: Mapping[str, Any], dtype: str, layout: str, op: str
) -> Iterator[dict[str, Any]]:
    """A line for each schedule of one layer, the plan's own first."""
    (case,) = cases_of(layer, dtype, layout, (op,))
    own, work = planned(case.problem, bench.device, None)
    axes = [gather_axis(work, dim) for dim in range(3)]
    schedules = list(candidates(work, axes, bench.device))
    plans = [planned(case.problem, bench.device, schedule)[0] for schedule in schedules]
    bench.compile(plans)
    results = outputs_of(case)
    for schedule, plan in zip(schedules, plans, strict=True):
        seconds = bench.seconds(bench.ours(plan, {**case.tensors, **results}))
        yield {
            "layer": layer["name"],
            "op": op,
            "dtype": dtype,
            "layout": layout,
            "kernel": plan.kernel,
            "rounds": schedule.rounds,
            "chosen": plan.kernel == own.kernel,
            "ms": round(seconds * 1e3, 4),
            "expected_ms": round(expected_s(work, axes, bench.device, schedule) * 1e3, 4),
            "reference_ms": round(case.reference_s * 1e3, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=Path, default=LAYERS)
    parser.add_argument("--match", default="", help="only layers whose name holds this")
    parser.add_argument("--ops", nargs="*", default=OPS[:1], choices=OPS)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--layouts", nargs="*", default=["NHWC"])
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    bench = Bench(asked.samples)
    lines, ratios = [], []
    for layer in json.loads(asked.layers.read_text(encoding="utf-8")):
        if layer["class"] != "dense" or asked.match not in layer["name"]:
            continue
        for dtype in asked.dtypes:
            for layout in asked.layouts:
                for op in asked.ops:
                    found = list(swept(bench, layer, dtype, layout, op))
                    lines += found
                    own = min(line["ms"] for line in found if line["chosen"])
                    best = min(found, key=lambda line: float(line["ms"]))
                    expected = next(line["expected_ms"] for line in found if line["chosen"])
                    ratios.append(own / best["ms"])
                    print(
                        f"{layer['name']:26} {op:13} {dtype:8} {layout} "
                        f"floor {best['reference_ms']:.4f} expected {expected:.4f} "
                        f"own {own:.4f} best {best['ms']:.4f} {best['kernel']}",
                        flush=True,
                    )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"the plan's own over the best: {mean:.3f} (geometric mean of {len(ratios)})")
    if asked.out is not None:
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
