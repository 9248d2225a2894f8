"""Every convolution of whole networks on the CPU compared with PyTorch's CPU build, at batch 4.

Run by `make bench-cpu`, after the layers of `bench_cpu`, whose pairs of calls these are as well.
Prints a line a layer as it goes, and a summary by class, operation and layout; writes
`tests/perf/results/cpu_networks.jsonl`, a line for each layer of `suite/networks.json`, operation
and layout, in place of an older run's. Ours and PyTorch's take turns of a few runs each, and the
least time of each counts: it is what the kernels take where nothing disturbs them. Malloc is as
`convgrad serve` sets it, for both sides alike.

    python -m tests.perf.bench_cpu_networks --classes depthwise,first --threads 1 --every 3
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.server.malloc import keep_large_blocks
from tests.perf.bench_cpu import A_TURN, KEPT_BYTES, PAUSE_S, geomean, provenance, record_of
from tests.perf.cpu_layers import Layer, Pair, pairs

SUITE = Path(__file__).parent / "suite" / "networks.json"
RESULTS = Path(__file__).parent / "results" / "cpu_networks.jsonl"
BATCH = 4
LEAST_TURNS = 3
CLASS, OPERATION, LAYOUT = "class", "op", "layout"


def layers(classes: set[str], every: int, path: Path = SUITE) -> Iterator[Layer]:
    """A suite's layers of some classes, or of all where there are none, each ``every``-th."""
    suite = json.loads(path.read_text())
    for row in [row for row in suite if not classes or row["class"] in classes][::every]:
        yield Layer(
            name=row["name"],
            kind=row["class"],
            size=tuple(row["input_size"]),
            in_channels=row["C"],
            out_channels=row["K"],
            kernel=tuple(row["kernel_size"]),
            stride=tuple(row["stride"]),
            padding=tuple(row["padding"]),
            dilation=tuple(row["dilation"]),
            groups=row["groups"],
            batch=BATCH,
        )


def fastest(
    pair: Pair,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    pause_s: float = PAUSE_S,
) -> tuple[float, float, int]:
    """The least times of both in seconds, taking turns for ``seconds``, and the samples of each.

    A turn is fewer runs of what takes long.
    """
    runs = pair.ours, pair.peer
    least = [math.inf, math.inf]
    began_s = clock()
    for run in runs:
        run()
    a_turn = max(1, min(A_TURN, round(seconds / 2 / (clock() - began_s))))
    samples = 0
    began_s = time.perf_counter()
    while samples < LEAST_TURNS * a_turn or time.perf_counter() - began_s < seconds:
        for i, run in enumerate(runs):
            time.sleep(pause_s)
            for _ in range(a_turn):
                start_s = clock()
                result = run()
                least[i] = min(least[i], clock() - start_s)
                del result
        samples += a_turn
        if time.perf_counter() - began_s > 4 * seconds:
            break
    return least[0], least[1], samples


def show(records: list[dict[str, Any]]) -> None:
    """Geometric means of the peer's time over ours, and the layers with the smallest ratios."""
    print(f"\n{'':42}{'layers':>7}{'geomean':>9}{'< 0.7':>7}  lowest")
    ways = sorted({(row[CLASS], row[OPERATION], row[LAYOUT][-1] == "C") for row in records})
    for kind, operation, last in ways:
        of_way = (kind, operation, last)
        ratios = [
            (row["peer_ms"] / row["ours_ms"], row["layer"])
            for row in records
            if (row[CLASS], row[OPERATION], row[LAYOUT][-1] == "C") == of_way
        ]
        label = f"{kind} {operation} {'channels last' if last else 'channels first'}"
        slow = sum(ratio < 0.7 for ratio, _ in ratios)
        lowest, layer = min(ratios)
        mean = geomean([ratio for ratio, _ in ratios])
        print(f"{label:52}{len(ratios):3}{mean:9.2f}{slow:7}  {lowest:.2f} {layer}")


def store(rows: list[dict[str, Any]]) -> None:
    """In place of older rows of the same layers."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    kept = {key_of(row): row for row in [*map(json.loads, lines), *rows]}
    text = "".join(json.dumps(row) + "\n" for row in kept.values())
    RESULTS.write_text(text, encoding="utf-8")


def key_of(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["layer"], row[OPERATION], row[LAYOUT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--classes", default="", help="some of dense,depthwise,first,grouped")
    parser.add_argument("--every", type=int, default=1, help="each so-manyth layer alone")
    parser.add_argument("--suite", type=Path, default=SUITE, help="others are not stored")
    parser.add_argument("--threads", type=int, help="of either side (all cores)")
    parser.add_argument("--seconds", type=float, default=0.25, help="for a pair of calls")
    asked = parser.parse_args()
    backend = CpuBackend(threads=asked.threads)
    torch.set_num_threads(backend.device.threads)
    keep_large_blocks(KEPT_BYTES)
    classes = {name for name in asked.classes.split(",") if name}
    records = []
    for layer in layers(classes, asked.every, asked.suite):
        for pair in pairs(backend, layer):
            row = record_of(pair, *fastest(pair, asked.seconds), "cpu_networks", "served")
            records.append(row)
            ratio = row["peer_ms"] / row["ours_ms"]
            print(
                f"{layer.name:40}{layer.kind:10}{pair.operation:24}{pair.layout:6}"
                f"{row['ours_ms']:9.3f}{row['peer_ms']:9.3f}{ratio:7.2f}",
                flush=True,
            )
    show(records)
    if asked.threads is None and asked.suite == SUITE:
        store([record | provenance(backend) for record in records])


if __name__ == "__main__":
    main()
