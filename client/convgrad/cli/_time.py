"""``convgrad time`` and ``convgrad plan``: time an operation on a server, or explain its plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from convgrad.cli._connection import add_connection_options, connect
from convgrad.cli._examined import add_problem_options, problem_fields
from convgrad.contract.timing import PlanExplained, TimedPlan, TimingReport

__all__ = ["run"]

_SENTENCES = {
    "time": "Have a server time an operation, with the device to itself.",
    "plan": "Have a server explain which kernel would run, and why the others would not.",
}


def run(argv: Sequence[str], command: str) -> int:
    """Run ``convgrad time`` or ``convgrad plan`` with these arguments."""
    parser = argparse.ArgumentParser(
        prog=f"convgrad {command}", description=_SENTENCES[command], allow_abbrev=False
    )
    add_problem_options(parser)
    if command == "time":
        _add_timing_options(parser)
    add_connection_options(parser)
    options = parser.parse_args(argv)
    fields = problem_fields(options)
    with connect(options) as client:
        found: TimedPlan | PlanExplained
        if command == "time":
            found = client.time(options.operation, **fields, **_timing_fields(options))
        else:
            found = client.plan(options.operation, **fields)
    print(found.model_dump_json(indent=2) if options.json else "\n".join(_lines(found)))
    return 0


def _add_timing_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("timing")
    group.add_argument(
        "--standard-error",
        type=float,
        metavar="RATIO",
        help="relative standard error of the mean at which sampling stops (default: 0.005)",
    )
    group.add_argument(
        "--budget-s",
        type=float,
        metavar="SECONDS",
        help="limit of the time for sampling (default and maximum: the server's, usually 5)",
    )
    group.add_argument("--peers", choices=("auto", "none"), help="none skips PyTorch")
    group.add_argument(
        "--candidates", action="store_true", help="also time the kernels that were passed over"
    )


def _timing_fields(options: argparse.Namespace) -> dict[str, Any]:
    names = ("standard_error", "budget_s", "peers")
    fields = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in fields.items() if value is not None}
    return {**given, "candidates": True} if options.candidates else given


def _lines(found: TimedPlan | PlanExplained) -> Iterator[str]:
    layer = "" if found.layer is None else f" {found.layer}"
    yield f"{found.operation}{layer} on {found.device.name}"
    plan, reference = found.plan, found.reference
    pieces = "1 piece" if plan.pieces == 1 else f"{plan.pieces} pieces"
    yield f"  {plan.kernel}, {plan.workspace_bytes:,} bytes of workspace, {pieces}"
    for passed in plan.passed_over:
        yield f"    not {passed.kernel}: {passed.reason}"
    yield (
        f"  {found.flops:,} FLOPs, {found.bytes:,} bytes; roofline {_time(reference.seconds)}, "
        f"limited by {reference.limited_by}"
    )
    if isinstance(found, TimedPlan):
        yield from _timings("", found.timings)
        for peer in found.peers:
            yield from _timings(f"{peer.name} ", peer.timings)
            if peer.reason is not None:
                yield f"  {peer.name}: {peer.reason}"
        for candidate in found.candidates:
            if not candidate.chosen:
                measured = candidate.measured_s
                text = _time(measured) if measured is not None else candidate.reason
                yield f"  candidate {candidate.kernel}: {text}"
        clocks = found.clocks_after
        if clocks is not None and clocks.sm_hz is not None:
            power = f", {clocks.power_w:.0f} W" if clocks.power_w is not None else ""
            yield f"  clock {clocks.sm_hz / 1e6:.0f} MHz{power}"
    if found.again is not None:
        yield f"  repeat with: {found.again.command}"


def _timings(whose: str, timings: dict[str, TimingReport]) -> Iterator[str]:
    for way, timed in timings.items():
        settled = "" if timed.converged else ", not converged"
        yield (
            f"  {whose}{way}: {_time(timed.median_s)} (5 to 95 %: {_time(timed.p05_s)} to "
            f"{_time(timed.p95_s)}, {timed.samples} samples{settled}), "
            f"{timed.flops_per_s / 1e9:.1f} GFLOP/s, {timed.bytes_per_s / 1e9:.1f} GB/s, "
            f"{timed.reference_share:.0%} of the roofline"
        )


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.1f} us"
