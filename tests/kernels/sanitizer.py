"""Run cases under one of compute-sanitizer's tools, and find the case and kernel that stop it.

The process under the tool runs cases in the given order, and prints a `mark` before each and `DONE`
after the last. If it ends early, the failing case is run again alone, in the `WAYS` that
distinguish errors of the kernel from errors of the tool. The cases after it continue in a new
process, except those that launch the same instance. This module does not depend on GPUs:
tests/unit/harness/test_gpu_sanitize.py tests it with a fake tool.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DONE", "WAYS", "Found", "Ran", "Report", "Sanitizer", "mark", "shown"]

DONE = "ran all cases"
_MARK = re.compile(r"^case (\d+):", re.MULTILINE)
# Summaries of memcheck and initcheck, and of racecheck.
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
# The lines of a report, without the host backtrace.
_REPORT = re.compile(r"^========= (?=\S)(.*(?:\n=========     (?! ).*)*)", re.MULTILINE)
# Output other than kernel errors: messages of the tool, and consequences of an error.
_NOISE = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "Program hit",
    "Target application returned",
    "Error: process didn't terminate successfully",
    "LEAK SUMMARY",
)
MOST_STOPS, MOST_REPORTS = 6, 10
TIMED_OUT = 124
SHOWN_CHARS = 3000

Way = tuple[tuple[str, ...], tuple[str, ...]]
"""Options of the tool, and of the process that it runs."""

_AS_IT_WAS: Mapping[str, Way] = {"as it was": ((), ())}
WAYS: Mapping[str, Mapping[str, Way]] = {
    "memcheck": {
        **_AS_IT_WAS,
        # Reports all errors of the kernel and of later kernels.
        "stopping no more than the kernel": (("--destroy-on-device-error=kernel",), ()),
        "launch by launch": (("--force-blocking-launches",), ()),
        # The tool itself derives the memory that wgmma and bulk copies access, and has been wrong
        # (NVIDIA/compute-sanitizer-samples, issue 19). If errors disappear without that check, or
        # with more shared memory, either the tool is wrong or an operand is out of bounds; the
        # reported address tells which.
        "without checks of wgmma": (("--check-warpgroup-mma=no",), ()),
        "without checks of bulk copies": (("--check-bulk-copy=no",), ()),
        "with 8 KiB more shared memory": ((), ("--more-shared=8192",)),
    }
}
"""For each tool, how to run a failing case again. (``--launch-timeout`` limits connecting only.)"""


def mark(case: int, what: str) -> str:
    """Return the line that is printed before a case is run."""
    return f"case {case}: {what}"


@dataclass(frozen=True)
class Report:
    """One error in the tool's words; ``kernel`` is None unless it names a known kernel."""

    case: int | None
    kernel: str | None
    said: list[str]


@dataclass(frozen=True)
class Ran:
    """The outcome of one process under the tool."""

    cases: Sequence[int]
    exit_code: int
    seconds: float
    log: str

    @property
    def finished(self) -> bool:
        return DONE in self.log

    @property
    def errors(self) -> int | None:
        """The number of errors; None if the tool did not print a summary."""
        found = _SUMMARY.findall(self.log)
        return sum(map(int, found)) if found else None

    @property
    def last_case(self) -> int | None:
        begun = _MARK.findall(self.log)
        return int(begun[-1]) if begun else None

    @property
    def clean(self) -> list[int]:
        """The cases without errors; none if the process did not finish or print every error.

        Errors may be printed after the next case's mark, so neither case of the two is clean.
        """
        reports = self._printed(())
        if not self.finished or self.errors != len(reports):
            return []
        reported = {one.case for one in reports}
        following = [*self.cases[1:], None]
        return [
            case
            for case, after in zip(self.cases, following, strict=True)
            if reported.isdisjoint({case, after} - {None})
        ]

    def reports(self, kernels: Collection[str]) -> list[Report]:
        """Return the reported errors, without repetitions of an error in the same kernel."""
        found: dict[tuple[str | None, str], Report] = {}
        for report in self._printed(kernels):
            found.setdefault((report.kernel, report.said[0]), report)
        return list(found.values())[:MOST_REPORTS]

    def _printed(self, kernels: Collection[str]) -> list[Report]:
        found = []
        for match in _REPORT.finditer(self.log):
            said = [line.removeprefix("=========").strip() for line in match[1].splitlines()]
            if said[0].startswith(_NOISE):
                continue
            kernel = next((name for name in kernels if re.search(rf"\b{name}\b", match[1])), None)
            begun = _MARK.findall(self.log, 0, match.start())
            found.append(Report(int(begun[-1]) if begun else None, kernel, said))
        return found


