"""Configurations of every depthwise family on many layers, compared with cuDNN.

    python -m tests.perf.sweep_depthwise --out ROWS.jsonl --seconds 200

The layers are random, or those of ``--rows``, in both layouts, bfloat16 and float32, forward and
both gradients. Of each family, the configuration of every instance that should be fastest is timed,
and of the best instance the next one too. A line for each layer goes to ``--out``. Ends with a
table: the peer's time over ours, and the regret, the chosen plan's time over that of the fastest
one. cuDNN's search takes longer than all configurations, so it is timed for some layers alone.
Timed as `sweep_dense` times. Needs a GPU, CuPy and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_direct_model as direct
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_weight_rows as rows
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import DepthwiseDirect
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_pairs import (
    PAIR_TILES,
    DepthwisePairs,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight import DepthwiseWeight
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_direct import (
    DepthwiseWeightDirect,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_mma import DepthwiseWeightMma
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_rows import (
    DepthwiseWeightRows,
)
from convgrad_service.backends.cuda.kernels.layout.channels_first import ConvThroughChannelsLast
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.plans.cuda.works import ConvWork
from tests.perf.bench_gpu import TOLERANCE, Bench, facts, outputs_of
from tests.perf.fit_dense import BUFFERS
from tests.perf.gpu_layers import cases_of
from tests.perf.layer_problems import problem_of
from tests.perf.random_layers import random_any_depthwise_layers
from tests.perf.sweep_dense import Clock

PROCESSES, CHUNK = 16, 4
LONG_S = 60e-6
# Of configurations by expected time, those that may be timed.
LIMIT = 3.0
OPERANDS = {**BUFFERS, "conv_fwd": ("fwd", "input", "weight", "output")}
TYPES = (("bfloat16", "NHWC"), ("bfloat16", "NCHW"), ("float32", "NHWC"), ("float32", "NCHW"))
LARGE_WEIGHTS: tuple[Family[ConvWork], ...] = (
    DepthwiseWeightDirect(always=True),
    DepthwiseWeight(always=True),
    DepthwiseWeightMma(),
)
MANY = 2**31
Named = tuple[str, Family[ConvWork]]


@dataclass(frozen=True)
class Job:
    """One operation of one layer."""

    layer: Mapping[str, Any]
    op: str
    dtype: str
    layout: str
    device: CudaDevice
    peer: bool


@dataclass(frozen=True)
class Planned:
    """A job's own plan, and that of each configuration by its name."""

    job: Job
    base: CudaPlan
    others: Mapping[str, CudaPlan]


