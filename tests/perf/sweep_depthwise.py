"""Configurations of every depthwise family on many layers, compared with cuDNN.

    python -m tests.perf.sweep_depthwise --out ROWS.jsonl --seconds 200

The layers are those of `suite/networks.json` at several batches, and random ones; the operations
are both gradients. Of families with a cost model, the configurations that should be fastest are
timed, and some others, drawn at random. A line for each layer goes to ``--out``. Ends with a table:
the peer's time over ours, and the regret, the chosen plan's time over that of the fastest one.
Timed as `sweep_dense` times. Needs a GPU, CuPy and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_direct_model as direct
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_weight_rows as rows
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import DepthwiseDirect
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_pairs import DepthwisePairs
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight import DepthwiseWeight
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_direct import (
    DepthwiseWeightDirect,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import DepthwiseWeightMma
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.plans.cuda.works import ConvWork
from tests.perf.bench_gpu import TOLERANCE, Bench, outputs_of
from tests.perf.fit_dense import BUFFERS
from tests.perf.gpu_layers import cases_of
from tests.perf.layer_problems import problem_of
from tests.perf.random_layers import random_depthwise_layers
from tests.perf.sweep_dense import Clock

SUITE = Path(__file__).resolve().parent / "suite" / "networks.json"
PROCESSES, CHUNK = 16, 4
LONG_S = 60e-6
LIMIT = 3.0
OTHERS: Mapping[str, tuple[Family[ConvWork], ...]] = {
    "conv_bwd_data": (DepthwisePairs(anything=True),),
    "grouped_conv_bwd_weight": (
        DepthwiseWeightDirect(always=True),
        DepthwiseWeight(always=True),
        DepthwiseWeightMma(),
    ),
}


@dataclass(frozen=True)
class Job:
    """One operation of one layer."""

    kind: str
    layer: Mapping[str, Any]
    op: str
    device: CudaDevice
    top: int
    more: int


@dataclass(frozen=True)
class Planned:
    """A job's own plan, and that of each configuration: family, name, expected seconds."""

    job: Job
    base: CudaPlan
    others: tuple[tuple[str, str, float | None, CudaPlan], ...]


def jobs_of(given: argparse.Namespace, device: CudaDevice) -> list[Job]:
    """In random order, so that a run that is cut short has some of everything."""
    layers = [("rnd", layer) for layer in random_depthwise_layers(given.seed, given.count)]
    if given.networks:
        for layer in json.loads(SUITE.read_text(encoding="utf-8")):
            if layer["class"] == "depthwise":
                layers += [("net", {**layer, "N": batch}) for batch in given.batches]
    jobs = [
        Job(kind, layer, op, device, given.top, given.more)
        for kind, layer in layers
        for op in given.ops
        if given.layers.search(layer["name"])
    ]
    random.Random(given.seed).shuffle(jobs)
    return jobs


def configurations(
    work: ConvWork, device: CudaDevice, job: Job
) -> Iterator[tuple[Family[ConvWork], str, float | None]]:
    """What to time."""
    for family in OTHERS[job.op]:
        if family.why_not(work, device) is None:
            yield family, "", None
    draw = random.Random(f"{job.layer['name']} {job.layer['N']} {job.op}")
    modelled: tuple[Any, Any] = (direct, DepthwiseDirect)
    if job.op != "conv_bwd_data":
        modelled = rows, rows.DepthwiseWeightRows
    module, made = modelled
    if made().why_not(work, device) is None:
        every = sorted(
            (module.expected_s(work, device, one), str(one), one)
            for one in module.layouts_of(work, device)
        )
        chosen = every[: job.top]
        # The random ones are of those that should not take much longer.
        rest = [one for one in every[job.top :] if one[0] <= LIMIT * every[0][0]]
        chosen += draw.sample(rest, min(job.more, len(rest)))
        for expected_s, name, one in chosen:
            family = made(one)
            if family.why_not(work, device) is None:
                yield family, name, expected_s


def planned(job: Job) -> Planned | None:
    """Plan in a separate process, without a GPU; return None if no plan is possible."""
    problem: Any = problem_of(job.layer, "bfloat16", "NHWC", job.op)
    work = conv_work(problem, *BUFFERS[job.op])
    others = []
    try:
        base = plan_for(problem, job.device, FAMILIES)
        for family, name, expected_s in configurations(work, job.device, job):
            families = replace(FAMILIES, bwd_data=(family,), bwd_weight=(family,))
            plan = plan_for(problem, job.device, families)
            others.append((family.name, name, expected_s, plan))
    except UnsupportedProblem as refused:
        print(f"{job.layer['name']} {job.op}: {refused}")
        return None
    return Planned(job, base, tuple(others))


