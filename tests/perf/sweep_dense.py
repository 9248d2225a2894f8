"""Configurations of every dense family on many layers, beside cuDNN, to fit their choice to.

    python -m tests.perf.sweep_dense --out ROWS.jsonl --seconds 200

The layers are those of `suite/networks.json` at several batches, and random ones (`random_layers`);
the operations are both gradients, in bfloat16, channels last. Of each family, the configurations
are timed that its cost model expects to be fastest, and some that it does not, drawn at random. A
line for each layer goes to ``--out``; `fit_dense` reads them. Timed as bench_gpu times, in shorter
samples. Needs a Hopper GPU, CuPy and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv import hopper_gather_plan as gather
from convgrad_service.backends.cuda.kernels.conv import hopper_weight_model as weight
from convgrad_service.backends.cuda.kernels.conv import implicit_gemm_model as implicit
from convgrad_service.backends.cuda.kernels.conv import pointwise_gemm_model as product
from convgrad_service.backends.cuda.kernels.conv.dense_weight import DenseWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight, reachable
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import (
    ImplicitGemm,
    gathering,
    gemm_of,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import (
    COUNTERS,
    SWAPPED,
    PointwiseGemm,
    products_of,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axis
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.plans.cuda.works import ConvWork
from tests.perf.bench_gpu import TOLERANCE, Bench, outputs_of
from tests.perf.fit_dense import BUFFERS
from tests.perf.gpu_layers import cases_of, problem_of
from tests.perf.random_layers import random_layers

SUITE = Path(__file__).resolve().parent / "suite" / "networks.json"
BATCHES, PROCESSES, CHUNK = (1, 8, 32, 128), 16, 4
SAMPLES, FEW_SAMPLES, LONG_S = 7, 4, 150e-6
FLUSH_BYTES = 128 * 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One operation of one layer; ``kind`` is "net" or "rnd"."""

    kind: str
    layer: Mapping[str, Any]
    op: str
    device: CudaDevice


@dataclass(frozen=True)
class Planned:
    """A job's own plan, and that of each configuration: family, name, expected seconds."""

    job: Job
    base: CudaPlan
    others: tuple[tuple[str, str, float | None, CudaPlan], ...]


def jobs_of(seed: int, count: int, device: CudaDevice) -> list[Job]:
    """In random order, so that a run that is cut short has some of everything."""
    layers = [("rnd", {**layer, "kind": "conv"}) for layer in random_layers(seed, count)]
    for layer in json.loads(SUITE.read_text(encoding="utf-8")):
        if layer["class"] == "dense":
            layers += [("net", {**layer, "N": batch}) for batch in BATCHES]
    jobs = [Job(kind, layer, op, device) for kind, layer in layers for op in BUFFERS]
    random.Random(seed).shuffle(jobs)
    return jobs


def configurations(
    work: ConvWork, device: CudaDevice, draw: random.Random
) -> Iterator[tuple[str, float | None, Family[ConvWork]]]:
    """Names, expected seconds and families of what to time."""
    products = products_of(work)
    if PointwiseGemm(Config(64, 64)).why_not(work, device) is not None:
        products = ()
    found = [
        (s, (f"{config}" + SWAPPED * one.swapped, PointwiseGemm(config, swapped=one.swapped)))
        for one in products
        for s, config in product.timed(one, device, COUNTERS)
    ]
    for s, (name, family) in spread(found, 8, 6, 2.0, draw):
        yield name, s, family
    many = not products
    if ImplicitGemm().why_not(work, device) is None:
        gemm = gemm_of(work, [gather_axis(gathering(work), dim) for dim in range(3)])
        every = [
            (implicit.expected_s(gemm, work.dtype, config, device), config)
            for config in implicit.candidate_configs(gemm, work.dtype, device, COUNTERS)
        ]
        for s, config in spread(every, 6 if many else 2, 3 * many, 1.6, draw):
            yield str(config), s, ImplicitGemm(config)
    if work.direction == "bwd_data":
        if HopperGather(everything=True).why_not(work, device) is None:
            axes = [gather_axis(work, dim) for dim in range(3)]
            schedules = [
                (gather.launch_s(gather.expected_s(work, axes, device, one)), one)
                for one in gather.candidates(work, axes, device)
            ]
            for s, one in spread(schedules, 7 if many else 4, 4 if many else 1, 1.8, draw):
                yield str(one), s, HopperGather(everything=True, schedule=one)
        if HopperHalo().why_not(work, device) is None:
            yield "", None, HopperHalo()
        return
    if HopperWeight().why_not(work, device) is None:
        cuts = [
            (weight.launch_s(weight.expected_s(cut, device)), cut)
            for cut in reachable(work, device)
        ]
        for s, cut in spread(cuts, 9 if many else 7, 5 if many else 2, 1.8, draw):
            yield str(cut), s, HopperWeight(cut=cut)
    if many and DenseWeight().why_not(work, device) is None:
        yield "", None, DenseWeight()


