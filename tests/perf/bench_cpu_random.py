"""Random layers on the CPU beside PyTorch's CPU build, both in one thread.

For layers that nobody listed: forward passes, both gradients, poolings and their gradients, in both
layouts. Ours and PyTorch's take turns, and the least time of each counts: of the thread, not of the
clock, so that the machine may be busy. Prints a summary by kind, operation and layout.

    PYTHONPATH=build/peer python -m tests.perf.bench_cpu_random --seed 7 --count 300
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.server.malloc import keep_large_blocks
from tests.perf.bench_cpu import KEPT_BYTES
from tests.perf.bench_cpu_networks import fastest, show
from tests.perf.cpu_layers import Layer, Pair, convolution_pairs, pooling_pairs, transposed_pairs
from tests.perf.random_cpu_layers import KINDS, random_cpu_layers


def pairs_of(backend: CpuBackend, layer: Layer) -> Iterator[Pair]:
    for last in (False, True):
        if layer.kind in ("pool", "average"):
            yield from pooling_pairs(backend, layer, last)
        elif layer.transposed:
            yield from transposed_pairs(backend, layer, last)
        else:
            yield from convolution_pairs(backend, layer, last, forward=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--kinds", default="", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--ops", default="", help="operations whose names hold one of these")
    parser.add_argument("--seconds", type=float, default=0.08, help="for a pair of calls")
    parser.add_argument("--out", type=Path, help="a JSON line a pair")
    asked = parser.parse_args()
    backend = CpuBackend(threads=1)
    torch.set_num_threads(1)
    keep_large_blocks(KEPT_BYTES)
    kinds = {name for name in asked.kinds.split(",") if name}
    records: list[dict[str, Any]] = []
    for layer in random_cpu_layers(asked.seed, asked.count, kinds):
        for pair in pairs_of(backend, layer):
            if not any(name in pair.operation for name in asked.ops.split(",")):
                continue
            ours_s, peer_s, _ = fastest(pair, asked.seconds, time.thread_time, 0)
            records.append(
                {
                    "class": layer.kind,
                    "op": pair.operation,
                    "layout": pair.layout,
                    "layer": layer.name,
                    "ours_ms": ours_s * 1e3,
                    "peer_ms": peer_s * 1e3,
                }
            )
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    show(records)


if __name__ == "__main__":
    main()
