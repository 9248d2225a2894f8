"""Fits the corrections of the dense cost models, and the table of tuned layers, to measurements.

    python -m tests.perf.fit_dense ROWS.jsonl [--write] [--models hopper_gather] [--onto]

Rows are those of `tests/perf/sweep_dense.py`: every family's configurations on many layers, beside
cuDNN. First half of the layers is held out, and the regret of the choice on it is reported: the
chosen configuration's time over the best measured one's, of all families, with and without
cuDNN's. ``--write`` then fits to all layers and writes `backends/cuda/tuning/hopper.json`; with
``--models``, only the corrections of these, and the layers that rows have. With ``--onto``, the
shipped trees stay, and more of them are fitted to what they leave, which suits a short sweep:
``tests/perf/results/dense_sweep.jsonl`` holds the last two. Where a row says that the peer was not
searched, its time is of cuDNN's own choice.

A correction is an ensemble of oblivious trees (`backends/cuda/tuning/correction.py`), fitted by
gradient boosting to the logarithm of measured over expected time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv import (
    hopper_gather_model,
    hopper_weight_model,
    hopper_weight_single,
    implicit_gemm_model,
    pointwise_gemm_model,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import (
    candidates as gather_candidates,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import reachable
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import gemm_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import (
    COUNTERS,
    SWAPPED,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_model import SHARING
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_products import products_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.backends.cuda.tuning.candidates import candidates
from convgrad_service.backends.cuda.tuning.correction import TABLE, Correction
from convgrad_service.backends.cuda.tuning.features import NAMES
from convgrad_service.backends.cuda.tuning.tuned import key_of
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.works import ConvWork
from tests.perf.layer_problems import problem_of

BUFFERS = {
    "conv_bwd_data": ("bwd_data", "grad_input", "weight", "grad_output"),
    "grouped_conv_bwd_weight": ("bwd_weight", "input", "grad_weight", "grad_output"),
}
LEVELS, TREES, RATE, RIDGE, THRESHOLDS = 4, 80, 0.2, 6.0, 20
# Of trees that are added to shipped ones, which learn more slowly; and the largest error of theirs
# in powers of 2, as more is a disturbed measurement.
RATE_ONTO, RIDGE_ONTO, MOST_LEFT = 0.1, 10.0, 1.5
# Configurations that take longer than so many times the best count less.
NEAR = 1.15
CHUNK = 8


@dataclass(frozen=True)
class Measured:
    """One configuration on one layer: its model, features, expected and measured microseconds.

    A way to run another one, ``of``, has the features ``way`` too, and `line` is the other one's.
    """

    model: str | None
    family: str
    config: str
    line: NDArray[np.float64] | None
    expected_us: float
    us: float
    of: str = ""
    way: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Row:
    """One layer."""

    key: str | None
    layer: str
    kind: str
    operation: str
    peer_us: float
    now_us: float
    measured: tuple[Measured, ...]

    @property
    def held_out(self) -> bool:
        """By the layer without its batch and operation, so that no half knows the other's."""
        return zlib.crc32(self.layer.encode()) % 2 == 1


def work_of(row: Mapping[str, Any]) -> ConvWork:
    """The row's layer as the planner sees it."""
    layer, layout = {**row, "groups": 1, "kind": "conv"}, row.get("layout", "NHWC")
    problem: Any = problem_of(layer, "bfloat16", layout, row["op"])
    return conv_work(problem, *BUFFERS[row["op"]])


