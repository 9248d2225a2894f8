"""Run every GPU kernel under compute-sanitizer, on small problems, and store the outcome.

    python -m tests.kernels.gpu_sanitize [--tools memcheck racecheck initcheck] [--draws 1500]
        [--sources depthwise/ pool/] [--cases 49 84] [--logs build/sanitize]
    python -m tests.kernels.gpu_sanitize --suite conv_bwd_data grouped_conv_bwd_weight

Named cases run on the general kernels and on those that plans choose. Then random cases run, chosen
from ``--draws`` draws for each class of layer and dtype to cover every fast kernel (covering.py).
With ``--suite``, only small problems run that launch each instance that these operations launch on
the layers of the networks suite, in bfloat16 and channels last (suite_covering.py).
``--sources`` selects the random cases of kernels whose source names have these prefixes, and
``--cases`` selects cases by number; numbers are stable as long as plans and draws are unchanged.

The tools run in parallel, each in ``--shards`` processes. If a process stops, sanitizer.py finds
the cause. A line for each tool is appended to tests/perf/results/gpu_checks.jsonl; full logs go to
``--logs``. Clean cases are recorded in sanitized.jsonl with a hash of their kernels' sources, and
are skipped while it is unchanged, so a run that ran out of time can be continued.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.device import describe, import_cupy
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.fallback.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.backends.cuda.memory import Lane
from convgrad_service.backends.cuda.sources import KERNELS, included, source_hash
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Families
from convgrad_service.plans.cuda.program import Instance, Launch, Step, ceil_div
from tests.kernels.gpu_check import RESULTS, ROOT, compile_all, driver, git_sha, versions
from tests.kernels.sanitizer import DONE, Found, Sanitizer, mark, shown
from tests.perf.cleared import Cleared, key_of
from tests.support.kernels.covering import Covered, covering_quickly, instances_of
from tests.support.kernels.cuda_backends import few, general
from tests.support.kernels.harness import answers, with_layouts
from tests.support.kernels.suite_covering import SuiteCovering, suite_covering, suite_layers
from tests.support.numerics.arrays import DTYPES, draw, integers, rng_for
from tests.support.numerics.cases import (
    EPILOGUES,
    FROM_CONV,
    FROM_CONV3D,
    FUSED,
    Case,
    conv_cases,
    grouped_conv_bwd_weight,
    pool_cases,
)
from tests.support.numerics.geometries import Conv
from tests.support.numerics.window_cases import OPERATIONS as WINDOWS
from tests.support.numerics.window_cases import window_cases

TOOLS = ("memcheck", "racecheck", "initcheck")
# Few and small, since the tools slow every access down many times.
NAMES = ("plain", "stride_beyond_kernel", "depthwise", "groups_4", "3d_plain")
EVEN = Conv(1, 64, 64, (9, 10), (3, 3), padding=1)
PADDED = Conv(1, 67, 35, (6, 5), (3, 3), 2, 1)
# Kernels that plans use for large tensors only.
DEPTHWISE = [
    grouped_conv_bwd_weight(
        f"depthwise_{kernel}_{stride}",
        Conv(2, 64, 64, (10, 17), (kernel, kernel), stride, kernel // 2, groups=64),
    )
    for kernel, stride in ((3, 1), (3, 2), (5, 1), (7, 1))
]
CASES: list[Case] = [
    *(case for op in FROM_CONV for case in conv_cases(op) if case.name in NAMES),
    *(make(name, conv) for name, conv in (("even", EVEN), ("padded", PADDED))
      for make in FROM_CONV.values()),
    *(next(iter(conv_cases(op))) for op in FROM_CONV3D),
    *(case for n in (1, 2, 3) for way in ("fwd", "bwd")
      for case in list(pool_cases(f"maxpool{n}d_{way}"))[:3]),
    *(case for op in WINDOWS for case in window_cases(op)[:3]),
    *FUSED[:2],
    *EPILOGUES[:2],
]  # fmt: skip
SETS: Mapping[str, Families] = {
    "tiles": general(GatherTile(), WeightTile()),
    "direct": general(GatherDirect(), WeightDirect()),
    "few": few(),
    "plans": FAMILIES,
}
# initcheck does not recognise these stores as writes: of 84,558 errors at 5a95834, all that were
# printed are in problems whose kernels call it, and tests with poisoned outputs find every element
# written.
BULK_STORES, BULK_STORES_IN = re.compile(r"\btma_store\b"), "ptx/tma.cuh"
# Upper bound of kernels' static shared memory, in bytes.
STATIC_BYTES = 16384
# Most cases per process: few, since those of a process that runs out of time are not recorded.
PART = 12
CLEARED = RESULTS.with_name("sanitized.jsonl")

Numbered = dict[int, tuple[str, Covered]]
"""For each case number: the name of its kernels in `SETS`, and the case."""


def numbered(covering: Iterable[Covered]) -> Numbered:
    """Number the named cases on every set of kernels, then the random ones on planned kernels."""
    named = []
    for case in CASES:
        layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
        named += [(name, Covered(case, "bfloat16", layouts[-1], frozenset())) for name in SETS]
    named += [
        ("few", Covered(case, dtype, "NHWC", frozenset()))
        for case in DEPTHWISE
        for dtype in ("bfloat16", "float16")
    ]
    return dict(enumerate([*named, *(("plans", one) for one in covering)]))


def launched_by(cases: Numbered, device: CudaDevice) -> dict[int, set[Instance]]:
    """Return the kernel instances that each case launches."""
    return {
        number: set(instances_of(one.case, one.dtype, one.layout, device, SETS[kernels]))
        for number, (kernels, one) in cases.items()
    }


def stored_by_copies(launched: Mapping[int, Collection[Instance]]) -> set[int]:
    """Return the cases with results that are stored by bulk copies."""
    sources = {instance.source for instances in launched.values() for instance in instances}
    engine = {source for source in sources if _stores_by_copies(source)}
    return {
        number
        for number, instances in launched.items()
        if any(instance.source in engine for instance in instances)
    }


def _stores_by_copies(source: str) -> bool:
    """Whether a kernel, or a header that it includes, calls `tma_store`."""
    called = [name for name in included(source) if name != BULK_STORES_IN]
    return any(BULK_STORES.search((KERNELS / name).read_text("utf-8")) for name in called)


def run_all(
    cases: Numbered, chosen: Sequence[int], more_shared: int, filled: Collection[int]
) -> None:
    """Run cases without checking the results.

    Outputs and workspace of the cases in ``filled`` are filled with NaN first.
    """
    # Without a pool, which would reuse memory that initcheck regards as initialised.
    import_cupy().cuda.set_allocator(None)
    # Download outputs one by one: a single copy would read the unwritten gaps between them.
    whole = Lane.download

    def one_by_one(lane: Lane, tensors: Iterable[tuple[int, Any]], base: int) -> None:
        for tensor in tensors:
            whole(lane, [tensor], base)

    Lane.download = one_by_one  # type: ignore[method-assign,assignment]
    if more_shared > 0:
        give_more_shared(more_shared, describe(0).shared_bytes_per_block - STATIC_BYTES)
    backends = {
        (name, fill): CudaBackend(families=families, poison=fill)
        for name, families in SETS.items()
        for fill in (False, True)
    }
    for number in chosen:
        name, one = cases[number]
        print(mark(number, f"{name} {one.case.id} {one.dtype} {one.layout}"), flush=True)
        tensors = draw(one.case, rng_for(0, one.case.id), DTYPES[one.dtype], integers)
        answers(backends[name, number in filled], one.case, tensors, one.layout)
    print(DONE, flush=True)


def give_more_shared(more: int, most: int) -> None:
    """Make each launch request ``more`` bytes of shared memory, up to ``most`` in total."""
    run = Kernels.run

    def given(step: Step) -> Step:
        if not isinstance(step, Launch):
            return step
        size = max(step.shared_bytes, min(step.shared_bytes + more, most))
        return replace(step, shared_bytes=size)

    def run_with_more(
        kernels: Kernels, steps: Iterable[Step], addresses: Mapping[str, int], stream: Any
    ) -> None:
        run(kernels, [given(step) for step in steps], addresses, stream)

    Kernels.run = run_with_more  # type: ignore[method-assign]


def command_for(
    pickled: Path, filled: Collection[int]
) -> Callable[[Sequence[int], Sequence[str]], Sequence[str]]:
    """Return a function that makes the command to run some cases in a process."""
    inner = [sys.executable, "-m", "tests.kernels.gpu_sanitize", "--inner", str(pickled)]
    inner += ["--filled", *map(str, sorted(filled))]
    return lambda cases, more: [*inner, "--cases", *map(str, cases), *more]


def swept(
    sanitizer: Sanitizer, keys: Mapping[int, str], shards: int, cleared: Cleared, facts: Any
) -> dict[str, Any]:
    """Run cases under one tool in ``shards`` processes; print errors and return the outcome.

    Cases without errors are recorded as clean, with their ``keys``, once their process finishes.
    """

    def sweep(part: Sequence[int]) -> Found:
        one = sanitizer.sweep(part, str(part[0]))
        cleared.put(
            {"tool": sanitizer.tool, "case": case, "key": keys[case], **facts}
            for ran in one.ran
            for case in ran.clean
        )
        return one

    tool = sanitizer.tool
    left = [case for case, key in keys.items() if not cleared.get({"tool": tool, "key": key}, key)]
    if not left:
        return {"tool": sanitizer.tool, "exit_code": 0, "errors": 0, "finished": True, "ran": 0}
    size = min(PART, ceil_div(len(left), shards))
    parts = [left[start : start + size] for start in range(0, len(left), size)]
    with ThreadPoolExecutor(shards) as pool:
        found = list(pool.map(sweep, parts))
    for one in found:
        for ran in one.ran:
            if ran.exit_code or not ran.finished:
                print(f"--- {sanitizer.tool}, exit code {ran.exit_code}\n{shown(ran.log)}")
    records = [one.record() for one in found]
    errors = [one["errors"] for one in records]
    return {
        "tool": sanitizer.tool,
        "ran": len(left),
        "exit_code": max(one["exit_code"] for one in records),
        "errors": None if None in errors else sum(errors),
        "finished": all(one["finished"] for one in records),
        "seconds": max(one["seconds"] for one in records),
        **{
            name: [item for one in records for item in one[name]]
            for name in ("reports", "stopped", "left_out")
        },
    }


def keys_of(cases: Numbered, launched: Mapping[int, Collection[Instance]]) -> dict[int, str]:
    """Return a key for each case, from the problem and the hashes of its kernels' sources."""
    hashed = lru_cache(maxsize=None)(source_hash)
    return {
        number: key_of(
            [
                f"{kernels} {one.case.id} {one.dtype} {one.layout}",
                *sorted(f"{each.name} {hashed(each.source)}" for each in launched[number]),
            ]
        )
        for number, (kernels, one) in cases.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--git-sha", default=git_sha())
    parser.add_argument("--tools", nargs="*", default=TOOLS)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each tool")
    parser.add_argument("--draws", type=int, default=1500, help="for each class and dtype")
    parser.add_argument("--shards", type=int, default=4, help="processes for each tool")
    parser.add_argument("--sources", nargs="*", default=[], help="what their names start with")
    parser.add_argument("--suite", nargs="*", default=[], help="operations on its layers")
    parser.add_argument("--cases", nargs="*", type=int, default=[], help="by their numbers")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "sanitize")
    parser.add_argument("--more-shared", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--filled", nargs="*", type=int, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--inner", type=Path, help="run the cases and this file's, under no tool")
    asked = parser.parse_args()
    if asked.inner:
        cases = pickle.loads(asked.inner.read_bytes())  # noqa: S301 - written below
        run_all(cases, asked.cases, asked.more_shared, set(asked.filled))
        return 0
    device = describe(0)
    if asked.suite:
        covering = suite_covering(SuiteCovering(device, FAMILIES, asked.suite), suite_layers())
        cases: Numbered = dict(enumerate(("plans", one) for one in covering))
    else:
        cases = numbered(covering_quickly(device, FAMILIES, asked.draws))
    if asked.cases:
        cases = {number: cases[number] for number in asked.cases}
    elif asked.sources:
        wanted = tuple(asked.sources)
        cases = {
            number: (kernels, one)
            for number, (kernels, one) in cases.items()
            if any(new.source.startswith(wanted) for new in one.new)
        }
    launched = launched_by(cases, device)
    needed = set[Instance]().union(*launched.values())
    filled = stored_by_copies(launched)
    # Compile in parallel, before the tools, which would each compile kernels sequentially.
    everything = not (asked.cases or asked.sources or asked.suite)
    compile_all(device.architecture, None if everything else needed)
    with TemporaryDirectory() as folder, ThreadPoolExecutor(len(asked.tools)) as pool:
        pickled = Path(folder) / "cases.pickle"
        pickled.write_bytes(pickle.dumps(cases))
        tools = [
            Sanitizer(
                tool,
                command_for(pickled, filled if tool == "initcheck" else ()),
                {
                    number: {(instance.entry, instance.name) for instance in instances}
                    for number, instances in launched.items()
                },
                asked.logs,
                time.monotonic() + asked.timeout,
            )
            for tool in asked.tools
        ]
        keys, cleared = keys_of(cases, launched), Cleared(CLEARED, ("tool", "key"))
        facts = {"git_sha": asked.git_sha, "device": device.name}
        more = keys, asked.shards, cleared, facts
        outcomes = list(pool.map(lambda tool: swept(tool, *more), tools))
    instances = {one for one in FAMILIES.instances() if one.is_for(device.architecture)}
    for outcome in outcomes:
        line = {
            "bench": "gpu_sanitize",
            "utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "git_sha": asked.git_sha,
            "device": device.name,
            "driver": driver(),
            "versions": versions(),
            "cases": len(cases),
            "instances_covered": len(needed & instances),
            "instances": len(instances),
            "command": ["python", "-m", "tests.kernels.gpu_sanitize", *sys.argv[1:]],
            **outcome,
        }
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line))
    return int(any(outcome["exit_code"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
