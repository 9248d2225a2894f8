"""Every distinct convolution of whole networks on the GPU, at several batches, and cuDNN's time.

    python -m tests.perf.bench_networks --networks resnet50 --batches 1 8 --ops conv_bwd_data

Times the layers of `suite/networks.json` as bench_gpu.py does (graph replay, one process, the same
tensors), in short samples so that several hundred take a minute, and writes
`tests/perf/results/networks.jsonl`: the fields of bench_gpu and `batch`, a line for each layer,
batch, operation, type and layout, in place of an older run's. `--types` measures other dtypes and
layouts at batch 32, for `network_types.jsonl`. `--others` measures a sample of 67 other networks'
layers, for which nothing was tuned, for `other_networks.jsonl`. `--suite` takes layers of any
networks, as model_layers.py lists them. Ends with a table by class and batch, and the sums of each
network. Needs a GPU, CuPy and PyTorch.

Plans are made and kernels compiled in parallel before anything is timed. Each result is compared
with cuDNN's, from a poisoned output; `--float64` compares with a float64 computation, which takes
longer.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.problems import Problem
from tests.perf.bench_gpu import TOLERANCE, Bench, error_of, facts, outputs_of, sources_of
from tests.perf.gpu_layers import Case, cases_of
from tests.perf.layer_problems import problem_of
from tests.perf.stale import standing_keys

HERE = Path(__file__).resolve().parent
SUITE, RESULTS = HERE / "suite" / "networks.json", HERE / "results" / "networks.jsonl"
BATCHES = (1, 8, 32, 128)
# What else is stored, at one batch: dtypes, layouts and precisions.
TYPES = (("float32", "NCHW", "highest"), ("float32", "NHWC", "high"), ("bfloat16", "NCHW", "high"))
OF_TYPES, TYPES_BATCH = HERE / "results" / "network_types.jsonl", 32
# Other networks, in all types.
OTHERS = HERE / "suite" / "other_networks.json"
OF_OTHERS = HERE / "results" / "other_networks.jsonl"
OTHERS_TYPES, OTHERS_BATCH = (("bfloat16", "NHWC", "high"), *TYPES), 16
# Networks of videos, sounds and large images fill a GPU at smaller batches.
LARGEST_BATCH = {"tvv:r2plus1d_18": 32, "tvv:r3d_18": 32, "ta:wav2vec2_base": 32}
LARGEST_BATCH |= {"tvs:deeplabv3_resnet50": 32}
GRADIENTS = ("conv_bwd_data", "grouped_conv_bwd_weight")
# Plans made by one process at a time, and by how many.
CHUNK, PROCESSES = 8, 16
# A run that is ended loses at most so many rows.
STORED_EVERY = 20
# Of the peer's time over ours: what the summary counts as slower.
SLOWER = (0.97, 0.95, 0.85)
# Both results are rounded.
APART = {name: 2 * bound for name, bound in TOLERANCE.items()}


class WrongResult(Exception):
    """Ours and cuDNN's results are too far apart; nothing was timed."""


@dataclass(frozen=True)
class Wanted:
    """One measurement to make; ``layer`` has a batch."""

    layer: Mapping[str, Any]
    op: str
    dtype: str
    layout: str
    precision: str

    @property
    def key(self) -> tuple[Any, ...]:
        """As `key_of` has it."""
        precision = self.precision if self.dtype == "float32" else None
        name, batch = self.layer["name"], self.layer["N"]
        return self.op, name, batch, self.dtype, self.layout, precision

    @property
    def problem(self) -> Problem:
        made: Any = problem_of(self.layer, self.dtype, self.layout, self.op)
        problem: Problem = made
        if self.dtype == "float32":
            problem = replace(made, precision=self.precision)
        return problem

    def case(self) -> Case:
        (case,) = cases_of(self.layer, self.dtype, self.layout, (self.op,))
        return replace(case, problem=self.problem)


