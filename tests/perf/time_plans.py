"""How long a first plan of a layer takes, in a process that has planned others before.

    python -m tests.perf.time_plans [--count 100] [--seed 7] [--plans FILE]

Plans random layers of four kinds for an H200, which need not be there, in random dtypes, layouts
and operations, each once, after as many others. Prints milliseconds of processor time, which other
processes hardly change; stores nothing. With ``--plans`` it writes a hash of each plan, so that
``diff`` tells whether two trees plan alike.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from tests.perf.layer_problems import problem_of
from tests.perf.random_grouped import random_grouped_layers
from tests.perf.random_layers import (
    random_any_depthwise_layers,
    random_few_channel_layers,
    random_layers,
)

KINDS: dict[str, Callable[[int, int], Iterator[dict[str, Any]]]] = {
    "dense": random_layers,
    "few channels": random_few_channel_layers,
    "depthwise": random_any_depthwise_layers,
    "grouped": random_grouped_layers,
}
OPERATIONS = "conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight", "conv_backward"
DTYPES = "bfloat16", "bfloat16", "float16", "float32", "float32"


def problems(seed: int, count: int) -> Iterator[tuple[str, str, Any]]:
    """Yield ``count`` problems of each kind, with the kind and a name; equal for equal seeds."""
    draw = random.Random(seed)
    for kind, layers in KINDS.items():
        for layer in layers(seed, count):
            chosen = draw.choice(OPERATIONS), draw.choice(DTYPES), draw.choice(("NHWC", "NCHW"))
            operation, dtype, layout = chosen
            problem = problem_of(layer, dtype, layout, operation)
            if dtype == "float32":
                problem = replace(problem, precision=draw.choice(("high", "highest")))
            yield kind, f"{layer['name']} {' '.join(chosen)} {problem.precision}", problem


def timed(problem: Any) -> tuple[float, str]:
    """Return the milliseconds of a plan, and a hash of it."""
    started = time.process_time()
    plan = plan_for(problem, H200, FAMILIES)
    took_ms = (time.process_time() - started) * 1e3
    return took_ms, sha256(repr(plan).encode()).hexdigest()[:16]


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="layers of each kind")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--plans", type=Path, help="write a hash of each plan to this file")
    chosen = parser.parse_args()
    for *_, problem in problems(chosen.seed + 1, chosen.count):
        timed(problem)
    times: dict[str, list[float]] = {}
    lines = []
    for kind, name, problem in problems(chosen.seed, chosen.count):
        took_ms, plan = timed(problem)
        for group in ("all", kind, problem.operation):
            times.setdefault(group, []).append(took_ms)
        lines.append(f"{name}\t{plan}\n")
    for group, found in times.items():
        ordered = sorted(found)
        median, late = ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
        print(
            f"{group:24} {len(ordered):5} plans: median {median:7.2f} ms, 95 % below {late:7.2f}, "
            f"worst {ordered[-1]:7.1f}"
        )
    if chosen.plans is not None:
        chosen.plans.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
