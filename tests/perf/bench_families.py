"""The gain of each kernel family: each layer's plan and the best plan without that family.

    python -m tests.perf.bench_families [--families first_forward ...] [--rows 24] [--wider]
        [--random 300]

The layers are the rows of `results/networks.jsonl`, `gpu.jsonl` and `poolings.jsonl`; `--wider`
adds the networks' layers at one batch in other layouts, dtypes and precisions, and forward, and
`--random` as many random layers of each of four classes: dense, grouped, depthwise, of images. A
family's rows are those whose plan would be different without it (`family_plans`). Each is timed
with both plans, in one process and on the same tensors, as `bench_gpu` does, and both results are
compared. Of families with many rows, `--rows` of them are timed, evenly spread.

Prints for each family the lines of source that it alone uses, its rows, and by what factor they
are slower without it, and writes `tests/perf/results/families.jsonl`, a line for each family and
row. Needs what `bench_gpu` needs. A family that wins less than 5 % everywhere is to be removed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import CudaPlan, Instance, Launch
from convgrad_service.problems import Problem
from tests.perf import gpu_poolings
from tests.perf.bench_gpu import Bench, facts, outputs_of, sources_of
from tests.perf.bench_networks import APART, apart
from tests.perf.family_plans import Plans, family_kinds, lines_of, plans_without
from tests.perf.family_tables import WINS
from tests.perf.gpu_layers import Case, cases_of
from tests.perf.layer_problems import problem_of
from tests.perf.random_grouped import random_grouped_layers
from tests.perf.random_layers import (
    random_depthwise_layers,
    random_few_channel_layers,
    random_layers,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BENCHES = ("networks", "gpu", "poolings")
SUITES = {"networks": ("networks",), "gpu": ("layers", "transposed"), "poolings": ("poolings",)}
GRADIENTS = ("conv_bwd_data", "grouped_conv_bwd_weight")
WIDER_BATCH = 32
WIDER: tuple[tuple[tuple[str, ...], str, str, str | None], ...] = (
    (("conv_fwd",), "bfloat16", "NHWC", None),
    (GRADIENTS, "bfloat16", "NCHW", None),
    (GRADIENTS, "float32", "NHWC", "high"),
    (GRADIENTS, "float32", "NHWC", "highest"),
)
"""Operations, dtypes, layouts and precisions in addition to those that are measured."""
RANDOM = (random_layers, random_grouped_layers, random_depthwise_layers, random_few_channel_layers)
RANDOM_SEED = 17
RANDOM_TYPES: tuple[tuple[str, str, str | None], ...] = (
    *(("bfloat16", "NHWC", None),) * 6,
    ("float16", "NHWC", None),
    *(("bfloat16", "NCHW", None),) * 3,
    *(("float32", "NHWC", "high"), ("float32", "NHWC", "highest")) * 2,
    ("float32", "NCHW", "high"),
    ("float32", "NCHW", "highest"),
)
"""Dtypes, layouts and precisions of random layers, as often as they are drawn."""
WIDER_POOLS = (
    ((112, 112), (3, 3), (2, 2), (0, 0), 1),
    ((112, 112), (2, 2), (2, 2), (0, 0), 1),
    ((56, 56), (3, 3), (2, 2), (1, 1), 1),
    ((56, 56), (3, 3), (3, 3), (0, 0), 1),
    ((56, 56), (2, 2), (1, 1), (0, 0), 1),
    ((28, 28), (3, 3), (1, 1), (1, 1), 2),
    ((20, 20), (9, 9), (1, 1), (4, 4), 1),
    ((20, 20), (13, 13), (1, 1), (6, 6), 1),
    ((8, 112, 112), (1, 3, 3), (1, 2, 2), (0, 1, 1), 1),
    ((8, 56, 56), (3, 3, 3), (2, 2, 2), (1, 1, 1), 1),
)
"""Size, window, stride, padding and dilation of more gradients of max poolings."""
PROCESSES, CHUNK = 16, 4
COMPILED_AT_A_TIME = 48
Size = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One measurement: a layer with its batch, and an operation on it."""

    layer: Mapping[str, Any]
    op: str
    dtype: str
    layout: str
    precision: str | None

    @property
    def fields(self) -> dict[str, Any]:
        """As they are stored."""
        found = {"layer": self.layer["name"], "class": self.layer["class"]}
        found |= {"batch": self.layer["N"], "op": self.op}
        found |= {"dtype": self.dtype, "layout": self.layout, "precision": self.precision}
        return found

    def problem(self) -> Problem:
        """Without tensors where they are not needed to know it."""
        given = self.layer, self.dtype, self.layout, self.op
        if self.op in (*GRADIENTS, "conv_fwd", "conv_backward"):
            return self._precise(problem_of(*given))
        if "pool" in self.layer["class"] and self.layer["class"] != "pool":
            return gpu_poolings.problem_of(*given)
        return self.case().problem

    def case(self) -> Case:
        """With tensors."""
        ops = self.op, "maxpool_bwd"
        found = cases_of(self.layer, self.dtype, self.layout, ops)
        case = next(one for one in found if one.op == self.op)
        return replace(case, problem=self._precise(case.problem))

    def _precise(self, problem: Problem) -> Problem:
        given: Any = problem
        if self.dtype == "float32" and hasattr(given, "precision"):
            problem = replace(given, precision=self.precision or "high")
        return problem


