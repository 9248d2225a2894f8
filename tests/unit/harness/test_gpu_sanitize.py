"""What compute-sanitizer stops at is named, run again alone, and the rest goes on: with a tool that
stands in for it, and no GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Clear, Instance, Launch
from tests.kernels import gpu_sanitize
from tests.kernels.sanitizer import SHOWN_CHARS, WAYS, Found, Ran, Sanitizer, shown
from tests.perf.cleared import Cleared
from tests.support.kernels.covering import covering, instances_of
from tests.support.kernels.suite_covering import SuiteCovering, suite_layers

# Says what the real one says; `faults` holds for some cases what is said of them, and which option
# of the tool or of the process keeps them from failing.
TOOL = """#!{python}
import json, sys, time
from pathlib import Path

faults = json.loads(Path({faults!r}).read_text())
after = sys.argv[sys.argv.index("--cases") + 1 :]
cases = [word for word in after if word.isdigit()]
print("========= COMPUTE-SANITIZER", flush=True)
if "hangs" in faults:
    time.sleep(600)
waits = faults.pop("waits in", None)
errors = 0
for case in cases:
    print(f"case {{case}}: plans some_case bfloat16 NHWC", flush=True)
    if case == waits:
        time.sleep(600)
    fault = faults.get(case)
    if fault is None or fault["without"] in sys.argv:
        continue
    for line in fault["said"]:
        print("=========", line, flush=True)
    errors += 1
    if fault["stops"]:
        print('========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch')
        print("========= Target application returned an error")
        print("========= ERROR SUMMARY: 18 errors")
        sys.exit(9)