def types_of(given: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Dtypes, layouts and precisions."""
    if given.types:
        return list(TYPES)
    if given.others:
        return list(OTHERS_TYPES)
    return [(dtype, layout, given.precision) for dtype in given.dtypes for layout in given.layouts]


def wanted_of(given: argparse.Namespace) -> list[Wanted]:
    """Layer by layer, so that its operations follow each other."""
    layers = [
        layer
        for layer in json.loads(given.suite.read_text(encoding="utf-8"))
        if (not given.networks or set(given.networks) & set(layer["networks"]))
        and (not given.classes or layer["class"] in given.classes)
    ]
    return [
        Wanted({**layer, "N": batch}, op, dtype, layout, precision)
        for dtype, layout, precision in types_of(given)
        for batch in given.batches
        for layer in layers
        if any(batch <= LARGEST_BATCH.get(network, batch) for network in layer["networks"])
        for op in given.ops
    ]


def no_longer_hold(
    wanted: Sequence[Wanted], plans: Sequence[CudaPlan], results: Path
) -> tuple[list[Wanted], list[CudaPlan]]:
    """Rows that are not stored, or whose kernels have changed or are not chosen any more."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = map(json.loads, lines)
    kernels = {key_of(row): row["kernel"] for row in rows}
    standing = standing_keys(results, key_of)
    pairs = [
        (one, plan)
        for one, plan in zip(wanted, plans, strict=True)
        if one.key not in standing or kernels.get(one.key) != plan.kernel
    ]
    return [one for one, _ in pairs], [plan for _, plan in pairs]


def _plan(work: tuple[Wanted, CudaDevice]) -> CudaPlan:
    one, device = work
    return plan_for(one.problem, device, FAMILIES)


def plans_of(wanted: Sequence[Wanted], device: CudaDevice) -> list[CudaPlan]:
    """In several processes: planning needs no GPU."""
    with ProcessPoolExecutor(PROCESSES) as pool:
        return list(pool.map(_plan, [(one, device) for one in wanted], chunksize=CHUNK))


def apart(case: Case, ours: Sequence[Any], peer: Any) -> float:
    """||ours - peer|| / ||peer||, the largest; NaN where an element was not written."""
    pairs = zip(ours, peer if isinstance(peer, list) else [peer], strict=True)
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def measure(bench: Bench, one: Wanted, plan: CudaPlan, given: argparse.Namespace) -> dict[str, Any]:
    """One line of results."""
    tf32 = one.precision == "high"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    case = one.case()
    results = outputs_of(case)
    run = bench.ours(plan, {**case.tensors, **results})
    run()
    found = list(results.values())
    if given.float64:
        error = error_of(case, found if len(found) > 1 else found[0])
    else:
        error = apart(case, found, case.peer(case.tensors))
    if not error <= APART[one.dtype]:
        raise WrongResult(
            f"{one.layer['name']} batch {one.layer['N']} {one.op} {one.dtype} {one.layout} by "
            f"{plan.kernel}: error {error}"
        )
    ours_s = bench.seconds(run)
    peer_s = bench.seconds(lambda: case.peer(case.tensors))
    more = {"precision": one.precision} if one.dtype == "float32" else {}
    return {
        "bench": "networks",
        "op": one.op,
        "layer": one.layer["name"],
        "class": one.layer["class"],
        "networks": one.layer["networks"],
        "batch": one.layer["N"],
        "dtype": one.dtype,
        "layout": one.layout,
        "ours_ms": round(ours_s * 1e3, 5),
        "kernel": plan.kernel,
        "sources": sources_of(plan),
        "peer": f"PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}",
        "peer_ms": round(peer_s * 1e3, 5),
        "reference_ms": round(case.reference_s * 1e3, 5),
        "error": float(f"{error:.3g}"),
        "samples": bench.samples,
        **more,
    }


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("op", "layer", "batch", "dtype", "layout")
    return *(line[name] for name in names), line.get("precision")


def store(lines: Iterable[dict[str, Any]], path: Path) -> None:
    """In place of older lines of the same measurements."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            kept[key_of(line)] = line
    kept |= {key_of(line): line for line in lines}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in kept.values()), encoding="utf-8")


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """By class, then by network: the peer's time over ours."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        group = (*(line[name] for name in ("class", "op", "dtype", "layout")), line["batch"])
        groups[group].append(line)
    slower = "".join(f"{f'<{bound}x':>8}" for bound in SLOWER)
    print(f"{'class, operation, type, layout, batch':58}{'layers':>7}{'geomean':>9}{slower}  worst")
    for group, members in groups.items():
        ratios = sorted((one["peer_ms"] / one["ours_ms"], one["layer"]) for one in members)
        below = "".join(
            f"{sum(ratio < bound for ratio, _ in ratios) / len(ratios):8.0%}" for bound in SLOWER
        )
        mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
        name = " ".join(map(str, group))
        print(f"{name:58}{len(ratios):7}{mean:8.2f}x{below}  {ratios[0][0]:.2f}x {ratios[0][1]}")
    sums: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in lines:
        if line["op"] not in GRADIENTS:
            continue
        for network, count in line["networks"].items():
            total = sums[network, line["dtype"], line["layout"], line["batch"]]
            total[0] += count * line["ours_ms"]
            total[1] += count * line["peer_ms"]
    print(f"\n{'network, both gradients':58}{'ours ms':>9}{'peer ms':>9}{'faster':>8}")
    for network, (ours, peer) in sums.items():
        print(f"{' '.join(map(str, network)):58}{ours:9.3f}{peer:9.3f}{peer / ours:7.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="*", default=[], help="none means all")
    parser.add_argument("--classes", nargs="*", default=[], help="none means all")
    parser.add_argument("--suite", type=Path, help="as model_layers.py makes it")
    parser.add_argument("--batches", nargs="*", type=int)
    parser.add_argument("--ops", nargs="*", default=GRADIENTS, help="conv_fwd too")
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--layouts", nargs="*", default=["NHWC"])
    parser.add_argument("--types", action="store_true", help="other dtypes and layouts, batch 32")
    parser.add_argument("--others", action="store_true", help="other networks, batch 16, all types")
    parser.add_argument("--precision", choices=("high", "highest"), default="high")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--stale", action="store_true", help="only rows missing or out of date")
    parser.add_argument("--seconds", type=float, help="stop measuring after so many")
    parser.add_argument("--float64", action="store_true", help="compare with float64")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    suite, results = SUITE, RESULTS
    batches: tuple[int, ...] = BATCHES
    if given.types:
        results, batches = OF_TYPES, (TYPES_BATCH,)
    elif given.others:
        suite, results, batches = OTHERS, OF_OTHERS, (OTHERS_BATCH,)
    given.suite, given.results = given.suite or suite, given.results or results
    given.batches = given.batches or batches
    bench = Bench(given.samples)
    started_s = time.monotonic()
    wanted = wanted_of(given)
    plans = plans_of(wanted, bench.device)
    if given.stale:
        wanted, plans = no_longer_hold(wanted, plans, given.results)
    planned_s = time.monotonic()
    bench.compile(plans)
    compiled_s = time.monotonic()
    print(
        f"{len(wanted)} to measure, after {planned_s - started_s:.0f} s of planning and "
        f"{compiled_s - planned_s:.0f} s of compiling"
    )
    where = facts(given.git_sha)
    lines: list[dict[str, Any]] = []
    wrong: list[str] = []
    for one, plan in zip(wanted, plans, strict=True):
        if given.seconds is not None and time.monotonic() - compiled_s > given.seconds:
            print(f"out of time: {len(wanted) - len(lines) - len(wrong)} were not measured")
            break
        try:
            lines.append(measure(bench, one, plan, given) | where)
        except WrongResult as error:
            wrong.append(str(error))
        if len(lines) % STORED_EVERY == 0:
            store(lines, given.results)
    store(lines, given.results)
    show(lines)
    print(f"\n{len(lines)} measured in {time.monotonic() - compiled_s:.0f} s")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