def best_of_each(
    every: Iterable[Any], expected_s: Callable[[Any], float], instance_of: Callable[[Any], Any]
) -> list[Any]:
    """The configuration of each instance that should be fastest, and the next of the first one."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for one in sorted(every, key=expected_s):
        found[instance_of(one)].append(one)
    groups = list(found.values())
    least_s = expected_s(groups[0][0])
    return [*groups[0][:2], *(g[0] for g in groups[1:] if expected_s(g[0]) < LIMIT * least_s)]


def gathers(work: ConvWork, device: CudaDevice, in_planes: bool) -> Iterator[Named]:
    """What to time of forward passes and gradients of the input."""
    family = DepthwiseDirect(in_planes=in_planes, most_summed=MANY)
    if family.why_not(work, device) is None:
        for one in best_of_each(
            direct.layouts_of(work),
            lambda one: direct.expected_s(work, device, one),
            lambda one: replace(one, vectors=1),
        ):
            yield str(one), DepthwiseDirect(one, in_planes=in_planes, most_summed=MANY)
    for tile in () if in_planes else PAIR_TILES:
        yield str(tile), DepthwisePairs((tile,), anything=True)


def weights(work: ConvWork, device: CudaDevice, in_planes: bool) -> Iterator[Named]:
    """What to time of weight gradients."""
    if DepthwiseWeightRows(in_planes=in_planes).why_not(work, device) is None:
        for one in best_of_each(
            rows.layouts_of(work, device),
            lambda one: rows.expected_s(work, device, one),
            lambda one: (one.tile.rows, one.turned),
        ):
            yield str(one), DepthwiseWeightRows(one, in_planes=in_planes)
    if not in_planes:
        for family in LARGE_WEIGHTS:
            yield "", family


def planned(job: Job) -> Planned | None:
    """Plan in a separate process, without a GPU; return None if no plan is possible."""
    problem: Any = problem_of(job.layer, job.dtype, job.layout, job.op)
    work = conv_work(problem, *OPERANDS[job.op])
    kinds = weights if work.direction == "bwd_weight" else gathers
    found = list(kinds(work, job.device, job.layout == "NCHW"))
    if job.layout == "NCHW":
        last: tuple[Family[ConvWork], ...] = DepthwiseDirect(), DepthwisePairs(anything=True)
        if work.direction == "bwd_weight":
            last = DepthwiseWeightRows(), *LARGE_WEIGHTS
        found += [("", ConvThroughChannelsLast(family, COPIES)) for family in last]
    others = {}
    try:
        base = plan_for(problem, job.device, FAMILIES)
        for name, family in found:
            if family.why_not(work, job.device) is None:
                families = replace(
                    FAMILIES, fwd=(family,), bwd_data=(family,), bwd_weight=(family,)
                )
                others[f"{family.name} {name}"] = plan_for(problem, job.device, families)
    except UnsupportedProblem as refused:
        print(f"{job.layer['name']} {job.op}: {refused}")
        return None
    return Planned(job, base, others)


def measure(bench: Bench, clock: Clock, one: Planned, samples: int) -> dict[str, Any]:
    """One line of rows."""
    job = one.job
    layer, op = job.layer, job.op
    torch.backends.cudnn.benchmark = job.peer
    (case,) = cases_of(layer, job.dtype, job.layout, (op,))
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
        if not error <= 2 * TOLERANCE[job.dtype]:
            print(f"WRONG {layer['name']} {op} {plan.kernel} {name}: error {error}")
            return math.nan
        return clock.us(run, count)

    return {
        "layer": layer,
        "op": op,
        "dtype": job.dtype,
        "layout": job.layout,
        "reference_us": round(case.reference_s * 1e6, 2),
        "peer_us": clock.us(lambda: case.peer(case.tensors), samples + 2) if job.peer else None,
        "kernel": one.base.kernel,
        "us": us(one.base, samples + 2),
        "configurations": {name: us(plan, samples, name) for name, plan in one.others.items()},
    }


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """By operation, type and layout."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["op"], line["dtype"], line["layout"]].append(line)
    print(f"{'':40}{'layers':>7}{'geomean':>9}{'<0.95':>7}{'regret':>8}  least")
    for group, members in sorted(groups.items()):
        ratios = sorted(
            (one["peer_us"] / one["us"], one["layer"]["name"]) for one in members if one["peer_us"]
        )
        best = [min(one["us"], *one["configurations"].values()) for one in members]
        regret = statistics.mean(one["us"] / b for one, b in zip(members, best, strict=True)) - 1
        least = " ".join(f"{ratio:.2f} {name}" for ratio, name in ratios[:3])
        mean = statistics.geometric_mean([ratio for ratio, _ in ratios] or [1])
        slower = sum(ratio < 0.95 for ratio, _ in ratios)
        name = " ".join(map(str, group))
        print(f"{name:40}{len(members):7}{mean:8.2f}x{slower:7}{regret:8.1%}  {least}")


def jobs_of(given: argparse.Namespace, device: CudaDevice) -> list[Job]:
    """In random order, so that a run that is cut short has some of everything."""
    draw, wanted = random.Random(given.seed), list[tuple[Any, str, str, str]]()
    if given.rows:
        lines = map(json.loads, given.rows.read_text(encoding="utf-8").splitlines())
        wanted = [(row["layer"], row["op"], row["dtype"], row["layout"]) for row in lines]
    wanted += [
        (layer, op, *draw.choice(TYPES))
        for layer in random_any_depthwise_layers(given.seed, given.count)
        for op in OPERANDS
        for _ in range(2)
    ]
    draw.shuffle(wanted)
    return [Job(*one, device, draw.random() < given.peers) for one in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200, help="of measuring")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--count", type=int, default=150, help="random layers")
    parser.add_argument("--rows", type=Path, help="a file of layers with op, dtype and layout")
    parser.add_argument("--peers", type=float, default=0.25, help="the part timed with cuDNN too")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    given = parser.parse_args()
    bench, clock = Bench(given.samples), Clock()
    torch.backends.cudnn.allow_tf32 = False
    where, started_s = facts(given.git_sha), time.monotonic()
    with ProcessPoolExecutor(PROCESSES) as pool:
        jobs = jobs_of(given, bench.device)
        every = [one for one in pool.map(planned, jobs, chunksize=CHUNK) if one is not None]
    planned_s = time.monotonic()
    bench.compile([plan for one in every for plan in (one.base, *one.others.values())])
    compiled_s = time.monotonic()
    lines = []
    with given.out.open("w", encoding="utf-8") as out:
        for count, one in enumerate(every):
            if time.monotonic() - compiled_s > given.seconds:
                print(f"out of time: {count} of {len(every)} measured")
                break
            lines.append(measure(bench, clock, one, given.samples))
            out.write(json.dumps(lines[-1] | where) + "\n")
            out.flush()
    show(lines)
    print(
        f"{planned_s - started_s:.0f} s of planning, {compiled_s - planned_s:.0f} s of compiling, "
        f"{time.monotonic() - compiled_s:.0f} s of measuring"
    )


if __name__ == "__main__":
    main()