@dataclass
class Found:
    """The outcome of all processes that run a list of cases."""

    ran: list[Ran] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    stopped: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every case ran to completion."""
        return self.ran[-1].finished and not self.stopped

    @property
    def errors(self) -> int | None:
        counted = [one.errors for one in self.ran if one.errors is not None]
        return sum(counted) if len(counted) == len(self.ran) else None

    def record(self) -> dict[str, Any]:
        """Return the record to store."""
        return {
            "exit_code": max(one.exit_code for one in self.ran),
            "errors": self.errors,
            "finished": self.finished,
            "seconds": round(sum(one.seconds for one in self.ran), 1),
            "reports": [asdict(report) for report in self.reports],
            "stopped": self.stopped,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Sanitizer:
    """Runs cases under a tool.

    ``inner`` makes the command to run from cases and further options. ``launched`` holds the entry
    points and instance names of the kernels of each case. Logs are written to ``logs``.
    """

    tool: str
    inner: Callable[[Sequence[int], Sequence[str]], Sequence[str]]
    launched: Mapping[int, Collection[tuple[str, str]]]
    logs: Path
    deadline: float
    """End time by `time.monotonic`, except for failing cases alone, which get ``alone_s`` each."""
    alone_s: float = 40.0
    program: Sequence[str] = ("compute-sanitizer",)

    def sweep(self, cases: Sequence[int], name: str) -> Found:
        """Run all cases, continuing after failures. ``name`` is the prefix of log names."""
        found, left = Found(), list(cases)
        while left:
            ran = self.run(left, f"{name}-{len(found.ran)}", self.deadline - time.monotonic())
            found.ran.append(ran)
            found.reports += ran.reports(self._kernels(left))
            if ran.finished:
                break
            case = ran.last_case
            if case is not None and ran.exit_code == TIMED_OUT:
                found.left_out += left[left.index(case) :]
                break
            if case is None or len(found.stopped) == MOST_STOPS:
                found.left_out += left if case is None else left[left.index(case) + 1 :]
                break
            guilty = self._guilty(case, ran)
            left = left[left.index(case) + 1 :]
            found.left_out += [one for one in left if guilty & set(self.launched[one])]
            left = [one for one in left if not guilty & set(self.launched[one])]
            found.stopped.append(self._stopped(case, guilty, ran, name))
        return found

    def run(self, cases: Sequence[int], name: str, timeout_s: float, way: Way = ((), ())) -> Ran:
        """Run one process. The exit code is 124 if it exceeds the timeout."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{self.tool}-{name}.log"
        command = [*self.program, f"--tool={self.tool}", "--print-limit=20", "--error-exitcode=9"]
        command += [*way[0], *self.inner(cases, way[1])]
        started, code = time.monotonic(), TIMED_OUT
        with (
            # A file also holds the output of a process that is killed.
            log.open("w", encoding="utf-8") as file,
            # A new process group, since killing the tool would not end the process under it.
            subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
        ):
            try:
                code = process.wait(max(timeout_s, 0.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        said = log.read_text(encoding="utf-8", errors="replace")
        return Ran(list(cases), code, time.monotonic() - started, said)

    def _kernels(self, cases: Collection[int]) -> list[str]:
        return sorted({entry for case in cases for entry, _ in self.launched[case]})

    def _guilty(self, case: int, ran: Ran) -> set[tuple[str, str]]:
        """Return the case's instances of the kernels that the tool reported."""
        named = {one.kernel for one in ran.reports(self._kernels([case])) if one.case == case}
        return {(entry, name) for entry, name in self.launched[case] if entry in named}

    def _stopped(
        self, case: int, guilty: set[tuple[str, str]], ran: Ran, name: str
    ) -> dict[str, Any]:
        """Run a failing case alone, and return its record."""
        kernels, alone = self._kernels([case]), {}
        for number, (how, way) in enumerate(WAYS.get(self.tool, _AS_IT_WAS).items()):
            again = self.run([case], f"{name}-case{case}-{number}", self.alone_s, way)
            alone[how] = {
                "exit_code": again.exit_code,
                "errors": again.errors,
                "finished": again.finished,
                "reports": [asdict(report) for report in again.reports(kernels)[:2]],
            }
        what = next(line for line in ran.log.splitlines() if line.startswith(f"case {case}:"))
        return {
            "case": case,
            "what": what,
            "exit_code": ran.exit_code,
            "instances": sorted(instance for _, instance in guilty),
            "launched": sorted(instance for _, instance in self.launched[case]),
            "alone": alone,
        }


def shown(log: str) -> str:
    """Shorten a log to its beginning, with the first error, and its end."""
    if len(log) <= 2 * SHOWN_CHARS:
        return log
    left_out = len(log) - 2 * SHOWN_CHARS
    return f"{log[:SHOWN_CHARS]}\n[... {left_out} characters ...]\n{log[-SHOWN_CHARS:]}"
