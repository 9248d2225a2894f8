"""Fits the corrections of the dense cost models, and the table of tuned layers, to measurements.

    python -m tests.perf.fit_dense ROWS.jsonl [--write]

Rows are those of `tests/perf/sweep_dense.py`: every family's configurations on many layers, beside
cuDNN. First half of the layers is held out, and the regret of the choice on it is reported: the
chosen configuration's time over the best measured one's, of all families, with and without
cuDNN's. ``--write`` then fits to all layers and writes `backends/cuda/tuning/hopper.json`.

A correction is an ensemble of oblivious trees (`backends/cuda/tuning/correction.py`), fitted by
gradient boosting to the logarithm of measured over expected time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv import (
    hopper_gather_plan,
    hopper_weight_model,
    implicit_gemm_model,
    pointwise_gemm_model,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import reachable
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import gathering, gemm_of
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import Config as GemmConfig
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import Tile
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import products_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axis
from convgrad_service.backends.cuda.tuning.correction import TABLE, Correction
from convgrad_service.backends.cuda.tuning.features import NAMES
from convgrad_service.backends.cuda.tuning.tuned import key_of
from convgrad_service.plans.cuda.assembly import conv_work
from convgrad_service.plans.cuda.device import H200, CudaDevice
from convgrad_service.plans.cuda.works import ConvWork
from tests.perf.gpu_layers import problem_of

BUFFERS = {
    "conv_bwd_data": ("bwd_data", "grad_input", "weight", "grad_output"),
    "grouped_conv_bwd_weight": ("bwd_weight", "input", "grad_weight", "grad_output"),
}
LEVELS, TREES, RATE, RIDGE, THRESHOLDS = 3, 80, 0.25, 4.0, 20
# Configurations that take longer than so many times the best count less.
NEAR = 1.15
CHUNK = 8


@dataclass(frozen=True)
class Measured:
    """One configuration on one layer: its model, features, expected and measured microseconds."""

    model: str | None
    family: str
    config: str
    line: NDArray[np.float64] | None
    expected_us: float
    us: float


@dataclass(frozen=True)
class Row:
    """One layer."""

    key: str | None
    layer: str
    kind: str
    peer_us: float
    now_us: float
    measured: tuple[Measured, ...]

    @property
    def held_out(self) -> bool:
        """By the layer without its batch and operation, so that no half knows the other's."""
        return zlib.crc32(self.layer.encode()) % 2 == 1


def work_of(row: Mapping[str, Any]) -> ConvWork:
    """The row's layer as the planner sees it."""
    layer = {
        "N": row["N"],
        "C": row["C"],
        "K": row["K"],
        "groups": 1,
        "kind": "conv",
        "ndim": len(row["size"]),
        "input_size": row["size"],
        "output_size": row["out"],
        "kernel_size": row["k"],
        "stride": row["s"],
        "padding": row["pad"],
        "dilation": row["d"],
        "name": row["layer"],
        "class": "dense",
    }
    problem: Any = problem_of(layer, "bfloat16", "NHWC", row["op"])
    return conv_work(problem, *BUFFERS[row["op"]])


def measured_of(
    work: ConvWork, device: CudaDevice, entries: Sequence[Sequence[Any]]
) -> Iterator[Measured]:
    """A row's configurations with their features."""
    odd = work.in_channels % CHUNK or work.out_channels % CHUNK
    products = None
    cuts = None
    axes = [gather_axis(gathering(work), dim) for dim in range(3)]
    for family, _, config, expected_us, us in entries:
        if us is None:
            continue
        model, name, line, s = None, "", None, None
        if expected_us is not None:
            s = expected_us * 1e-6
        if family == "pointwise_gemm":
            given = dict(config)
            swapped = given.pop("swapped")
            if given.pop("in_turns", False):
                continue
            one = Config(**given)
            products = products or products_of(work)
            product = products[swapped and len(products) > 1]
            wgrad = product.a.mn
            model = f"pointwise_gemm_{'weight' if wgrad else 'gather'}"
            name = f"{one}" + "_swapped" * swapped
            line = pointwise_gemm_model.line_of(product, device, one, s)
        elif family == "implicit_gemm":
            tiles = GemmConfig(Tile(**config["tile"]), config["cluster"], config["workspace"])
            gemm = gemm_of(work, axes)
            model = f"implicit_gemm_{'weight' if gemm.weight else 'gather'}"
            name = str(tiles)
            line = implicit_gemm_model.lines(gemm, work.dtype, device, [(s, tiles)])[0]
        elif family == "hopper_gather":
            tile = HopperTile(**config["tile"])
            schedule = hopper_gather_plan.Schedule(tile, config["images_first"], config["rounds"])
            s = hopper_gather_plan.launch_s(s)
            model, name = family, str(schedule)
            line = hopper_gather_plan.lines(work, axes, device, [(s, schedule)])[0]
        elif family == "hopper_weight":
            cuts = cuts or {str(cut): cut for cut in reachable(work, device)}
            name = config["cut"] + (f"+{config['whole']}" if config["whole"] else "")
            s = hopper_weight_model.launch_s(s)
            model = family
            line = hopper_weight_model.lines(work, device, [(s, cuts[name])])[0]
        elif family in ("dense_gather", "dense_weight"):
            continue
        yield Measured(None if odd else model, family, name, line, (s or 0) * 1e6, us)


