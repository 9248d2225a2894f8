"""Every cut of Hopper's weight gradients on the suite's dense layers, and how far plans are off.

    python -m tests.perf.sweep_hopper_weight --dtypes bfloat16 --most 20

A line a layer: what the plan's choice takes and was expected to, what the fastest cut takes and
which it is; then the geometric mean of the plan's over the fastest. Of each tile, way to share
boxes and kind of cluster that cut is timed which is expected to take least; ``--most`` of them a
layer. Every time goes to ``--out`` as a line of JSON, if that is given. Needs a Hopper GPU, CuPy
and PyTorch. Timed as bench_gpu.py times.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight, reachable
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_model import expected_s
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import Cut
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems import Problem
from tests.perf.bench_gpu import Bench, outputs_of
from tests.perf.gpu_layers import cases_of

LAYERS = Path(__file__).resolve().parent / "suite" / "layers.json"


class Noted:
    """HopperWeight with one cut, which keeps the work that it is given."""

    name = "hopper_weight"

    def __init__(self, cut: Cut | None = None) -> None:
        self._cut = cut
        self.work: ConvWork | None = None

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return HopperWeight(everywhere=True).why_not(work, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        self.work = work
        return HopperWeight().launches(work, device, self._cut)

    def instances(self) -> list[Instance]:
        return []


def planned(problem: Problem, device: CudaDevice, cut: Cut | None) -> tuple[CudaPlan, ConvWork]:
    """The problem's plan with this cut, or with the family's own."""
    noted = Noted(cut)
    plan = plan_for(problem, device, replace(FAMILIES, bwd_weight=(noted,)))
    assert noted.work is not None
    return plan, noted.work


def candidates(work: ConvWork, device: CudaDevice, most: int) -> list[Cut]:
    """One of each kind, those expected to take least; the plan's own is the first."""
    kinds: dict[tuple[Any, ...], Cut] = {}
    for cut in sorted(reachable(work, device), key=lambda one: expected_s(one, device)):
        kind = cut.tile, cut.shared_taps, cut.cluster, cut.rows_first, cut.summing, cut.together
        kinds.setdefault(kind, cut)
    return list(kinds.values())[:most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--layers", nargs="+", default=[])
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    bench = Bench(given.samples)
    ratios, lines = [], []
    for layer in json.loads(LAYERS.read_text(encoding="utf-8")):
        if layer["class"] != "dense" or (given.layers and layer["name"] not in given.layers):
            continue
        for dtype in given.dtypes:
            for case in cases_of(layer, dtype, "NHWC", ("grouped_conv_bwd_weight",)):
                _, work = planned(case.problem, bench.device, None)
                cuts = candidates(work, bench.device, given.most)
                plans = [planned(case.problem, bench.device, cut)[0] for cut in cuts]
                bench.compile(plans)
                tensors = {**case.tensors, **outputs_of(case)}
                times = [bench.seconds(bench.ours(plan, tensors)) for plan in plans]
                expected = [expected_s(cut, bench.device) for cut in cuts]
                best = min(range(len(cuts)), key=times.__getitem__)
                ratios.append(times[0] / times[best])
                print(
                    f"{layer['name']:24} {dtype:9} {cuts[0].name:24} {times[0] * 1e3:.4f} ms, "
                    f"expected {expected[0] * 1e3:.4f}; "
                    f"{cuts[best].name:24} {times[best] * 1e3:.4f}"
                )
                for cut, seconds, guess in zip(cuts, times, expected, strict=True):
                    lines.append(
                        {
                            "layer": layer["name"],
                            "dtype": dtype,
                            "cut": cut.name,
                            "ms": round(seconds * 1e3, 4),
                            "expected_ms": round(guess * 1e3, 4),
                        }
                    )
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"the plan's over the fastest: {mean:.3f} (geometric mean of {len(ratios)})")
    if given.out:
        given.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
