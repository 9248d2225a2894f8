"""Runs cases under one of compute-sanitizer's tools, and says which case and kernel it stopped at.

The process under the tool runs cases in the order given, prints a `mark` before each and `DONE`
after the last. Where it ends sooner, the culprit is run again alone, in the `WAYS` that tell a
kernel's fault from the tool's, and the cases after it go on in a new process, but for those that
launch the same instance. Knows nothing of GPUs:
tests/unit/harness/test_gpu_sanitize.py has its own tool.
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
# memcheck and initcheck sum up in one way, racecheck in another.
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
# A report's lines, the backtrace of the host left out.
_REPORT = re.compile(r"^========= (?=\S)(.*(?:\n=========     (?! ).*)*)", re.MULTILINE)
# What is printed besides errors of kernels: the tool's own words, and what follows from an error.
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
SHOWN_CHARS = 3000

Way = tuple[tuple[str, ...], tuple[str, ...]]
"""Options of the tool, and of the process under it."""

_AS_IT_WAS: Mapping[str, Way] = {"as it was": ((), ())}
WAYS: Mapping[str, Mapping[str, Way]] = {
    "memcheck": {
        **_AS_IT_WAS,
        # Every error of the kernel, and those of the ones after it.
        "stopping no more than the kernel": (("--destroy-on-device-error=kernel",), ()),
        "launch by launch": (("--force-blocking-launches",), ()),
        # What Hopper's products and copies touch, the tool works out itself, and has been wrong
        # (NVIDIA/compute-sanitizer-samples, issue 19). Where errors go away with its check, or with
        # memory beyond what a kernel asks for, it is either that or an operand that ends too late:
        # the address that is reported says which.
        "without checks of wgmma": (("--check-warpgroup-mma=no",), ()),
        "without checks of bulk copies": (("--check-bulk-copy=no",), ()),
        "with 8 KiB more shared memory": ((), ("--more-shared=8192",)),
    }
}
"""How a culprit is run again, by tool. (``--launch-timeout`` is for connecting to a process.)"""


def mark(case: int, what: str) -> str:
    """What is printed before a case is run."""
    return f"case {case}: {what}"


@dataclass(frozen=True)
class Report:
    """One error, as the tool says it; the kernel is None where it names none that is known."""

    case: int | None
    kernel: str | None
    said: list[str]


@dataclass(frozen=True)
class Ran:
    """One process under the tool."""

    cases: Sequence[int]
    exit_code: int
    seconds: float
    log: str

    @property
    def finished(self) -> bool:
        return DONE in self.log

    @property
    def errors(self) -> int | None:
        """None where the tool did not come to count them."""
        found = _SUMMARY.findall(self.log)
        return sum(map(int, found)) if found else None

    @property
    def last_case(self) -> int | None:
        begun = _MARK.findall(self.log)
        return int(begun[-1]) if begun else None

    def reports(self, kernels: Collection[str]) -> list[Report]:
        """Errors in kernels, of equal ones in one kernel the first."""
        found: dict[tuple[str | None, str], Report] = {}
        for match in _REPORT.finditer(self.log):
            said = [line.removeprefix("=========").strip() for line in match[1].splitlines()]
            if said[0].startswith(_NOISE):
                continue
            kernel = next((name for name in kernels if re.search(rf"\b{name}\b", match[1])), None)
            begun = _MARK.findall(self.log, 0, match.start())
            case = int(begun[-1]) if begun else None
            found.setdefault((kernel, said[0]), Report(case, kernel, said))
        return list(found.values())[:MOST_REPORTS]


@dataclass
class Found:
    """What all processes of some cases found."""

    ran: list[Ran] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    stopped: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every case was run to its end."""
        return self.ran[-1].finished and not self.stopped

    @property
    def errors(self) -> int | None:
        counted = [one.errors for one in self.ran if one.errors is not None]
        return sum(counted) if len(counted) == len(self.ran) else None

    def record(self) -> dict[str, Any]:
        """What is stored."""
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
    """A tool over cases. ``inner`` is the command under it, for some cases and more options;
    ``launched`` are the kernels' entries and names of instances of each case. Logs go to ``logs``.
    """

    tool: str
    inner: Callable[[Sequence[int], Sequence[str]], Sequence[str]]
    launched: Mapping[int, Collection[tuple[str, str]]]
    logs: Path
    deadline: float
    """In `time.monotonic`'s seconds: for all but culprits alone, which have ``alone_s`` each."""
    alone_s: float = 40.0
    program: Sequence[str] = ("compute-sanitizer",)

    def sweep(self, cases: Sequence[int], name: str) -> Found:
        """Runs all cases, whatever stops it on the way; ``name`` is the log's."""
        found, left = Found(), list(cases)
        while left:
            ran = self.run(left, f"{name}-{len(found.ran)}", self.deadline - time.monotonic())
            found.ran.append(ran)
            found.reports += ran.reports(self._kernels(left))
            if ran.finished:
                break
            case = ran.last_case
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
        """One process; one that takes too long ends with 124."""
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{self.tool}-{name}.log"
        command = [*self.program, f"--tool={self.tool}", "--print-limit=20", "--error-exitcode=9"]
        command += [*way[0], *self.inner(cases, way[1])]
        started, code = time.monotonic(), 124
        with (
            # To a file: what a process said before it was ended is there too.
            log.open("w", encoding="utf-8") as file,
            # In a group of its own: the tool, ended, would leave the process under it running.
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
        """The case's launches of the kernel that the tool named; none where it named none."""
        named = {one.kernel for one in ran.reports(self._kernels([case])) if one.case == case}
        return {(entry, name) for entry, name in self.launched[case] if entry in named}

    def _stopped(
        self, case: int, guilty: set[tuple[str, str]], ran: Ran, name: str
    ) -> dict[str, Any]:
        """The culprit, and what is found where it runs alone."""
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
    """The beginning and the end, where the first error is named and where it all ended."""
    if len(log) <= 2 * SHOWN_CHARS:
        return log
    left_out = len(log) - 2 * SHOWN_CHARS
    return f"{log[:SHOWN_CHARS]}\n[... {left_out} characters ...]\n{log[-SHOWN_CHARS:]}"