class Lines:
    """The features of a layer's configurations, by family and name."""

    def __init__(self, work: ConvWork, device: CudaDevice) -> None:
        self._work, self._device = work, device
        self._axes = gather_axes(work)
        # Configurations by name, made when they are first asked for.
        self._named: dict[str, dict[str, Any]] = {}

    def of(self, family: str, name: str, s: float) -> tuple[str, NDArray[np.float64]] | None:
        """The model and the line of a configuration; None if its family has no correction."""
        work, device, axes = self._work, self._device, self._axes
        if family == "pointwise_gemm":
            config = Config.named(name.removesuffix(SWAPPED))
            if config is None:
                raise ValueError(f"no configuration {name}")
            products = products_of(work)
            product = products[name.endswith(SWAPPED) and len(products) > 1]
            model = f"{family}_{product.kind}"
            return model, pointwise_gemm_model.line_of(product, device, config, s)
        if family == "implicit_gemm":
            gemm = gemm_of(work)
            found = [(s, self._find(family, name))]
            model = f"{family}_{'weight' if gemm.weight else 'gather'}"
            return model, implicit_gemm_model.lines(gemm, work.dtype, device, found)[0]
        if family == "hopper_gather":
            found = [(s, self._find(family, name))]
            model = hopper_gather_model.correction_name(work)
            return model, hopper_gather_model.lines(work, axes, device, found)[0]
        if family == "hopper_weight":
            found = [(s, self._find(family, name))]
            return family, hopper_weight_model.lines(work, device, found)[0]
        if family == "hopper_weight_single":
            found = [(s, self._find(family, name))]
            return family, hopper_weight_single.lines(work, device, found)[0]
        return None

    def way_of(self, family: str, name: str) -> str:
        """The configuration that this one is a way to run; empty if it is none."""
        config = Config.named(name.removesuffix(SWAPPED)) if family == "pointwise_gemm" else None
        if config is None or not products_of(self._work)[0].shares:
            return ""
        other = replace(config, multicast=1, alternate=False)
        if other == config:
            return ""
        return f"{other}{SWAPPED if name.endswith(SWAPPED) else ''}"

    def of_way(self, name: str, s: float) -> NDArray[np.float64] | None:
        """The line of a way to run a configuration that takes ``s`` seconds."""
        config = Config.named(name.removesuffix(SWAPPED))
        assert config is not None
        product = products_of(self._work)[name.endswith(SWAPPED)]
        return pointwise_gemm_model.sharing_line_of(product, self._device, config, s)

    def _find(self, family: str, name: str) -> Any:
        if family not in self._named:
            work, device = self._work, self._device
            every: Iterable[Any]
            if family == "implicit_gemm":
                gemm = gemm_of(work)
                every = implicit_gemm_model.candidate_configs(gemm, work.dtype, device, COUNTERS)
            elif family == "hopper_gather":
                every = gather_candidates(work, self._axes, device)
            elif family == "hopper_weight":
                every = reachable(work, device)
            else:
                every = hopper_weight_single.configs(work, device)
            self._named[family] = {str(one): one for one in every}
        return self._named[family].get(name)


def measured_of(row: Mapping[str, Any], work: ConvWork, device: CudaDevice) -> Iterator[Measured]:
    """A row's configurations that still exist, with what the models expect of them today."""
    lines = Lines(work, device)
    today = {
        (one.family.name, one.config): one.expected_s
        for every in candidates(work, device)
        for one in every
    }
    for family, name, _, us in row["configurations"]:
        of = lines.way_of(family, name)
        if (family, of or name) not in today:
            continue
        expected_s = today[family, of or name]
        found = None if expected_s is None else lines.of(family, name, expected_s)
        model, line = (None, None) if found is None else found
        expected_us = math.inf if expected_s is None else expected_s * 1e6
        way = lines.of_way(name, expected_s) if of and expected_s else None
        yield Measured(model, family, name, line, expected_us, us, of, way)


def rows_of(path: Path, device: CudaDevice) -> list[Row]:
    """The layers of a sweep whose channels are whole chunks; others are padded first."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        if row["C"] % CHUNK or row["K"] % CHUNK or not row["configurations"]:
            continue
        work = work_of(row)
        every = tuple(measured_of(row, work, device))
        name = row["layer"].split("_n")[0]
        found.append(
            Row(key_of(work), name, row["kind"], row["op"], row["peer_us"], row["us"], every)
        )
    return found


def fitted(
    lines: NDArray[np.float64],
    wanted: NDArray[np.float64],
    weight: NDArray[np.float64],
    *,
    rate: float,
    ridge: float,
) -> dict[str, Any]:
    """A table's entry: trees for ``wanted``, the logarithms to base 2."""
    cuts = []
    for index in range(lines.shape[1]):
        values = np.unique(lines[:, index])
        middles = (values[1:] + values[:-1]) / 2
        if len(middles) > THRESHOLDS:
            middles = np.quantile(lines[:, index], np.linspace(0.03, 0.97, THRESHOLDS))
        cuts += [(index, round(float(cut), 4)) for cut in np.unique(middles)]
    bits = np.array([lines[:, index] > cut for index, cut in cuts])
    left = wanted.copy()
    table: dict[str, Any] = {"features": [], "thresholds": [], "leaves": []}
    for _ in range(TREES):
        leaf, chosen = np.zeros(len(left), np.int64), []
        for level in range(LEVELS):
            best, best_gain = 0, -1.0
            for index in range(len(cuts)):
                place = leaf + (bits[index] << level)
                total = np.bincount(place, weight * left, 2 << level)
                count = np.bincount(place, weight, 2 << level)
                gain = float((total**2 / (count + ridge)).sum())
                if gain > best_gain:
                    best, best_gain = index, gain
            leaf += bits[best] << level
            chosen.append(cuts[best])
        total = np.bincount(leaf, weight * left, 1 << LEVELS)
        count = np.bincount(leaf, weight, 1 << LEVELS)
        leaves = np.round(rate * total / (count + ridge), 3)
        left -= leaves[leaf]
        table["features"].append([NAMES[index] for index, _ in chosen])
        table["thresholds"].append([cut for _, cut in chosen])
        table["leaves"].append(leaves.tolist())
    return table


