"""What the kernels of an image take: an estimate from a sample of each source's.

    python -m tests.perf.image_size [--arch sm_90a ...]

Compiles the sample one by one and writes a line for each architecture to
tests/perf/results/image_size.jsonl: how many kernels there are, the CPU time of all, and their
size, also compressed as layers of images are. Compiling all of them takes hours of CPU time (`make
compile-all`). Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import Nvrtc, find_nvrtc
from convgrad_service.plans.cuda.device import ARCHITECTURES
from convgrad_service.plans.cuda.program import Instance
from tests.perf.provenance import cpu_model, origin
from tests.perf.records import records, source

# The kernels of a source that one of the sample stands for, at most.
PER_SAMPLE = 60
COLUMNS = ("kernels", "sampled", "cpu_s", "bytes", "compressed_bytes")
RESULTS = Path(__file__).resolve().parent / "results" / "image_size.jsonl"


def cpu_s() -> float:
    """The CPU time of this thread's child, which compiles one kernel after another."""
    (child,) = Path("/proc/thread-self/children").read_text().split()
    stat = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def sampled(architecture: str) -> Iterator[tuple[float, list[Instance]]]:
    """Yield some instances of each source, and how many each stands for."""
    by_source: dict[str, list[Instance]] = {}
    for one in FAMILIES.instances():
        if one.is_for(architecture):
            by_source.setdefault(one.source, []).append(one)
    for name, own in by_source.items():
        some = random.Random(f"{name} {architecture}").sample(own, -(-len(own) // PER_SAMPLE))
        yield len(own) / len(some), some


def estimate(nvrtc: Nvrtc, architecture: str) -> dict[str, Any]:
    compiler = Compiler(nvrtc, architecture, cache=None, jobs=1, ahead=1)
    totals = dict.fromkeys(COLUMNS, 0.0)
    for stands_for, instances in sampled(architecture):
        for instance in instances:
            began_s = cpu_s()
            code = compiler.compile(instance).code
            totals["sampled"] += 1
            totals["kernels"] += stands_for
            totals["cpu_s"] += stands_for * (cpu_s() - began_s)
            totals["bytes"] += stands_for * len(code)
            totals["compressed_bytes"] += stands_for * len(zlib.compress(code))
    compiler.close()
    return {"bench": "image_size", "architecture": architecture} | {
        name: round(total) for name, total in totals.items()
    }


def image_table() -> str:
    """The kernels of each architecture, and of all."""
    rows = records("image_size")
    whole = {name: sum(row[name] for row in rows) for name in rows[0] if name in COLUMNS}
    lines = [
        f"| {row['architecture']} | {row['kernels']:,} | {row['cpu_s'] / 60:.0f} min | "
        f"{row['bytes'] / 2**20:.0f} MiB | {row['compressed_bytes'] / 2**20:.0f} MiB |"
        for row in [*rows, {"architecture": "all", **whole}]
    ]
    heads = "| architecture | kernels | CPU time to compile | size | compressed |"
    behind = (
        f"Extrapolated from {whole['sampled']} kernels, some of every source: "
        f"{source(rows, 'python -m tests.perf.image_size', rows[0]['git_sha'][:7])}."
    )
    return "\n".join([heads, "| --- |" + " ---: |" * 4, *lines, "", behind])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # else NVRTC finds the kernels that it has compiled
    where = origin(cpu_model(), {"nvrtc": ".".join(map(str, nvrtc.version))})
    rows = []
    for architecture in given.arch:
        rows.append({**estimate(nvrtc, architecture), **where})
        print(rows[-1], flush=True)
    RESULTS.write_text("".join(f"{json.dumps(one)}\n" for one in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
