"""CPU kernels compared with PyTorch's CPU build on the CPU backend's target layers, in one process.

Run by `make bench-cpu`. Prints a table for each class of operation and writes
`tests/perf/results/cpu.jsonl`, a line for each layer, operation and layout, in place of the run
before. Ours is what a request pays, `CpuBackend.run`, with its output's allocation; PyTorch's is
the operator of its autograd, on the same values. The two take turns of a few samples, after a
pause and one run that does not count; the medians count. Both run on all cores. Everything is
measured twice, since outputs are fresh memory each time: with malloc as glibc brings it, and as
`convgrad serve` sets it, for both sides alike. Wants an idle machine: on a busy one PyTorch's
spinning threads keep their cores, and ours, which sleep between requests, wait for one.

PyTorch's channels_last is measured as NHWC. In 1D it has no such format, so there the layer is
given to it as 2D of height 1.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.server.malloc import keep_large_blocks
from tests.perf.cpu_layers import LAYERS, Pair, pairs
from tests.perf.provenance import cpu_model, origin

try:
    import torch
except ImportError:
    sys.exit("bench-cpu compares with PyTorch: run `make bench-cpu`, or install torch (CPU build)")

RESULTS = Path(__file__).parent / "results" / "cpu.jsonl"
SAMPLES = 25
SECONDS = 0.5
A_TURN = 5
# OpenMP's threads spin for a while after a region, and would hold a core during the other's turn.
PAUSE_S = 0.02
KEPT_BYTES = 1 << 30


def measured(pair: Pair, malloc: str) -> dict[str, Any]:
    """Medians of both, taking turns."""
    runs = {"ours": pair.ours, "peer": pair.peer}
    timed: dict[str, list[float]] = {name: [] for name in runs}
    began_s = time.perf_counter()
    while len(timed["ours"]) < SAMPLES or time.perf_counter() - began_s < SECONDS:
        order = list(runs.items())
        for name, run in order if len(timed["ours"]) % 2 else reversed(order):
            time.sleep(PAUSE_S)
            run()
            for _ in range(A_TURN):
                start_s = time.perf_counter()
                result = run()
                timed[name].append(time.perf_counter() - start_s)
                del result
    ours_s, peer_s = (statistics.median(timed[name]) for name in ("ours", "peer"))
    return record_of(pair, ours_s, peer_s, len(timed["ours"]), "cpu", malloc)


def record_of(
    pair: Pair, ours_s: float, peer_s: float, samples: int, bench: str, malloc: str
) -> dict[str, Any]:
    """A line of the results."""
    pool = pair.layer.kind == "pool"
    return {
        "bench": bench,
        "op": pair.operation,
        "layer": pair.layer.name,
        "class": pair.layer.kind,
        "batch": pair.layer.batch,
        "dtype": "float32",
        "layout": pair.layout,
        "malloc": malloc,
        "ours_ms": round(ours_s * 1e3, 4),
        "peer": f"PyTorch {torch.__version__}",
        "peer_ms": round(peer_s * 1e3, 4),
        "reference_ms": None,
        "gflop_per_s": None if pool else round(pair.layer.flops / ours_s / 1e9, 1),
        "samples": samples,
    }


def provenance(backend: CpuBackend) -> dict[str, Any]:
    """What every record says of where it comes from."""
    device = backend.device
    return origin(
        f"{cpu_model()}, {device.threads} cores, {device.level}",
        {"numpy": np.__version__, "torch": torch.__version__},
    )


def geomean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def show(records: list[dict[str, Any]], malloc: str) -> None:
    """A table for each operation; the ratio is PyTorch's time over ours."""
    records = [record for record in records if record["malloc"] == malloc]
    for operation in dict.fromkeys(record["op"] for record in records):
        print(f"\n{operation}: ms, float32, malloc {malloc}")
        print(
            f"{'':22}{'NCHW':>9}{'PyTorch':>9}{'ratio':>7}   {'NHWC':>9}{'PyTorch':>9}{'ratio':>7}"
            f"   {'best/best':>9}"
        )
        ratios: dict[str, list[float]] = {"first": [], "last": [], "best": []}
        mine = [record for record in records if record["op"] == operation]
        for layer in dict.fromkeys(record["layer"] for record in mine):
            first, last = (record for record in mine if record["layer"] == layer)
            best = min(first["peer_ms"], last["peer_ms"]) / min(first["ours_ms"], last["ours_ms"])
            ratios["first"].append(first["peer_ms"] / first["ours_ms"])
            ratios["last"].append(last["peer_ms"] / last["ours_ms"])
            ratios["best"].append(best)
            print(
                f"{layer:22}{first['ours_ms']:9.3f}{first['peer_ms']:9.3f}"
                f"{ratios['first'][-1]:7.2f}   {last['ours_ms']:9.3f}{last['peer_ms']:9.3f}"
                f"{ratios['last'][-1]:7.2f}   {best:9.2f}"
            )
        means = {name: geomean(values) for name, values in ratios.items()}
        print(
            f"{'geomean':22}{'':18}{means['first']:7.2f}   {'':18}{means['last']:7.2f}"
            f"   {means['best']:9.2f}"
        )


def main() -> None:
    backend = CpuBackend()
    torch.set_num_threads(backend.device.threads)
    only = sys.argv[1:]
    records: list[dict[str, Any]] = []
    for malloc in ("default", "served"):
        if malloc == "served" and not keep_large_blocks(KEPT_BYTES):
            print("this libc's malloc has no such settings: measured as it is, alone")
            break
        records += [
            measured(pair, malloc)
            for layer in LAYERS
            if not only or layer.kind in only
            for pair in pairs(backend, layer)
        ]
        show(records, malloc)
    if only:
        return  # a part of the layers is for looking at, not for keeping
    origin = provenance(backend)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(record | origin) + "\n" for record in records))


if __name__ == "__main__":
    main()
