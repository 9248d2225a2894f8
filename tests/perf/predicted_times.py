"""How far are predicted times from stored ones?

    python -m tests.perf.predicted_times [--rows hopper_gather] [--least 4] [--sweeps]

Plans every convolution of `results/networks.jsonl`, `network_types.jsonl`, `other_networks.jsonl`
and `families.jsonl`, with ``--sweeps`` of `family_sweeps.jsonl` too, and compares the microseconds
that its candidates were expected to take, in the choice between families, with stored ones of the
same kernels. By family, operation, type, layout and whether there is a stride, prints the geometric
mean of predicted over measured times, by what factor they spread around it, and the means by
measured time. ``--rows`` prints the rows of families whose names start so.

Then, for each choice between kernels of which several were measured, the time of the chosen one
over the least (regret); and the stored rows whose kernel is no longer planned, with all that was
measured of the layer: ``bench_networks --stale`` measures them again. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import Chosen, FastestExpected
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.problems import Problem
from tests.perf.layer_names import layer_named
from tests.perf.layer_problems import problem_of

RESULTS = Path(__file__).resolve().parent / "results"
STORED = ("networks", "network_types", "other_networks")
OPERATIONS = ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")
# A sweep whose layers' sizes are those of both axes.
SQUARE = "grouped dense"
# Of a sweep's labels: no kernels of ours.
NOT_OURS = ("cudnn", "floor")
SIZES = (10.0, 30.0, 100.0, math.inf)
"""Upper ends of buckets, in measured microseconds."""


@dataclass(frozen=True)
class Prediction:
    """A plan's kernel, and the microseconds expected of it and of what it was compared with, by
    kernel; each with its family. Kernels that are not compared have no time."""

    kernel: str
    candidates: Mapping[str, tuple[str, float]]


@dataclass(frozen=True)
class Work:
    """What was measured: one operation of a layer, and microseconds by kernel.

    ``stored`` is the kernel of a row of networks, which may not be planned any more.
    """

    key: tuple[Any, ...]
    problem: Problem
    strided: bool
    measured: dict[str, float]
    stored: list[str]


def prediction_of(problem: Problem) -> Prediction:
    """Plan a problem, and record what families were expected to take."""
    found: dict[str, tuple[str, float]] = {}
    total_s = FastestExpected._total_s

    def recorded(self: FastestExpected[Any], chosen: Chosen) -> float | None:
        time_s = total_s(self, chosen)
        if time_s is not None:
            # The last choice is the outermost one, whose time counts.
            found[chosen.fragment.kernel] = chosen.family, time_s * 1e6
        return time_s

    with mock.patch.object(FastestExpected, "_total_s", recorded):
        plan = plan_for(problem, H200, FAMILIES)
    if plan.kernel not in found and plan.expected_s is not None:
        found[plan.kernel] = plan.orders[0].split()[0], plan.expected_s * 1e6
    return Prediction(plan.kernel, found)


def works_of(sweeps: bool) -> list[Work]:
    """What is stored, each problem once."""
    found: dict[tuple[Any, ...], Work] = {}
    for bench in (*STORED, "families", *(("family_sweeps",) if sweeps else ())):
        for line in (RESULTS / f"{bench}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["op"] not in OPERATIONS:
                continue
            work = _work_of(row)
            if work is None:
                continue
            known = found.setdefault(work.key, work)
            for kernel, us in _times_of(row):
                known.measured[kernel] = min(us, known.measured.get(kernel, math.inf))
            if bench in STORED:
                known.stored.append(row["kernel"])
    return list(found.values())


def _work_of(row: Mapping[str, Any]) -> Work | None:
    """The row's problem, without what was measured; None if its layer is not known."""
    layer = layer_named(row["layer"], row.get("batch"), square=row.get("family") == SQUARE)
    if layer is None:
        return None
    problem: Any = problem_of({"groups": 1, **layer}, row["dtype"], row["layout"], row["op"])
    kind = "16 bits"
    if row["dtype"] == "float32":
        problem = replace(problem, precision=row.get("precision") or "high")
        kind = "TF32" if problem.precision == "high" else "float32"
    names = ("N", "C", "K", "groups", "input_size", "kernel_size", "stride", "padding", "dilation")
    shape = tuple(str(layer[name]) for name in names)
    key = row["op"], kind, row["layout"], f"{row['layer']} batch {layer['N']}", shape
    return Work(key, problem, max(layer["stride"]) > 1, {}, [])