def spread(
    found: Sequence[tuple[float, T]], top: int, more: int, limit: float, draw: random.Random
) -> list[tuple[float, T]]:
    """Return the ``top`` that should be fastest, and ``more`` of those within ``limit`` of them."""
    ranked = sorted(found, key=lambda one: one[0])
    rest = [one for one in ranked[top:] if one[0] < limit * ranked[0][0]]
    return ranked[:top] + draw.sample(rest, min(more, len(rest)))


def planned(job: Job) -> Planned | None:
    """In a process of its own: planning needs no GPU. None if a plan is impossible."""
    problem: Any = problem_of(job.layer, "bfloat16", "NHWC", job.op)
    work = conv_work(problem, *BUFFERS[job.op])
    draw = random.Random(f"{job.layer['name']} {job.layer['N']} {job.op}")
    others = []
    try:
        base = plan_for(problem, job.device, FAMILIES)
        for name, s, family in configurations(work, job.device, draw):
            families = replace(FAMILIES, bwd_data=(family,), bwd_weight=(family,))
            others.append((family.name, name, s, plan_for(problem, job.device, families)))
    except UnsupportedProblem as refused:
        print(f"{job.layer['name']} {job.op}: {refused}")
        return None
    return Planned(job, base, tuple(others))


class Clock:
    """Times graphs in short samples."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()
        self._dirty = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._clean = torch.zeros(FLUSH_BYTES * 3 // 8, dtype=torch.float32, device="cuda")

    def us(self, run: Callable[[], Any], samples: int) -> float:
        """Return the median microseconds of a graph's replays."""
        side = self._side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            run()
        times = []
        for _ in range(samples):
            self._dirty.fill_(1)
            self._clean.sum()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
        median = statistics.median(start.elapsed_time(stop) for start, stop in times[1:])
        return round(float(median) * 1e3, 2)


def measure(bench: Bench, clock: Clock, one: Planned) -> dict[str, Any]:
    """One line of rows."""
    layer, op = one.job.layer, one.job.op
    (case,) = cases_of(layer, "bfloat16", "NHWC", (op,))
    samples = FEW_SAMPLES if case.reference_s > LONG_S else SAMPLES
    peer = case.peer(case.tensors)
    peer = (peer[0] if isinstance(peer, list) else peer).float()
    results = outputs_of(case)
    result = next(iter(results.values()))

    def us(plan: CudaPlan, count: int) -> float:
        result.fill_(math.nan)
        run = bench.ours(plan, {**case.tensors, **results})
        run()
        error = float((result.float() - peer.reshape(result.shape)).norm() / peer.norm())
        # Both are rounded.
        if not error <= 2 * TOLERANCE["bfloat16"]:
            raise SystemExit(f"{layer['name']} {op} {plan.kernel}: error {error}")
        return clock.us(run, count)

    names = ("input_size", "output_size", "kernel_size", "stride", "dilation", "padding")
    return {
        "kind": one.job.kind,
        "layer": layer["name"],
        "op": op,
        **{name: layer[name] for name in ("N", "C", "K", "ndim", *names)},
        "reference_us": round(case.reference_s * 1e6, 2),
        "peer_us": clock.us(lambda: case.peer(case.tensors), samples + 2),
        "kernel": one.base.kernel,
        "us": us(one.base, samples + 2),
        "configurations": [
            [family, name, None if s is None else round(s * 1e6, 3), us(plan, samples)]
            for family, name, s, plan in one.others
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200, help="in all")
    parser.add_argument("--seed", type=int, default=1414)
    parser.add_argument("--count", type=int, default=190, help="random layers")
    given = parser.parse_args()
    started_s = time.monotonic()
    bench, clock = Bench(SAMPLES), Clock()
    jobs = jobs_of(given.seed, given.count, bench.device)
    with ProcessPoolExecutor(PROCESSES) as pool:
        every = [one for one in pool.map(planned, jobs, chunksize=CHUNK) if one is not None]
    bench.compile([plan for one in every for plan in (one.base, *(each[3] for each in one.others))])
    with given.out.open("w", encoding="utf-8") as out:
        for count, one in enumerate(every):
            if time.monotonic() - started_s > given.seconds:
                print(f"out of time: {count} of {len(every)} measured")
                break
            out.write(json.dumps(measure(bench, clock, one)) + "\n")


if __name__ == "__main__":
    main()
