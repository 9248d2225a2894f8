"""Fits the rates of implicit_gemm's cost model in float32 to measured configurations.

    python -m tests.perf.fit_implicit tests/perf/results/implicit_sweep.jsonl

A row is an operation of a random layer (`random_layers`), with the microseconds of some of
implicit_gemm's configurations on an H200, and of what was chosen without it (``other``). Prints the
errors and the regret, the chosen configuration's time over that of the best measured one, on
layers that were held out, and then rates that are fitted to all.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import COUNTERS, gemm_of
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_model import (
    candidate_configs,
    expected_s,
)
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_rates import Rates, rates_of
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import Config, Gemm
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import H200
from tests.perf.layer_problems import problem_of

ROLES: Mapping[str, tuple[Any, tuple[str, str, str]]] = {
    "conv_fwd": ("fwd", ("input", "weight", "output")),
    "conv_bwd_data": ("bwd_data", ("grad_input", "weight", "grad_output")),
    "grouped_conv_bwd_weight": ("bwd_weight", ("input", "grad_weight", "grad_output")),
}
# Configurations that take up to NEAR times the best one's time have full weight. A rate stays
# near where it was unless more than NEAR_RATE of an error speaks for another one.
NEAR, NEAR_RATE, MOST = 1.3, 0.03, 3.0
MEMORY = 4.3
"""Megabytes per microsecond: those of a copy on an H200."""


@dataclass(frozen=True)
class Row:
    """A layer's GEMM, and its configurations with their microseconds."""

    name: str
    gemm: Gemm
    measured: tuple[tuple[Config, float], ...]

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.name.split("_n")[0].encode()) % 2 == 1

    @property
    def us(self) -> NDArray[np.float64]:
        return np.array([us for _, us in self.measured])

    def expected_us(self, rates: Rates) -> NDArray[np.float64]:
        every = [
            expected_s(self.gemm, DType.FLOAT32, config, H200, rates) for config, _ in self.measured
        ]
        return np.array(every) * 1e6


def rows_of(path: Path) -> dict[tuple[bool, ...], list[Row]]:
    """The rows by what has rates of its own."""
    found: dict[tuple[bool, ...], list[Row]] = defaultdict(list)
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        problem: Any = problem_of({**line, "groups": 1}, "float32", line["layout"], line["op"])
        role, names = ROLES[line["op"]]
        gemm = gemm_of(conv_work(replace(problem, precision=line["precision"]), role, *names))
        every = {str(one): one for one in candidate_configs(gemm, DType.FLOAT32, H200, COUNTERS)}
        times = [(every[name], us) for name, us in line["configurations"] if name in every]
        if times:
            key = gemm.copies.split, gemm.copies.planes > 0, gemm.weight
            found[key].append(Row(line["layer"], gemm, tuple(times)))
    return found


def errors(rows: Sequence[Row], rates: Rates) -> NDArray[np.float64]:
    return np.concatenate([np.log(row.expected_us(rates) / row.us) for row in rows])


def fitted(rows: Sequence[Row], start: Rates) -> Rates:
    """The rates with the least errors, weighted by how near a configuration is to the best one."""
    weights = np.concatenate([np.minimum(1.0, NEAR * row.us.min() / row.us) for row in rows])
    first = np.log(astuple(start))

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        own = errors(rows, Rates(*np.exp(logs))) * weights
        return np.concatenate([own, NEAR_RATE * (logs - first)])

    most = first + MOST
    memory = [field.name for field in fields(Rates)].index("memory")
    most[memory] = np.log(MEMORY)
    first = np.minimum(first, most - 1e-3)
    bounds = first - MOST, most
    found = least_squares(residuals, first, loss="soft_l1", f_scale=0.2, bounds=bounds).x
    return Rates(*(float(f"{rate:.3g}") for rate in np.exp(found)))


def report(what: str, rows: Sequence[Row], rates: Rates) -> None:
    regrets = [row.us[row.expected_us(rates).argmin()] / row.us.min() - 1 for row in rows]
    error = np.abs(errors(rows, rates)).mean()
    last = np.percentile(regrets, 95)
    print(
        f"{what}: {len(rows)} rows, error {error:.3f}, regret {np.mean(regrets):.3f} p95 {last:.3f}"
    )


def main() -> None:
    for key, rows in sorted(rows_of(Path(sys.argv[1])).items()):
        split, planes, weight = key
        start = rates_of(rows[0].gemm, DType.FLOAT32)
        print(f"{'split' if split else 'TF32'}, {planes=}, {weight=}")
        unseen = [row for row in rows if row.held_out]
        rates = fitted([row for row in rows if not row.held_out], start)
        report("  held out", unseen, rates)
        print(f"  {fitted(rows, start)}", flush=True)


if __name__ == "__main__":
    main()
