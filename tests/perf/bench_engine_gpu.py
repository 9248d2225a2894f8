"""The whole server on a GPU: a large problem through shared memory, and through binary HTTP.

    python -m tests.perf.bench_engine_gpu

One layer's bwd_data (ck_headline: 85 MB up, 165 MB down), real front ends, hub and worker, 4 calls
in flight: through shared memory (and one alone), with tensors and results that the server keeps,
and in CUDA shared memory; then binary HTTP with 1, 2 and 4 front-end processes, 4 calls for each.
Every answer that is looked at must be the same to the bit. Prints a table and writes
`tests/perf/results/engine_gpu.jsonl`: ``ours_ms`` is the time between two answers, ``peer_ms`` the
time that the longer way over PCIe takes alone, by page-locked copies in both directions at once
that were measured in this run; over HTTP the time that as many bare loopback connections as front
ends take for the same bytes, in this run too. ``cpu`` is what one answer cost each process. Needs a
GPU, CuPy and tritonclient.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from tests.perf.serve.bare import bare_between_s
from tests.perf.serve.gpu_server import Loaded, Way, gpu_origin, loaded, serving
from tests.perf.serve.load import layer_named, shapes_of

RESULTS = Path(__file__).parent / "results" / "engine_gpu.jsonl"
# What one front-end process is asked for, and by how many client processes.
CALLS_A_FRONT_END, CLIENTS_A_FRONT_END = 4, 2
# That bare connections are loaded for.
BARE_S = 2.0


def ways(front_ends: int) -> list[Way]:
    """What is measured of a server with so many front ends."""
    clients = CLIENTS_A_FRONT_END * front_ends
    threads = CALLS_A_FRONT_END // CLIENTS_A_FRONT_END
    found = [Way("binary HTTP, SDK", "http", front_ends, clients, threads)]
    if front_ends == 1:
        # One at a time too: how long one answer takes, its upload, kernels and download included.
        found[:0] = [
            Way("shared memory, SDK", "shm", 1, 1, 4),
            Way("shared memory, SDK", "shm", 1, 1, 1),
            Way("stored tensors, SDK", "stored", 1, 1, 4),
            Way("CUDA shared memory, tritonclient", "cuda", 1, 1, 4),
        ]
    return found


def bytes_of(layer: dict[str, Any]) -> tuple[int, int]:
    """What goes up for an answer, and what comes down."""
    moved = {name: 2 * math.prod(shape) for name, shape in shapes_of(layer).items()}
    return moved["grad_output"] + moved["weight"], moved["grad_input"]


def record(
    way: Way, found: Loaded, layer: dict[str, Any], down_gb_per_s: float, bare_s: float
) -> dict[str, Any]:
    """A line of the results."""
    up_bytes, down_bytes = bytes_of(layer)
    if way.transport == "http":
        peer, peer_s = "as many bare loopback connections, in this run", bare_s
    else:
        peer = "page-locked copies over PCIe, both ways at once, in this run"
        peer_s = down_bytes / down_gb_per_s / 1e9
    spent_s = [seconds for _, seconds in found.times]
    between_s = found.between_s
    return {
        "bench": "engine_gpu",
        "op": "conv_bwd_data",
        "layer": layer["name"],
        "class": layer["class"],
        "dtype": "bfloat16",
        "layout": "NHWC",
        "transport": way.name,
        "front_ends": way.front_ends,
        "in_flight": way.in_flight,
        "up_bytes": up_bytes,
        "down_bytes": down_bytes,
        "ours_ms": round(between_s * 1e3, 4),
        "latency_quartiles_ms": [round(q * 1e3, 3) for q in statistics.quantiles(spent_s, n=4)],
        "up_gb_per_s": round(up_bytes / between_s / 1e9, 2),
        "down_gb_per_s": round(down_bytes / between_s / 1e9, 2),
        "peer": peer,
        "peer_ms": round(peer_s * 1e3, 4),
        "pcie_down_gb_per_s": round(down_gb_per_s, 2),
        "reference_ms": round(down_bytes / 55e9 * 1e3, 4),
        "samples": len(found.times),
        "cpu": found.costs,
    }


def pcie_gb_per_s() -> tuple[float, float]:
    """Page-locked copies up and down at the same time, in GB/s each."""
    import cupy

    size, turns = 256 * 2**20, 12
    up, down = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    host = [cupy.cuda.alloc_pinned_memory(size) for _ in range(2)]
    device = [cupy.empty(size, cupy.uint8) for _ in range(2)]
    marks = {stream: (cupy.cuda.Event(), cupy.cuda.Event()) for stream in (up, down)}
    for _ in range(2):  # the second time counts
        for begin, _ in marks.values():
            begin.record(up if begin is marks[up][0] else down)
        for _ in range(turns):
            device[0].data.copy_from_host_async(host[0].ptr, size, up)
            device[1].data.copy_to_host_async(host[1].ptr, size, down)
        for stream, (_, end) in marks.items():
            end.record(stream)
        for stream in marks:
            stream.synchronize()
    rates = [
        turns * size / cupy.cuda.get_elapsed_time(*marks[stream]) / 1e6 for stream in (up, down)
    ]
    return rates[0], rates[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layer", default="ck_headline")
    parser.add_argument("--batch", type=int, help="another batch; nothing is stored")
    parser.add_argument("--backend", default="cuda", help="cpu tries the script; nothing is stored")
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", default="", help="ways with this in their name")
    parser.add_argument("--seconds", type=float, default=3.0, help="that each way is loaded for")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    layer = layer_named(given.layer, given.batch)
    real = given.backend == "cuda"
    up, down = pcie_gb_per_s() if real else (55.0, 55.0)
    print(f"PCIe, both ways at once: {up:.1f} GB/s up, {down:.1f} GB/s down", flush=True)
    lines: list[dict[str, Any]] = []
    sums: set[int] = set()
    for front_ends in given.front_ends:
        chosen = [way for way in ways(front_ends) if given.only in way.name]
        if not chosen:
            continue
        environment = {
            "CONVGRAD_BACKEND": given.backend,
            "CONVGRAD_HTTP_WORKERS": str(front_ends),
            "CUDA_VISIBLE_DEVICES": "0",
        }
        bare_s = bare_between_s(*bytes_of(layer), front_ends, BARE_S)
        with serving(environment) as server:
            for way in chosen:
                found = loaded(server, way, given.layer, batch=given.batch, seconds=given.seconds)
                sums |= found.sums
                lines.append(record(way, found, layer, down, bare_s))
                _show(lines[-1], found.said)
    if len(sums) != 1:
        raise SystemExit(f"answers differ: {len(sums)} checksums")
    if not real or given.batch:
        return
    stamp = gpu_origin(given.git_sha)
    given.out.write_text("".join(json.dumps(line | stamp) + "\n" for line in lines))


def _show(line: dict[str, Any], said: str) -> None:
    low, median, high = line["latency_quartiles_ms"]
    print(
        f"{line['transport']:33}{line['front_ends']} front ends {line['in_flight']:2} in flight: "
        f"{line['ours_ms']:8.3f} ms an answer ({line['samples']} answers, each "
        f"{median:.1f} ms [{low:.1f} {high:.1f}]), up {line['up_gb_per_s']} GB/s, "
        f"down {line['down_gb_per_s']} GB/s; that way alone {line['peer_ms']} ms, "
        f"{line['peer_ms'] / line['ours_ms']:.0%}; CPU ms for each: {said}",
        flush=True,
    )


if __name__ == "__main__":
    main()