def measure(bench: Bench, clock: Clock, one: Planned, samples: int) -> dict[str, Any]:
    """One line of rows."""
    layer, op = one.job.layer, one.job.op
    (case,) = cases_of(layer, "bfloat16", "NHWC", (op,))
    if case.reference_s > LONG_S:
        samples = max(4, samples // 2)
    peer = case.peer(case.tensors)
    peer = (peer[0] if isinstance(peer, list) else peer).float()
    results = outputs_of(case)
    result = next(iter(results.values()))

    def us(plan: CudaPlan, count: int, name: str = "") -> float:
        result.fill_(math.nan)
        run = bench.ours(plan, {**case.tensors, **results})
        run()
        error = float((result.float() - peer.reshape(result.shape)).norm() / peer.norm())
        # Both are rounded.
        if not error <= 2 * TOLERANCE["bfloat16"]:
            print(f"WRONG {layer['name']} {op} {plan.kernel} {name}: error {error}")
            return math.nan
        return clock.us(run, count)

    names = ("input_size", "output_size", "kernel_size", "stride", "padding")
    return {
        "kind": one.job.kind,
        "layer": layer["name"],
        "op": op,
        **{name: layer[name] for name in ("N", "C", "ndim", *names)},
        "reference_us": round(case.reference_s * 1e6, 2),
        "peer_us": clock.us(lambda: case.peer(case.tensors), samples + 2),
        "kernel": one.base.kernel,
        "us": us(one.base, samples + 2),
        "configurations": [
            [family, name, None if s is None else round(s * 1e6, 3), us(plan, samples, name)]
            for family, name, s, plan in one.others
        ],
    }


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """By operation and batch."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["op"], line["kind"], line["N"]].append(line)
    print(
        f"{'operation, kind, batch':40}{'layers':>7}{'geomean':>9}{'<0.95':>7}{'regret':>8}  least"
    )
    for group, members in sorted(groups.items()):
        ratios = sorted((one["peer_us"] / one["us"], one["layer"]) for one in members)
        best = [min([one["us"], *(each[3] for each in one["configurations"])]) for one in members]
        regret = statistics.mean(one["us"] / b for one, b in zip(members, best, strict=True)) - 1
        least = " ".join(f"{ratio:.2f} {name}" for ratio, name in ratios[:3])
        mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
        slower = sum(ratio < 0.95 for ratio, _ in ratios)
        name = " ".join(map(str, group))
        print(f"{name:40}{len(members):7}{mean:8.2f}x{slower:7}{regret:8.1%}  {least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200, help="of measuring")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--count", type=int, default=150, help="random layers")
    parser.add_argument("--networks", action="store_true", help="the suite's layers too")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--top", type=int, default=4, help="configurations by the cost model")
    parser.add_argument("--more", type=int, default=4, help="others")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--ops", nargs="+", choices=list(OTHERS), default=list(OTHERS))
    parser.add_argument("--layers", type=re.compile, default="", help="their names' pattern")
    given = parser.parse_args()
    bench, clock = Bench(given.samples), Clock()
    jobs = jobs_of(given, bench.device)
    started_s = time.monotonic()
    with ProcessPoolExecutor(PROCESSES) as pool:
        every = [one for one in pool.map(planned, jobs, chunksize=CHUNK) if one is not None]
    planned_s = time.monotonic()
    bench.compile([plan for one in every for plan in (one.base, *(each[3] for each in one.others))])
    compiled_s = time.monotonic()
    lines = []
    with given.out.open("w", encoding="utf-8") as out:
        for count, one in enumerate(every):
            if time.monotonic() - compiled_s > given.seconds:
                print(f"out of time: {count} of {len(every)} measured")
                break
            lines.append(measure(bench, clock, one, given.samples))
            out.write(json.dumps(lines[-1]) + "\n")
    show(lines)
    print(
        f"{planned_s - started_s:.0f} s of planning, {compiled_s - planned_s:.0f} s of compiling, "
        f"{time.monotonic() - compiled_s:.0f} s of measuring"
    )


if __name__ == "__main__":
    main()