def measured_rows() -> Iterator[Row]:
    """Those of the results."""
    for bench in BENCHES:
        layers = {layer["name"]: layer for suite in SUITES[bench] for layer in suite_of(suite)}
        for line in (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if (layer := layers.get(row["layer"])) is not None:
                if "batch" in row:
                    layer = {**layer, "N": row["batch"]}
                precision = row.get("precision")
                yield Row(layer, row["op"], row["dtype"], row["layout"], precision)


def wider_rows() -> Iterator[Row]:
    """Other layouts, dtypes, precisions and operations."""
    for layer in suite_of("networks"):
        if layer["kind"] == "conv":
            for ops, dtype, layout, precision in WIDER:
                for op in ops:
                    yield Row({**layer, "N": WIDER_BATCH}, op, dtype, layout, precision)
    pools = [layer for layer in suite_of("layers") if layer["class"] == "pool"]
    pools += [_pool(*window) for window in WIDER_POOLS]
    for layer in pools:
        for dtype, layout in product(("bfloat16", "float32"), ("NHWC", "NCHW")):
            yield Row(layer, f"maxpool{layer['ndim']}d_bwd", dtype, layout, None)


def random_rows(count: int) -> Iterator[Row]:
    """``count`` layers of each class, forward and both gradients, in a type drawn for each layer;
    equal for equal counts."""
    draw = random.Random(RANDOM_SEED)
    for layers in RANDOM:
        for layer in layers(RANDOM_SEED, count):
            types = draw.choice(RANDOM_TYPES)
            for op in ("conv_fwd", *GRADIENTS):
                yield Row({**layer, "kind": "conv"}, op, *types)


def _pool(size: Size, kernel: Size, stride: Size, padding: Size, dilation: int) -> dict[str, Any]:
    ends = zip(size, kernel, stride, padding, strict=True)
    out = [(n + 2 * p - dilation * (k - 1) - 1) // s + 1 for n, k, s, p in ends]
    return {
        "name": f"max_{'x'.join(map(str, size))}_k{kernel[-1]}_s{stride[-1]}_d{dilation}",
        "class": "pool",
        "kind": "maxpool",
        "ndim": len(size),
        "N": WIDER_BATCH // (len(size) - 1),
        "C": 64,
        "input_size": size,
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": [dilation] * len(size),
        "output_size": out,
    }


def suite_of(name: str) -> list[dict[str, Any]]:
    layers: list[dict[str, Any]] = json.loads((HERE / "suite" / f"{name}.json").read_text())
    return layers


def _plans(work: tuple[Problem, CudaDevice, Sequence[str]]) -> Plans:
    return plans_without(*work)


def plans_of(
    rows: Sequence[Row], device: CudaDevice, together: Sequence[str], processes: int
) -> list[Plans]:
    """In several processes: planning needs no GPU."""
    problems = [(row.problem(), device, together) for row in rows]
    torch.cuda.empty_cache()
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(_plans, problems, chunksize=CHUNK))


def spread(rows: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of them, evenly spread."""
    if len(rows) <= most:
        return list(rows)
    return [rows[index * len(rows) // most] for index in range(most)]


def chosen_rows(plans: Sequence[Plans], names: Iterable[str], most: int) -> dict[int, list[str]]:
    """The rows to time, each with the families to leave out; those of the first names first."""
    found: dict[int, list[str]] = defaultdict(list)
    for name in names:
        of_family = [i for i, one in enumerate(plans) if one.without.get(name) is not None]
        for index in spread(of_family, most):
            found[index].append(name)
    return found


def instances_of(plan: CudaPlan) -> set[Instance]:
    return {step.instance for step in plan.steps if isinstance(step, Launch)}


def compile_within(bench: Bench, plans: Iterable[CudaPlan], seconds: float) -> set[Instance]:
    """Compile the plans' kernels in their order until the time is up, and return them."""
    wanted = list(dict.fromkeys(one for plan in plans for one in sorted_instances(plan)))
    started_s, ready = time.monotonic(), set[Instance]()
    for first in range(0, len(wanted), COMPILED_AT_A_TIME):
        if time.monotonic() - started_s > seconds:
            break
        part = wanted[first : first + COMPILED_AT_A_TIME]
        for refusal in bench.compiler.compile_all(part):
            raise SystemExit(refusal)
        ready |= set(part)
    spent_s = time.monotonic() - started_s
    print(f"{len(ready)} of {len(wanted)} kernels compiled in {spent_s:.0f} s")
    return ready


def sorted_instances(plan: CudaPlan) -> list[Instance]:
    return sorted(instances_of(plan), key=lambda one: one.name)


def measure(bench: Bench, row: Row, plans: Mapping[str, CudaPlan]) -> dict[str, dict[str, Any]]:
    """Time of each plan, by the name of the family left out, and how far results are apart."""
    tf32 = row.precision != "highest"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    case = row.case()
    found: dict[str, dict[str, Any]] = {}
    first: list[Any] = []
    for name, plan in plans.items():
        results = outputs_of(case)
        run = bench.ours(plan, {**case.tensors, **results})
        run()
        values = list(results.values())
        first = first or values
        floating = [(a, b) for a, b in zip(values, first, strict=True) if a.is_floating_point()]
        error = apart(case, [a for a, _ in floating], [b for _, b in floating])
        found[name] = {"ms": bench.seconds(run) * 1e3, "apart": error, "plan": plan}
    return found


def lines_for(
    row: Row, found: Mapping[str, Mapping[str, Any]], used: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """One line for each family left out; ``used`` is how many rows use it."""
    base = found[""]
    for name, other in found.items():
        if not name:
            continue
        if not other["apart"] <= APART[row.dtype]:
            print(f"WRONG without {name}: {row.fields}: {other['apart']}")
        yield {
            "bench": "families",
            "family": name,
            "family_lines": lines_of(name),
            "family_rows": used[name],
            **row.fields,
            "kernel": base["plan"].kernel,
            "ours_ms": round(base["ms"], 5),
            "other": other["plan"].kernel,
            "other_ms": round(other["ms"], 5),
            "apart": float(f"{other['apart']:.3g}"),
            "sources": sources_of(base["plan"]) | sources_of(other["plan"]),
        }


def show(lines: Sequence[Mapping[str, Any]], used: Mapping[str, int]) -> None:
    """A family a line: the factor by which its rows are slower without it."""
    ratios = defaultdict(list)
    for line in lines:
        ratios[line["family"]].append(line["other_ms"] / line["ours_ms"])
    print(
        f"\n{'family':40}{'lines':>6}{'rows':>6}{'timed':>6}{'won':>5}"
        f"{'least':>7}{'geomean':>8}{'most':>7}"
    )
    for name in sorted({*family_kinds(), *ratios}, key=lambda one: (-lines_of(one), one)):
        own = ratios[name]
        text = f"{name:40}{lines_of(name):6}{used.get(name, 0):6}{len(own):6}"
        if own:
            won = sum(ratio > WINS for ratio in own)
            mean = statistics.geometric_mean(own)
            text += f"{won:5}{min(own):7.2f}{mean:8.2f}{max(own):7.2f}"
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=[], help="none means all")
    parser.add_argument("--together", nargs="*", default=[], help="left out at once: a+b c+d")
    parser.add_argument("--rows", type=int, default=24, help="timed of a family, at most")
    parser.add_argument("--wider", action="store_true", help="other layouts, dtypes, operations")
    parser.add_argument("--random", type=int, default=0, help="random layers of each class")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of timing")
    parser.add_argument("--compile-seconds", type=float, default=math.inf)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--results", type=Path, default=RESULTS / "families.jsonl")
    given = parser.parse_args()
    started_s = time.monotonic()
    names = [*(given.families or sorted(family_kinds())), *given.together]
    rows = [*measured_rows(), *(wider_rows() if given.wider else ()), *random_rows(given.random)]
    bench = Bench(given.samples)
    plans = plans_of(rows, bench.device, given.together, given.processes)
    print(f"{len(rows)} rows planned in {time.monotonic() - started_s:.0f} s")
    chosen = chosen_rows(plans, names, given.rows)
    timed = {
        index: {"": plans[index].plan}
        | {name: plan for name in left_out if (plan := plans[index].without[name]) is not None}
        for index, left_out in chosen.items()
    }
    ready = compile_within(
        bench, (plan for some in timed.values() for plan in some.values()), given.compile_seconds
    )
    used = Counter(name for one in plans for name in one.without)
    where, lines = facts(given.git_sha), list[dict[str, Any]]()
    started_s = time.monotonic()
    for index, some in timed.items():
        if time.monotonic() - started_s > given.seconds:
            print("out of time")
            break
        usable = {name: plan for name, plan in some.items() if instances_of(plan) <= ready}
        if "" in usable and len(usable) > 1:
            found = measure(bench, rows[index], usable)
            lines += [line | where for line in lines_for(rows[index], found, used)]
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    show(lines, used)


if __name__ == "__main__":
    main()