def rows_of(path: Path, device: CudaDevice) -> list[Row]:
    """All layers of a sweep."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        if not row.get("cands"):
            continue
        work = work_of(row)
        every = tuple(measured_of(work, device, row["cands"]))
        if every:
            found.append(
                Row(key_of(work), row["layer"], row["kind"], row["peer"], row["us"], every)
            )
    return found


def fitted(
    lines: NDArray[np.float64], wanted: NDArray[np.float64], weight: NDArray[np.float64]
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
                gain = float((total**2 / (count + RIDGE)).sum())
                if gain > best_gain:
                    best, best_gain = index, gain
            leaf += bits[best] << level
            chosen.append(cuts[best])
        total = np.bincount(leaf, weight * left, 1 << LEVELS)
        count = np.bincount(leaf, weight, 1 << LEVELS)
        values = np.round(RATE * total / (count + RIDGE), 4)
        left -= values[leaf]
        table["features"].append([NAMES[index] for index, _ in chosen])
        table["thresholds"].append([cut for _, cut in chosen])
        table["leaves"].append(values.tolist())
    return table


def corrections(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The entries of all models."""
    data: dict[str, list[tuple[Any, float, float]]] = {}
    for row in rows:
        best = min(one.us for one in row.measured)
        for one in row.measured:
            if one.model is not None and one.line is not None:
                far = max(1.0, min(one.us, one.expected_us) / best / NEAR)
                entry = one.line, float(np.log2(one.us / one.expected_us)), far**-2
                data.setdefault(one.model, []).append(entry)
    return {
        model: fitted(*(np.array(column) for column in zip(*entries, strict=True)))
        for model, entries in sorted(data.items())
    }


def report(what: str, rows: Sequence[Row], table: Mapping[str, dict[str, Any]]) -> None:
    """Regret of the choice by corrected times."""
    every = {model: Correction.of(entry) for model, entry in table.items()}
    own, peer, ratio, before, errors = [], [], [], [], []
    for row in rows:
        times = []
        for one in row.measured:
            time = one.expected_us or 1e9
            if one.model in every and one.line is not None:
                time *= float(every[one.model].factors(one.line[None])[0])
                errors.append(abs(np.log2(time / one.us)))
            times.append(time)
        chosen = row.measured[int(np.argmin(times))].us
        best = min(row.now_us, *(one.us for one in row.measured))
        own.append(chosen / best - 1)
        before.append(row.now_us / best - 1)
        peer.append(chosen / min(best, row.peer_us) - 1)
        ratio.append(row.peer_us / chosen)
    own.sort(), peer.sort(), before.sort()
    last = int(0.95 * len(own))
    print(
        f"{what:34} {len(rows):4} regret own {statistics.mean(own):.3f} p95 {own[last]:.3f}, "
        f"with peer {statistics.mean(peer):.3f} p95 {peer[last]:.3f}; before "
        f"{statistics.mean(before):.3f} p95 {before[last]:.3f}; geomean "
        f"{statistics.geometric_mean(ratio):.3f} <.95 {np.mean(np.array(ratio) < 0.95):.0%} "
        f"<.85 {np.mean(np.array(ratio) < 0.85):.0%}; error {np.mean(errors) if errors else 0:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    rows = rows_of(given.rows, H200)
    fit, held = [[row for row in rows if row.held_out is out] for out in (False, True)]
    table = corrections(fit)
    for kind in sorted({row.kind for row in rows}):
        report(f"fitted, {kind}", [row for row in fit if row.kind == kind], table)
        report(f"held out, {kind}", [row for row in held if row.kind == kind], table)
        report(f"  without corrections, {kind}", [row for row in held if row.kind == kind], {})
    if not given.write:
        return
    layers = {}
    for row in rows:
        best = min(row.measured, key=lambda one: one.us)
        if row.key is not None and row.kind != "rnd":
            layers[row.key] = [best.family, best.config]
    shipped = {
        "device": H200.name,
        "multiprocessors": H200.multiprocessors,
        "corrections": corrections(rows),
        "layers": layers,
    }
    TABLE.write_text(json.dumps(shipped, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
