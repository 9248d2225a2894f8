"""The whole way of a request, beside the real Triton server: 64 MiB in and 4 MiB out, 1 KiB both.

Run by `make bench-serve`. Servers and client are on one machine and in one run, behind each a
backend that only sums its input and returns a ready result, so that the way is what is measured.
Twice: as each server is shipped (ours tunes malloc itself), and with malloc tuned by the
environment for every program, the clients too. Prints a table, writes
`tests/perf/results/serve.jsonl`, a line for each path, and draws `docs/serve.svg`.
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
from tests.perf.serve.servers import running
from tests.perf.serve.sizes import MALLOC, OPERATION, SIZES, Size

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "serve.jsonl"
TRITON_VERSION = "2.51.0"
TUNINGS: Mapping[str, Mapping[str, str]] = {"as shipped": {}, "tuned": MALLOC}


def record(size: Size, malloc: str, path: str, seconds: list[float]) -> dict[str, Any]:
    server, _, transport = path.partition(", ")
    low_s, median_s, high_s = statistics.quantiles(seconds, n=4)
    return {
        "bench": "serve",
        "op": OPERATION,
        "dtype": "float32",
        "size": size.name,
        "input_bytes": size.input_bytes,
        "output_bytes": size.output_bytes,
        "malloc": malloc,
        "server": server,
        "transport": transport,
        "ms": round(median_s * 1e3, 4),
        "low_quartile_ms": round(low_s * 1e3, 4),
        "high_quartile_ms": round(high_s * 1e3, 4),
        "samples": len(seconds),
    }


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
    return [record(size, malloc, path, seconds) for path, seconds in timed.items()]


def show(records: list[dict[str, Any]]) -> None:
    print(f"{'ms: median [quartiles]':52}" + "".join(f"{name:>26}" for name in TUNINGS))
    for size in SIZES:
        print(f"{size} in")
        rows = [row for row in records if row["size"] == size]
        for path in dict.fromkeys((row["server"], row["transport"]) for row in rows):
            cells = [
                f"{row['ms']:.3f} [{row['low_quartile_ms']:.3f} {row['high_quartile_ms']:.3f}]"
                for row in rows
                if (row["server"], row["transport"]) == path
            ]
            print(f"  {', '.join(path):50}" + "".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("triton", type=Path, help="the environment that holds nvidia-pytriton")
    parser.add_argument("--size", choices=SIZES, help="this size alone; nothing is stored")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="paths with this in their name; nothing is stored"
    )
    arguments = parser.parse_args()
    sizes = [SIZES[arguments.size]] if arguments.size else list(SIZES.values())
    records: list[dict[str, Any]] = []
    for malloc, environment in TUNINGS.items():
        logs = arguments.triton / "logs" / malloc.replace(" ", "_")
        with running(arguments.triton.resolve(), environment, logs) as ports:
            for size in sizes:
                records += measured(size, malloc, astuple(ports), arguments.only)
    show(records)
    if arguments.size or arguments.only != [""]:
        return
    packages = ("numpy", "tritonclient", "httpx", "fastapi", "uvicorn", "grpcio")
    versions = {"triton": TRITON_VERSION, **{name: version(name) for name in packages}}
    stamp = origin(cpu_model(), versions)
    RESULTS.write_text("".join(json.dumps(row | stamp) + "\n" for row in records))


if __name__ == "__main__":
    main()