print("ran all cases")
print(f"========= ERROR SUMMARY: {{errors}} error{{'s' * (errors != 1)}}")
sys.exit(9 if errors else 0)
"""
SAID = [
    "Invalid __shared__ read of size 2048 bytes",
    "    at hopper_halo+0x2570",
    "    by thread (224,0,0) in block (4,0,0)",
    "    Address 0x1bc20 is out of bounds",
    "    Saved host backtrace up to driver entry point at kernel launch time",
    "        Host Frame: hopper_weight in harness.py:38",
]
LAUNCHED = {
    number: {("hopper_halo", "hopper_halo<1>"), ("copy", "copy<2>")} if number % 2 else {
        ("copy", "copy<2>")
    }
    for number in range(8)
}  # fmt: skip


def program(folder: Path, faults: dict[str, Any]) -> str:
    """A tool that finds these faults."""
    said, script = folder / "faults.json", folder / "compute-sanitizer"
    said.write_text(json.dumps(faults))
    script.write_text(TOOL.format(python=sys.executable, faults=str(said)))
    script.chmod(0o755)
    return str(script)


def fault(said: Sequence[str], without: str = "", *, stops: bool = True) -> dict[str, Any]:
    return {"said": list(said), "without": without, "stops": stops}


def sweep(
    folder: Path, faults: dict[str, Any], tool: str = "memcheck", seconds: float = 300.0
) -> Found:
    sanitizer = Sanitizer(
        tool,
        lambda cases, more: ["inner", "--cases", *map(str, cases), *more],
        LAUNCHED,
        folder / "logs",
        time.monotonic() + seconds,
        alone_s=300.0,
        program=(program(folder, faults),),
    )
    return sanitizer.sweep(range(8), "0")


def test_clean_cases_are_one_process(tmp_path: Path) -> None:
    found = sweep(tmp_path, {})
    assert found.record() == {
        "exit_code": 0,
        "errors": 0,
        "finished": True,
        "seconds": found.record()["seconds"],
        "reports": [],
        "stopped": [],
        "left_out": [],
    }


def test_what_stops_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    found = sweep(tmp_path, {"3": fault(SAID, "--check-warpgroup-mma=no")})
    assert not found.finished
    (stop,) = found.stopped
    assert stop["case"] == 3
    assert stop["what"] == "case 3: plans some_case bfloat16 NHWC"
    assert stop["instances"] == ["hopper_halo<1>"]
    # The other cases with that kernel are left out; those without it were run.
    assert [list(one.cases) for one in found.ran] == [list(range(8)), [4, 6]]
    assert found.left_out == [5, 7]
    (report,) = found.reports
    assert (report.case, report.kernel) == (3, "hopper_halo")
    # To the address, without the host's frames.
    assert report.said[0] == SAID[0]
    assert report.said[3] == "Address 0x1bc20 is out of bounds"
    assert not any("Host Frame" in line for line in report.said)
    assert set(stop["alone"]) == set(WAYS["memcheck"])
    assert stop["alone"]["as it was"]["errors"] == 18
    assert stop["alone"]["as it was"]["reports"][0]["kernel"] == "hopper_halo"
    assert stop["alone"]["without checks of wgmma"]["finished"]
    assert stop["alone"]["without checks of wgmma"]["errors"] == 0


def test_a_kernel_that_is_not_named_leaves_out_nothing_else(tmp_path: Path) -> None:
    found = sweep(tmp_path, {"3": fault(["Internal Sanitizer Error"])})
    assert [one["case"] for one in found.stopped] == [3]
    assert found.stopped[0]["instances"] == []
    assert found.stopped[0]["launched"] == ["copy<2>", "hopper_halo<1>"]
    assert found.left_out == []
    assert list(found.ran[1].cases) == [4, 5, 6, 7]


def test_more_than_one_may_stop(tmp_path: Path) -> None:
    found = sweep(tmp_path, {"0": fault(["Unspecified"]), "7": fault(SAID)})
    assert [one["case"] for one in found.stopped] == [0, 7]
    assert found.errors == 36


def test_errors_that_do_not_stop_are_reported_with_their_case(tmp_path: Path) -> None:
    hazard = ["Error: Race reported between Write access at copy+0x10", "    and Read access"]
    found = sweep(tmp_path, {"4": fault(hazard, stops=False)}, "racecheck")
    assert found.finished
    (report,) = found.reports
    assert (report.case, report.kernel) == (4, "copy")
    assert found.record()["exit_code"] == 9
    assert found.record()["errors"] == 1


def test_a_tool_that_hangs_is_ended_and_says_what_was_not_run(tmp_path: Path) -> None:
    found = sweep(tmp_path, {"hangs": {}}, seconds=0.5)
    assert found.record()["exit_code"] == 124
    assert found.errors is None
    assert not found.finished
    assert found.left_out == list(range(8))


def test_a_case_at_which_the_time_ends_is_not_examined(tmp_path: Path) -> None:
    found = sweep(tmp_path, {"waits in": "3"}, seconds=1.5)
    assert found.record()["exit_code"] == 124
    assert len(found.ran) == 1
    assert found.stopped == []
    assert found.left_out == list(range(3, 8))


def test_logs_are_kept_whole_and_shown_from_both_ends(tmp_path: Path) -> None:
    sweep(tmp_path, {"3": fault(SAID)})
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert {"memcheck-0-0.log", "memcheck-0-1.log", "memcheck-0-case3-0.log"} <= names
    text = "first" + "." * (3 * SHOWN_CHARS) + "last"
    assert shown(text).startswith("first")
    assert shown(text).endswith("last")
    assert len(shown(text)) < 2 * SHOWN_CHARS + 50


def test_a_row_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = covering(H200, FAMILIES, 2, ("dense", "depthwise"), ("bfloat16",))
    numbers = gpu_sanitize.numbered(few)
    culprit = max(numbers)
    instances = gpu_sanitize.launched_by(numbers, H200)[culprit]
    entry = sorted(instance.entry for instance in instances)[0]
    said = ["Invalid __global__ write of size 4 bytes", f"    at {entry}+0x10"]
    program(tmp_path, {str(culprit): fault(said)})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "argv", ["gpu_sanitize", "--tools", "memcheck", "--shards", "2"])
    monkeypatch.setattr(gpu_sanitize, "RESULTS", tmp_path / "results.jsonl")
    monkeypatch.setattr(gpu_sanitize, "CLEARED", tmp_path / "sanitized.jsonl")
    monkeypatch.setattr(gpu_sanitize, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_sanitize, "describe", lambda index: H200)
    monkeypatch.setattr(gpu_sanitize, "driver", lambda: "none")
    monkeypatch.setattr(gpu_sanitize, "versions", dict)
    monkeypatch.setattr(gpu_sanitize, "compile_all", lambda architecture, needed: (0, []))
    monkeypatch.setattr(gpu_sanitize, "covering_quickly", lambda *asked: few)
    assert gpu_sanitize.main() == 1
    (row,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    named = len(gpu_sanitize.CASES) * len(gpu_sanitize.SETS) + 2 * len(gpu_sanitize.DEPTHWISE)
    assert row["cases"] == named + len(few)
    assert not row["finished"]
    assert [one["case"] for one in row["stopped"]] == [culprit]
    assert row["reports"][0]["kernel"] == entry
    assert row["exit_code"] == 9


def test_small_problems_launch_what_the_suite_launches() -> None:
    covering = SuiteCovering(H200, FAMILIES, batches=(8,))
    layers = [layer for layer in suite_layers() if layer["class"] == "depthwise"][:2]
    least = covering.launching(layers)
    for found in least.items():
        instance, (_, conv) = found
        one = covering.shrunk(found)
        assert instance in one.new
        assert one.new == set(instances_of(one.case, one.dtype, one.layout, H200, FAMILIES))
        assert prod(next(iter(one.case.shapes.values()))) < prod(conv.output_shape)


def test_more_shared_memory_than_a_launch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(Kernels, "run", lambda kernels, steps, *rest: given.extend(steps))
    gpu_sanitize.give_more_shared(8192, 100_000)
    instance = Instance("layout/strided_copy.cu", "strided_copy")
    sizes = (0, 90_000, 95_000, 110_000)
    launches = [Launch(instance, (1, 1, 1), (32, 1, 1), None, size) for size in sizes]  # type: ignore[arg-type]
    kernels = object.__new__(Kernels)
    kernels.run([*launches, Clear("sums", 4)], {}, None)
    assert [step.shared_bytes for step in given[:-1]] == [8192, 98_192, 100_000, 110_000]
    assert given[-1] == Clear("sums", 4)


def test_cases_without_an_error_are_not_run_again_while_their_kernels_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    faults: dict[str, Any] = {"3": fault(SAID, stops=False)}

    def run(keys: dict[int, str]) -> dict[str, Any]:
        def command(cases: Sequence[int], more: Sequence[str]) -> list[str]:
            ran.extend(cases)
            return ["inner", "--cases", *map(str, cases), *more]

        script, logs = program(tmp_path, faults), tmp_path / "logs"
        end_s = time.monotonic() + 300
        sanitizer = Sanitizer("memcheck", command, LAUNCHED, logs, end_s, program=(script,))
        cleared = Cleared(tmp_path / "sanitized.jsonl", ("tool", "key"))
        return gpu_sanitize.swept(sanitizer, keys, 2, cleared, {"git_sha": "abc"})

    keys = {case: f"key {case}" for case in range(8)}
    assert run(keys)["errors"] == 1
    assert sorted(ran) == list(range(8))
    # The tool may have printed case 2's error after the mark of case 3.
    ran.clear()
    faults.clear()
    assert run({**keys, 7: "another source"})["errors"] == 0
    assert sorted(ran) == [2, 3, 7]
    ran.clear()
    assert run({**keys, 7: "another source"})["ran"] == 0
    assert ran == []


def test_no_case_is_clean_unless_every_error_was_printed() -> None:
    said = "========= Error: Race reported between Write access at copy+0x10\n"
    begun = f"case 0: a\n{said}case 1: b\ncase 2: c\nran all cases\n"
    log = begun + "========= RACECHECK SUMMARY: {} hazards displayed (1 error, 0 warnings)\n"
    assert Ran([0, 1, 2], 9, 1.0, log.format(1)).clean == [1, 2]
    assert Ran([0, 1, 2], 9, 1.0, log.format(2)).clean == []
    assert Ran([0, 1, 2], 124, 1.0, begun).clean == []


def test_a_case_depends_on_its_problem_and_its_kernels_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = gpu_sanitize.numbered([])
    launched = gpu_sanitize.launched_by(cases, H200)
    before = gpu_sanitize.keys_of(cases, launched)
    assert len(set(before.values())) == len(cases)
    hashed = gpu_sanitize.source_hash
    monkeypatch.setattr(
        gpu_sanitize,
        "source_hash",
        lambda source: "changed" if source == "fallback/gather_tile.cu" else hashed(source),
    )
    after = gpu_sanitize.keys_of(cases, launched)
    changed = {case for case in cases if before[case] != after[case]}
    using = {
        case
        for case, instances in launched.items()
        if any(one.source == "fallback/gather_tile.cu" for one in instances)
    }
    assert changed == using
    assert 0 < len(using) < len(cases)


def test_kernels_that_store_by_copies_are_known_by_their_headers_too() -> None:
    names = ["conv/pointwise_gemm", "grouped/hopper_grouped", "depthwise/depthwise_direct"]
    launched = {i: {Instance(f"{name}.cu", "entry")} for i, name in enumerate(names)}
    assert gpu_sanitize.stored_by_copies(launched) == {0, 1}
