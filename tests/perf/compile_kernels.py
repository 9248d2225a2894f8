"""Compiles every GPU kernel that a plan can choose, without a GPU, and reads what each uses.

    python -m tests.perf.compile_kernels [--arch sm_90a ...] [--match gather] [--processes 15]
        [--seconds 100] [--shard 2/8] [--afresh] [--merge compiled.jsonl ...]

A shard is a kernel's source on one architecture, with all of its instances. What was found of it is
a line of tests/perf/results/compiled.jsonl, good as long as its key is: a hash of the source with
all that it includes, of the options and instances, and of the compiler's version. Only what has no
such line is compiled. A run that was ended, or that ends itself after `--seconds`, leaves the lines
of unfinished shards with the instances that are ``done``, and the next run goes on with the others.
`--shard` takes every eighth shard, from the second on, so that several machines share the work; and
`--merge` compiles nothing, but takes over what still holds of their results, and drops the lines of
kernels that are gone.

Fails where something does not compile, or spills registers. Needs no packages but NumPy, ml_dtypes,
Pydantic and NVRTC.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from convgrad_service.backends.cuda.compile import Compiler, Resources
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.plans.cuda.device import ARCHITECTURES
from convgrad_service.plans.cuda.program import Instance
from convgrad_service.process import usable_cores
from tests.perf.cleared import Cleared, key_of
from tests.perf.provenance import origin

RESULTS = Path(__file__).resolve().parent / "results" / "compiled.jsonl"
# How often the line of an unfinished shard is written.
KEPT_EVERY_S = 10.0


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


class Progress:
    """What is known of a shard: its line, which grows by the instances that are compiled."""

    def __init__(self, shard: Shard, compiler: Compiler, known: Mapping[str, Any] | None) -> None:
        self.shard, self._compiler = shard, compiler
        self._known = known or {}
        self._done = set(self._known.get("done", ()))
        self._lines: list[Line] = []

    @property
    def left(self) -> list[Instance]:
        """What is to be compiled."""
        if self._known.get("good") == len(self.shard.instances):
            return []
        return [one for one in self.shard.instances if self._digest(one) not in self._done]

    @property
    def touched(self) -> bool:
        return bool(self._lines)

    @property
    def complete(self) -> bool:
        return bool(self._lines) and not set(self.left) - {line.instance for line in self._lines}

    def add(self, line: Line) -> None:
        self._lines.append(line)

    def row(self) -> dict[str, Any]:
        """The shard's line: of how many instances, how many are good, which are not, what the
        largest use, and which are done if some are not."""
        used = {line.instance: line.resources for line in self._lines if line.resources}
        spilling = [one for one, resources in used.items() if resources.spills]
        done = self._done | {self._digest(one) for one in used if one not in spilling}
        most = max((one.registers for one in used.values()), default=0)
        stacks = sum(one.stack_bytes > 0 for one in used.values())
        compile_s = sum(line.seconds for line in self._lines)
        row: dict[str, Any] = {
            "instances": len(self.shard.instances),
            "good": len(done),
            "refused": [line.instance.name for line in self._lines if line.resources is None],
            "spilling": [one.name for one in spilling],
            "most_registers": max(most, self._known.get("most_registers", 0)),
            "with_a_stack": stacks + self._known.get("with_a_stack", 0),
            "compile_s": round(compile_s + self._known.get("compile_s", 0), 1),
        }
        if len(done) < len(self.shard.instances):
            row["done"] = sorted(done)
        return row

    def _digest(self, instance: Instance) -> str:
        return key_of([self._compiler.file_name(instance)])


def compiled(compiler: Compiler, instance: Instance) -> Line:
    started = time.perf_counter()
    try:
        resources = compiler.compile(instance).resources
    except CompileError as error:
        return Line(instance, None, str(error), 0.0)
    return Line(instance, resources, "", time.perf_counter() - started)


def merge(kept: Cleared, others: Iterable[Path], compilers: Mapping[str, Compiler]) -> str:
    """Take over the lines of other files that hold for this tree, and drop those of no shard."""
    names = ("source", "architecture")
    keys = {
        (one.source, one.architecture): one.key(compilers[one.architecture])
        for one in shards(tuple(compilers), "")
    }

    def name_of(row: Mapping[str, Any]) -> tuple[str, str]:
        return row["source"], row["architecture"]

    given = [row for path in others for row in Cleared(path, names).rows]
    valid = [row for row in given if keys.get(name_of(row)) == row["key"]]
    kept.put(valid)
    kept.drop(lambda row: row["architecture"] in compilers and name_of(row) not in keys)
    whole = sum(
        keys.get(name_of(row)) == row["key"] and row["good"] == row["instances"]
        for row in kept.rows
    )
    return f"{len(valid)} of {len(given)} lines hold; {whole} of {len(keys)} shards are whole"


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--match", default="", help="only sources whose names hold this")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--seconds", type=float, default=math.inf, help="start nothing after these")
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="every Nth, from the Ith on")
    parser.add_argument("--afresh", action="store_true", help="compile what was compiled before")
    parser.add_argument("--git-sha", help="of the tree, where there is no git to ask")
    parser.add_argument("--results", type=Path, help="another file of results")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of other machines")
    asked = parser.parse_args(given)
    try:
        nvrtc = find_nvrtc()
    except CompileError as error:
        parser.exit(1, f"{error}\n")
    compilers = {name: Compiler(nvrtc, name, cache=None) for name in asked.arch}
    kept = Cleared(asked.results or RESULTS, ("source", "architecture"))
    if asked.merge:
        print(merge(kept, asked.merge, compilers))
        return 0
    first, step = map(int, asked.shard.split("/"))
    work = list(shards(asked.arch, asked.match))[first - 1 :: step]
    version = ".".join(map(str, nvrtc.version))
    where = origin("none: compiled for", {"nvrtc": version})
    if asked.git_sha:
        where["git_sha"] = asked.git_sha

    def keep(some: Iterable[Progress]) -> None:
        kept.put(
            {
                "bench": "compile_kernels",
                "source": one.shard.source,
                "architecture": one.shard.architecture,
                "key": one.shard.key(compilers[one.shard.architecture]),
                **one.row(),
                **where,
            }
            for one in some
        )

    every = []
    for shard in work:
        compiler = compilers[shard.architecture]
        name = {"source": shard.source, "architecture": shard.architecture}
        row = None if asked.afresh else kept.get(name, shard.key(compiler))
        every.append(Progress(shard, compiler, row))
    pairs = [(one, instance) for one in every for instance in one.left]
    valid = sum(not one.left for one in every)
    kept_s = started_s = time.monotonic()

    def compiled_in_time(pair: tuple[Progress, Instance]) -> Line | None:
        if time.monotonic() - started_s > asked.seconds:
            return None
        return compiled(compilers[pair[0].shard.architecture], pair[1])

    bad = skipped = 0
    with ThreadPoolExecutor(asked.processes) as pool:
        for (one, _), line in zip(pairs, pool.map(compiled_in_time, pairs), strict=True):
            if line is None:
                skipped += 1
                continue
            print(f"{one.shard.architecture} {line}", flush=True)
            bad += line.resources is None or line.resources.spills
            one.add(line)
            if one.complete or time.monotonic() - kept_s > KEPT_EVERY_S:
                keep([one])
                kept_s = time.monotonic()
    keep(one for one in every if one.touched and not one.complete)
    print(
        f"NVRTC {version}: {valid} of {len(work)} shards were valid, {len(pairs) - skipped} "
        f"instances were compiled, {bad} of them are not good, {skipped} are left"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
