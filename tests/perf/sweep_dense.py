"""Configurations of every dense family on many layers, compared with cuDNN, to fit their choice to.

    python -m tests.perf.sweep_dense --out ROWS.jsonl --seconds 200

The layers are those of `suite/networks.json` at several batches, and random ones (`random_layers`);
the operations are both gradients, in bfloat16, in one layout. Of each family, the configurations
are timed that its cost model expects to be fastest, and some that it does not, drawn at random. A
line for each layer goes to ``--out``; `fit_dense` reads them. Timed as bench_gpu times, in shorter
samples. Needs a Hopper GPU, CuPy and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from convgrad.errors import UnsupportedProblem
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.tuning.candidates import Candidate, candidates
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.plans.cuda.works import ConvWork
from tests.perf.bench_gpu import TOLERANCE, Bench, outputs_of, settle
from tests.perf.fit_dense import BUFFERS
from tests.perf.gpu_layers import cases_of
from tests.perf.layer_problems import problem_of
from tests.perf.random_layers import random_layers

SUITE = Path(__file__).resolve().parent / "suite" / "networks.json"
BATCHES, PROCESSES, CHUNK = (1, 8, 32, 128), 16, 4
SAMPLES, FEW_SAMPLES, LONG_S = 7, 4, 150e-6
FLUSH_BYTES = 128 * 2**20
# Of each family, how many configurations are timed of those that should be fastest and of those
# that should take less than LIMIT times as long: for layers that are products, and for others.
COUNTS = {
    "pointwise_gemm": ((8, 6), (8, 6)),
    "implicit_gemm": ((2, 0), (6, 3)),
    "hopper_gather": ((4, 1), (7, 4)),
    "hopper_weight": ((7, 2), (9, 5)),
    "hopper_weight_single": ((2, 1), (4, 2)),
    "hopper_halo": ((1, 0), (1, 0)),
    "dense_weight": ((0, 0), (1, 0)),
}
LIMIT = 1.8


@dataclass(frozen=True)
class Job:
    """One operation of one layer; ``kind`` is "net" or "rnd"."""

    kind: str
    layer: Mapping[str, Any]
    op: str
    device: CudaDevice
    wanted: re.Pattern[str]
    layout: str


@dataclass(frozen=True)
class Planned:
    """A job's own plan, and that of each configuration: family, name, expected seconds."""

    job: Job
    base: CudaPlan
    others: tuple[tuple[str, str, float | None, CudaPlan], ...]


def jobs_of(given: argparse.Namespace, device: CudaDevice) -> list[Job]:
    """In random order, so that a run that is cut short has some of everything."""
    layers = [
        ("rnd", {**layer, "kind": "conv"}) for layer in random_layers(given.seed, given.count)
    ]
    for layer in json.loads(SUITE.read_text(encoding="utf-8")):
        if layer["class"] == "dense":
            layers += [("net", {**layer, "N": batch}) for batch in BATCHES]
    jobs = [
        Job(kind, layer, op, device, given.configurations, given.layout)
        for kind, layer in layers
        for op in given.ops
        if given.layers.search(layer["name"])
    ]
    random.Random(given.seed).shuffle(jobs)
    return jobs


def configurations(
    work: ConvWork, device: CudaDevice, wanted: re.Pattern[str], draw: random.Random
) -> Iterator[Candidate]:
    """What to time: of each family some that should be fastest, and some that should not."""
    found = [
        [one for one in every if wanted.search(f"{one.family.name} {one.config}")]
        for every in candidates(work, device)
    ]
    many = not any(every and every[0].family.name == "pointwise_gemm" for every in found)
    for every in found:
        if not every:
            continue
        top, more = COUNTS[every[0].family.name][many]
        limit = LIMIT * (every[0].expected_s or 0.0)
        rest = [one for one in every[top:] if (one.expected_s or 0.0) < limit]
        yield from every[:top]
        yield from draw.sample(rest, min(more, len(rest)))


def planned(job: Job) -> Planned | None:
    """Plan in a separate process, without a GPU; return None if no plan is possible."""
    problem: Any = problem_of(job.layer, "bfloat16", job.layout, job.op)
    work = conv_work(problem, *BUFFERS[job.op])
    draw = random.Random(f"{job.layer['name']} {job.layer['N']} {job.op}")
    others = []
    try:
        base = plan_for(problem, job.device, FAMILIES)
        for one in configurations(work, job.device, job.wanted, draw):
            families = replace(FAMILIES, bwd_data=(one.family,), bwd_weight=(one.family,))
            plan = plan_for(problem, job.device, families)
            others.append((one.family.name, one.config, one.expected_s, plan))
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
        settle()
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
    (case,) = cases_of(layer, "bfloat16", one.job.layout, (op,))
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
        "layout": one.job.layout,
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
    parser.add_argument("--ops", nargs="+", choices=list(BUFFERS), default=list(BUFFERS))
    parser.add_argument("--layout", choices=("NHWC", "NCHW"), default="NHWC")
    parser.add_argument("--layers", type=re.compile, default="", help="their names' pattern")
    parser.add_argument(
        "--configurations", type=re.compile, default="", help="pattern of family and name"
    )
    given = parser.parse_args()
    started_s = time.monotonic()
    bench, clock = Bench(SAMPLES), Clock()
    jobs = jobs_of(given, bench.device)
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