def corrections(
    rows: Sequence[Row], shipped: Mapping[str, dict[str, Any]] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """The entries of all models: ``shipped`` ones with more trees, or new ones."""
    before = {model: Correction.of(entry) for model, entry in shipped.items()}
    data: dict[str, list[tuple[Any, float, float]]] = {}
    for row in rows:
        best = min(one.us for one in row.measured)
        plain = {one.config: one.us for one in row.measured if one.family == "pointwise_gemm"}
        for one in row.measured:
            if one.of:
                if one.way is not None and one.of in plain:
                    ratio = float(np.log2(one.us / plain[one.of]))
                    far = max(1.0, min(one.us, plain[one.of]) / best / NEAR)
                    data.setdefault(SHARING, []).append((one.way, ratio, far**-2))
            elif one.model is not None and one.line is not None:
                expected_us = corrected_us(one, before)
                far = max(1.0, min(one.us, expected_us) / best / NEAR)
                left = float(np.log2(one.us / expected_us))
                if shipped:
                    left = min(max(left, -MOST_LEFT), MOST_LEFT)
                data.setdefault(one.model, []).append((one.line, left, far**-2))
    rate, ridge = (RATE_ONTO, RIDGE_ONTO) if shipped else (RATE, RIDGE)
    table = dict(shipped)
    for model, entries in sorted(data.items()):
        columns = (np.array(column) for column in zip(*entries, strict=True))
        more = fitted(*columns, rate=rate, ridge=ridge)
        old = shipped.get(model, {})
        table[model] = {name: [*old.get(name, []), *added] for name, added in more.items()}
    return table


def corrected_us(one: Measured, every: Mapping[str, Correction]) -> float:
    """The expected time with its model's correction."""
    if one.model is None or one.line is None or one.model not in every:
        return one.expected_us
    factor = float(every[one.model].factors(one.line[None])[0])
    if one.of:
        if one.way is None or SHARING not in every:
            return math.inf
        factor *= float(every[SHARING].factors(one.way[None])[0])
    return one.expected_us * factor


def report(what: str, rows: Sequence[Row], table: Mapping[str, dict[str, Any]]) -> None:
    """Regret of the choice by corrected times."""
    every = {model: Correction.of(entry) for model, entry in table.items()}
    own, peer, ratio, before, errors = [], [], [], [], []
    for row in rows:
        times = []
        for one in row.measured:
            times.append(corrected_us(one, every))
            if one.line is not None and math.isfinite(times[-1]):
                errors.append(abs(np.log2(times[-1] / one.us)))
        chosen = row.measured[int(np.argmin(times))].us
        best = min(row.now_us, *(one.us for one in row.measured))
        own.append(chosen / best - 1)
        before.append(row.now_us / best - 1)
        peer.append(chosen / min(best, row.peer_us) - 1)
        ratio.append(row.peer_us / chosen)
    own.sort(), peer.sort(), before.sort()
    last = int(0.95 * len(own))
    print(
        f"{what:48} {len(rows):4} regret own {statistics.mean(own):.3f} p95 {own[last]:.3f}, "
        f"with peer {statistics.mean(peer):.3f} p95 {peer[last]:.3f}; before "
        f"{statistics.mean(before):.3f} p95 {before[last]:.3f}; geomean "
        f"{statistics.geometric_mean(ratio):.3f} <.95 {np.mean(np.array(ratio) < 0.95):.0%} "
        f"<.85 {np.mean(np.array(ratio) < 0.85):.0%}; error {np.mean(errors) if errors else 0:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--models", nargs="+", default=[], help="keep the others of the table")
    parser.add_argument("--onto", action="store_true", help="add to the trees of the table")
    given = parser.parse_args()
    rows = rows_of(given.rows, H200)
    fit, held = [[row for row in rows if row.held_out is out] for out in (False, True)]
    before = json.loads(TABLE.read_text(encoding="utf-8"))
    shipped = before["corrections"] if given.onto else {}
    table = corrections(fit, shipped)
    if given.models:
        table = before["corrections"] | {model: table[model] for model in given.models}
    for kind, operation in sorted({(row.kind, row.operation) for row in rows}):
        what = f"{kind} {operation}"
        learned, unseen = (
            [row for row in half if (row.kind, row.operation) == (kind, operation)]
            for half in (fit, held)
        )
        report(f"fitted, {what}", learned, table)
        report(f"held out, {what}", unseen, table)
        old = before["corrections"] if given.onto or given.models else {}
        report(f"  {'before' if old else 'without corrections'}, {what}", unseen, old)
    if not given.write:
        return
    layers: dict[str, Any] = {}
    for row in rows:
        best = min(row.measured, key=lambda one: one.us)
        if row.key is not None and row.kind != "rnd":
            layers[row.key] = [best.family, best.config]
    found = corrections(rows, shipped)
    if given.models:
        found = before["corrections"] | {model: found[model] for model in given.models}
    if given.models or given.onto:
        layers = before["layers"] | layers
    written = {
        "device": H200.name,
        "multiprocessors": H200.multiprocessors,
        "corrections": found,
        "layers": layers,
    }
    TABLE.write_text(json.dumps(written, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
