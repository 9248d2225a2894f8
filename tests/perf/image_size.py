"""What the kernels of an image take: an estimate from a random sample of each architecture's.

    python -m tests.perf.image_size [--sample 20] [--arch sm_90a ...]

Compiles the sample one by one and writes a line for each architecture to
tests/perf/results/image_size.jsonl: the mean CPU time and size of a kernel, also compressed as
layers of images are, each with its standard error, and how many kernels there are. Compiling all of
them takes hours of CPU time (`make compile-all`). Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import Nvrtc, find_nvrtc
from convgrad_service.plans.cuda.device import ARCHITECTURES
from tests.perf.provenance import cpu_model, origin

RESULTS = Path(__file__).resolve().parent / "results" / "image_size.jsonl"


def cpu_s() -> float:
    """The CPU time of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mean(values: Sequence[float]) -> list[float]:
    """The mean and its standard error."""
    return [statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5]


def estimates(nvrtc: Nvrtc, architectures: Sequence[str], sample: int) -> Iterator[dict[str, Any]]:
    for architecture in architectures:
        instances = [one for one in FAMILIES.instances() if one.is_for(architecture)]
        compiler = Compiler(nvrtc, architecture, cache=None, jobs=1)
        times_s, sizes, compressed = [], [], []
        for instance in random.Random(architecture).sample(instances, sample):
            began_s = cpu_s()
            code = compiler.compile(instance).code
            times_s.append(cpu_s() - began_s)
            sizes.append(len(code))
            compressed.append(len(zlib.compress(code)))
        compiler.close()
        yield {
            "bench": "image_size",
            "architecture": architecture,
            "kernels": len(instances),
            "sampled": sample,
            "cpu_s": mean(times_s),
            "bytes": mean(sizes),
            "compressed_bytes": mean(compressed),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=20, help="kernels of an architecture")
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    given = parser.parse_args()
    nvrtc = find_nvrtc()
    where = origin(cpu_model(), {"nvrtc": ".".join(map(str, nvrtc.version))})
    rows = []
    for row in estimates(nvrtc, given.arch, given.sample):
        rows.append({**row, **where})
        count = row["kernels"]
        hours = [count * value / 3600 for value in row["cpu_s"]]
        whole, packed = (
            [count * value / 1e6 for value in row[name]] for name in ("bytes", "compressed_bytes")
        )
        print(
            f"{row['architecture']:8} {count:5} kernels: {hours[0]:.1f} +- {hours[1]:.1f} hours of "
            f"CPU, {whole[0]:.0f} +- {whole[1]:.0f} MB, compressed {packed[0]:.0f} MB",
            flush=True,
        )
        RESULTS.write_text("".join(f"{json.dumps(one)}\n" for one in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
