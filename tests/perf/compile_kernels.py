"""Compiles every GPU kernel that a plan can choose, without a GPU, and reads what each uses.

    python -m tests.perf.compile_kernels [--arch sm_90a ...] [--match gather] [--jobs 2]
        [--shard 2/8] [--afresh]

A shard is a kernel's source on one architecture, with all of its instances. What was found of it is
a line of tests/perf/results/compiled.jsonl, good as long as its key is: a hash of the source with
all that it includes, of the options and instances, and of the compiler's version. Only shards that
have no such line are compiled, and a run that was interrupted goes on where it was. ``--shard``
takes every eighth of them, from the second on, so that several machines share the work.

Fails where something does not compile, or spills registers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from convgrad_service.backends.cuda.compile import Compiler, Resources
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.cgroups import usable_cores
from convgrad_service.plans.cuda.device import ARCHITECTURES
from convgrad_service.plans.cuda.program import Instance
from tests.perf.cleared import Cleared, key_of
from tests.perf.provenance import origin

RESULTS = Path(__file__).resolve().parent / "results" / "compiled.jsonl"


class Shard(NamedTuple):
    """A kernel's source on one architecture."""

    source: str
    architecture: str
    instances: tuple[Instance, ...]

    def key(self, compiler: Compiler) -> str:
        """Equal where the same would be found."""
        return key_of(sorted(map(compiler.file_name, self.instances)))


class Line(NamedTuple):
    """What was found of one instance."""

    instance: Instance
    resources: Resources | None
    error: str
    seconds: float

    def __str__(self) -> str:
        if self.resources is None:
            return f"{self.instance.name:44} {self.error}"
        found = self.resources
        return (
            f"{self.instance.name:44} {found.registers:4} registers "
            f"{found.shared_bytes:6} B shared {found.stack_bytes:4} B stack "
            f"{found.spill_store_bytes:4} B spilled {self.seconds:5.1f} s"
        )


def shards(architectures: Sequence[str], match: str) -> Iterator[Shard]:
    """Of the sources whose names hold ``match``."""
    instances = FAMILIES.instances()
    for source in sorted({one.source for one in instances if match in one.source}):
        for architecture in architectures:
            own = tuple(
                one for one in instances if one.source == source and one.is_for(architecture)
            )
            if own:
                yield Shard(source, architecture, own)


def compiled(compiler: Compiler, instance: Instance) -> Line:
    started = time.perf_counter()
    try:
        resources = compiler.compile(instance).resources
    except CompileError as error:
        return Line(instance, None, str(error), 0.0)
    return Line(instance, resources, "", time.perf_counter() - started)


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """How many, how many are good, which are not, what the largest use."""
    used = {line.instance.name: line.resources for line in lines if line.resources}
    spilling = [name for name, one in used.items() if one.spills]
    return {
        "instances": len(lines),
        "good": len(used) - len(spilling),
        "refused": [line.instance.name for line in lines if line.resources is None],
        "spilling": spilling,
        "most_registers": max((one.registers for one in used.values()), default=0),
        "with_a_stack": sum(one.stack_bytes > 0 for one in used.values()),
        "compile_s": round(sum(line.seconds for line in lines), 1),
    }


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--match", default="", help="only sources whose names hold this")
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every Nth, from the Ith on")
    parser.add_argument("--afresh", action="store_true", help="compile what was compiled before")
    asked = parser.parse_args(given)
    try:
        nvrtc = find_nvrtc()
    except CompileError as error:
        parser.exit(1, f"{error}\n")
    compilers = {name: Compiler(nvrtc, name, cache=None) for name in asked.arch}
    first, step = map(int, asked.shard.split("/"))
    work = list(shards(asked.arch, asked.match))[first - 1 :: step]
    version = ".".join(map(str, nvrtc.version))
    where = origin("none: compiled for", {"nvrtc": version})
    kept = Cleared(RESULTS, ("source", "architecture"))
    bad = valid = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for shard in work:
            compiler = compilers[shard.architecture]
            name = {"source": shard.source, "architecture": shard.architecture}
            key = shard.key(compiler)
            row = None if asked.afresh else kept.get(name, key)
            if row is not None and row["good"] == row["instances"]:
                valid += 1
                continue
            print(f"{shard.architecture} {shard.source}", flush=True)
            lines = []
            for line in pool.map(lambda one, by=compiler: compiled(by, one), shard.instances):
                print(f"  {line}", flush=True)
                lines.append(line)
            row = {"bench": "compile_kernels", **name, "key": key, **summary(lines), **where}
            kept.put([row])
            bad += row["good"] < row["instances"]
    print(f"NVRTC {version}: {valid} of {len(work)} shards were valid, {bad} are not good")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