def _times_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """A row's kernels with their microseconds."""
    if "us" not in row:
        yield row["kernel"], row["ours_ms"] * 1e3
        if "other" in row:
            yield row["other"], row["other_ms"] * 1e3
        return
    for label, us in row["us"].items():
        # Labels end with the kernel, or its rank in parentheses.
        words = [word for word in label.split() if not word.startswith("(")]
        if us and words and not label.lower().startswith(NOT_OURS):
            yield words[-1], us


def show_errors(found: Iterable[tuple[Work, Prediction]], rows: str | None, least: int) -> None:
    """Predicted over measured times, by family."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for work, prediction in found:
        for kernel, (family, us) in prediction.candidates.items():
            measured = work.measured.get(kernel)
            if measured is None:
                continue
            stride = "strided" if work.strided else "stride 1"
            groups[family, *work.key[:3], stride].append((us, measured))
            if rows is not None and family.startswith(rows):
                print(
                    f"{us / measured:5.2f} {us:8.1f} of {measured:8.1f} us: {kernel}, {_name(work)}"
                )
    print(
        f"{'family, operation, type, layout':82}{'rows':>5}{'bias':>6}{'spread':>7}  by measured us"
    )
    for group, times in sorted(groups.items()):
        if len(times) < least:
            continue
        bias, spread = bias_and_spread(times)
        parts = []
        for start, end in zip((0.0, *SIZES), SIZES, strict=False):
            part = [pair for pair in times if start <= pair[1] < end]
            if part:
                parts.append(f"<{end:g}: {bias_and_spread(part)[0]:.2f} ({len(part)})")
        print(f"{' '.join(group):82}{len(times):5}{bias:6.2f}{spread:7.2f}  {', '.join(parts)}")


def bias_and_spread(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The geometric mean of first over second numbers, and their geometric standard deviation."""
    logs = [math.log(first / second) for first, second in times]
    mean = math.fsum(logs) / len(logs)
    return math.exp(mean), math.exp(
        math.sqrt(math.fsum((one - mean) ** 2 for one in logs) / len(logs))
    )


def show_regret(found: Iterable[tuple[Work, Prediction]]) -> None:
    """The chosen kernel's time over the least one measured."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for work, prediction in found:
        chosen = work.measured.get(prediction.kernel)
        if chosen is not None and len(work.measured) > 1:
            groups[work.key[:3]].append(chosen / min(work.measured.values()))
    print(f"\n{'operation, type, layout':48}{'choices':>8}{'regret':>8}{'most':>7}")
    everything = [one for ratios in groups.values() for one in ratios]
    for group, ratios in [*sorted(groups.items()), (("all",), everything)]:
        if ratios:
            mean = geometric_mean(ratios)
            print(f"{' '.join(group):48}{len(ratios):8}{mean:8.3f}{max(ratios):7.2f}")


def show_changed(found: Iterable[tuple[Work, Prediction]]) -> None:
    """Stored rows whose kernel is not planned any more."""
    print()
    for work, prediction in found:
        for kernel in work.stored:
            if kernel == prediction.kernel:
                continue
            expected = prediction.candidates.get(prediction.kernel)
            now = "" if expected is None else f", expected to take {expected[1]:.1f} us"
            print(f"{_name(work)}: {prediction.kernel} instead of {kernel}{now}; measured")
            for name, us in sorted(work.measured.items(), key=lambda each: each[1]):
                print(f"    {us:8.1f} us by {name}")


def _name(work: Work) -> str:
    operation, kind, layout, layer, _ = work.key
    return f"{operation} of {layer}, {kind}, {layout}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="print the rows of families whose names start so")
    parser.add_argument("--least", type=int, default=4, help="rows of a line of the table")
    parser.add_argument("--sweeps", action="store_true", help="family_sweeps too")
    given = parser.parse_args()
    found = [(work, prediction_of(work.problem)) for work in works_of(given.sweeps)]
    show_errors(found, given.rows, given.least)
    show_regret(found)
    show_changed(found)


if __name__ == "__main__":
    main()
