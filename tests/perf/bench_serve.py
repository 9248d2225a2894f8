"""Whole requests compared with the real Triton server: 64 MiB in and 4 MiB out, 1 KiB both ways.

Run by `make bench-serve`. Servers and client run on one machine, in the same run. The backend of
each server only sums its input and returns a ready result, so that the path of a request is what
is measured. Our server computes small CPU problems on the event loop; rows *by a worker* are for
all other problems, which includes everything that a GPU computes.

Measured twice: as each server is shipped (ours tunes malloc itself), and with malloc tuned by the
environment for every program, clients included. Prints a table, writes a line for each path to
`tests/perf/results/serve.jsonl`, and draws `docs/serve.svg`. Then, for docs/architecture.md, 1 KiB
over raw sockets: the libraries alone, ours and Triton, and ours without each of its shortcuts
(`tests/perf/results/serve_small.jsonl`; ``--only-small`` for these alone).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.perf.provenance import cpu_model, origin
from tests.perf.serve.plot import draw
from tests.perf.serve.servers import running
from tests.perf.serve.sizes import MALLOC, OPERATION, SIZES, Size
from tests.perf.serve.small import remaining, shortcut_rows

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "serve.jsonl"
SMALL_RESULTS = RESULTS.with_name("serve_small.jsonl")
PLOT = ROOT / "docs" / "serve.svg"
TRITON_VERSION = "2.51.0"
TUNINGS: Mapping[str, Mapping[str, str]] = {"as shipped": {}, "tuned": MALLOC}


# What each path of ours is held against: the fastest of these in the same run.
_MEMORY = ("shared memory over HTTP, tritonclient", "shared memory over gRPC, tritonclient")
PEERS: Mapping[str, tuple[str, ...]] = {
    "binary HTTP, SDK": ("Triton, HTTP, tritonclient",),
    "HTTP, tritonclient": ("Triton, HTTP, tritonclient",),
    "gRPC, tritonclient": ("Triton, gRPC, tritonclient",),
    "shared memory, SDK": tuple(f"Triton, {path}" for path in _MEMORY),
    "shared memory, SDK, with copies": tuple(f"Triton, {path}, with copies" for path in _MEMORY),
    **{path: (f"Triton, {path}",) for path in _MEMORY},
    **{
        f"{path}, by a worker": (f"Triton, {path}",)
        for path in ("HTTP, tritonclient", "gRPC, tritonclient", *_MEMORY)
    },
    **{f"{path}, with copies": (f"Triton, {path}, with copies",) for path in _MEMORY},
    "JSON, SDK": ("FastAPI, JSON, httpx",),
    "JSON, httpx": ("FastAPI, JSON, httpx",),
}


def records(size: Size, malloc: str, timed: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """A line for each path of ours, compared with its peer."""
    quartiles = {path: _quartiles_ms(seconds) for path, seconds in timed.items()}
    lines = []
    for path, peers in PEERS.items():
        found = [peer for peer in peers if peer in quartiles]
        if f"ours, {path}" not in quartiles or not found:
            continue
        peer = min(found, key=lambda each: quartiles[each][1])
        ours_ms, peer_ms = quartiles[f"ours, {path}"], quartiles[peer]
        lines.append(
            {
                "bench": "serve",
                "op": OPERATION,
                "dtype": "float32",
                "size": size.name,
                "input_bytes": size.input_bytes,
                "output_bytes": size.output_bytes,
                "malloc": malloc,
                "transport": path,
                "ours_ms": ours_ms[1],
                "ours_quartiles_ms": [ours_ms[0], ours_ms[2]],
                "peer": _shorter(peer) if len(peers) > 1 else peer,
                "peer_path": peer,
                "peer_ms": peer_ms[1],
                "peer_quartiles_ms": [peer_ms[0], peer_ms[2]],
                "samples": len(timed[peer]),
            }
        )
    return lines


def _shorter(peer: str) -> str:
    """Of a peer that was the faster of two, what both have in common."""
    return peer.replace(" over HTTP", "").replace(" over gRPC", "") + " (the faster way)"


def _quartiles_ms(seconds: list[float]) -> list[float]:
    return [round(each * 1e3, 4) for each in statistics.quantiles(seconds, n=4)]


def measured(
    size: Size, malloc: str, ports: tuple[int, ...], only: list[str]
) -> list[dict[str, Any]]:
    program = [sys.executable, "-m", "tests.perf.serve.paths", size.name, *map(str, ports)]
    done = subprocess.run(
        [*program, "--only", *only],
        env={**os.environ, **TUNINGS[malloc]},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    timed: dict[str, list[float]] = json.loads(done.stdout)
    show(size, malloc, timed)
    return records(size, malloc, timed)


def show(size: Size, malloc: str, timed: Mapping[str, list[float]]) -> None:
    print(f"{size.name} in, malloc {malloc}; ms: median [quartiles]")
    for path, seconds in timed.items():
        low, median, high = _quartiles_ms(seconds)
        print(f"  {path:60}{median:10.3f}  [{low:.3f} {high:.3f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("triton", type=Path, help="the environment that holds nvidia-pytriton")
    parser.add_argument("--size", choices=SIZES, help="this size alone; nothing is stored")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="paths with this in their name; nothing is stored"
    )
    parser.add_argument(
        "--only-small", action="store_true", help="what docs/architecture.md needs alone"
    )
    parser.add_argument("--rounds", type=int, default=160, help="of 20 small requests each way")
    parser.add_argument("--no-store", action="store_true", help="store nothing")
    given = parser.parse_args()
    sizes = [SIZES[given.size]] if given.size else list(SIZES.values())
    partial_run = given.no_store or bool(given.size) or given.only != [""]
    packages = ("numpy", "tritonclient", "httpx", "fastapi", "uvicorn", "grpcio")
    versions = {"triton": TRITON_VERSION, **{name: version(name) for name in packages}}
    stamp = origin(cpu_model(), versions)
    if not given.only_small:
        lines: list[dict[str, Any]] = []
        for malloc, environment in TUNINGS.items():
            logs = given.triton / "logs" / malloc.replace(" ", "_")
            with running(given.triton.resolve(), environment, logs) as ports:
                for size in sizes:
                    lines += measured(size, malloc, astuple(ports), given.only)
        if partial_run:
            return
        draw(stored(lines, stamp, RESULTS), PLOT)
    small = measured_small(given.triton, given.rounds)
    if not partial_run:
        stored(small, stamp, SMALL_RESULTS)


def measured_small(triton: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure requests of 1 KiB: beside the libraries alone, and without each shortcut."""
    logs = triton / "logs" / "small"
    with running(triton.resolve(), {}, logs) as ports:
        lines = remaining(ports, rounds, logs)
    for line in lines:
        print(f"  {line['server']:12}{line['transport']:8}{line['ms']:8.3f} ms", flush=True)
    for line in shortcut_rows(rounds, logs):
        lines.append(line)
        ratio = line["without_quartiles_ms"][0] / line["quartiles_ms"][0]
        print(f"  without {line['shortcut']:12}{line['form']:12}{ratio:6.2f}", flush=True)
    return lines


def stored(lines: list[dict[str, Any]], stamp: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Write lines with where they come from, and return them."""
    stamped = [line | stamp for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in stamped))
    return stamped


if __name__ == "__main__":
    main()
