"""``convgrad bench``: times an operation on a server, both the whole call and the kernel."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad._call import Answer, Outputs
from convgrad._client import Client
from convgrad.cli._connection import connect
from convgrad.cli._failures import UsageError
from convgrad.cli._request import (
    add_operations,
    known_tensor,
    named_values,
    request_call,
    shape_of,
)
from convgrad.contract import OPERATIONS, Report
from convgrad.dtypes import FLOATING, DType

__all__ = ["run"]

_DESCRIPTION = """\
Time one operation on a server, one call after another over one connection:

  convgrad bench conv_bwd_data --shape grad_output=8x64x56x56 --shape weight=64x64x3x3 \\
      --padding 1 --dtype bfloat16 --repeats 100

Tensors come from files (--input), or have a shape (--shape) and random elements.
"""
_PERCENTILES = (50, 90, 99)


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad bench`` with these arguments."""
    options = _parser().parse_args(argv)
    for option, given, least in (("warm-up", options.warm_up, 0), ("repeats", options.repeats, 1)):
        if given < least:
            raise UsageError(f"--{option}: expected at least {least}, got {given}")
    call = request_call(options, _random_tensors(options))
    with connect(options, options.wire) as client:
        for _ in range(options.warm_up):
            client.call(call)
        calls = [_timed(client, call) for _ in range(options.repeats)]
    found = _found(calls)
    print(json.dumps(found, indent=2) if options.json else _as_text(options.operation, found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad bench",
        description=_DESCRIPTION,
        epilog="`convgrad bench OPERATION --help` lists an operation's own options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for operation in add_operations(parser).values():
        operation.add_argument(
            "--shape",
            action="append",
            default=[],
            metavar="NAME=8x64x56x56",
            help="a tensor of this shape with standard normal elements; may be repeated",
        )
        operation.add_argument(
            "--dtype",
            choices=[dtype.value for dtype in FLOATING],
            default=DType.FLOAT32.value,
            help="dtype of the tensors given by --shape (default: %(default)s)",
        )
        operation.add_argument(
            "--warm-up",
            type=int,
            default=3,
            metavar="N",
            help="calls before those that are timed (default: %(default)s)",
        )
        operation.add_argument(
            "--repeats",
            type=int,
            default=30,
            metavar="N",
            help="timed calls (default: %(default)s)",
        )
    return parser


def _random_tensors(options: argparse.Namespace) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {}
    for name, text in named_values("--shape", options.shape):
        known_tensor("--shape", options.operation, name)
        if name == "indices":
            raise UsageError("--shape: indices cannot be random; take them from a file (--input)")
        if name in tensors:
            raise UsageError(f"{name} is given twice")
        shape = shape_of(name, text)
        try:
            values = rng.standard_normal(shape, dtype=np.float32)
        except (MemoryError, ValueError):
            count = f"{math.prod(shape):,} elements"
            raise UsageError(f"--shape: {name} has {count}, too many for this memory") from None
        tensors[name] = values.astype(DType(options.dtype).numpy)
    if not tensors and not options.input:
        needed = " ".join(
            f"--shape {name}=…" for name in OPERATIONS[options.operation].required_tensors
        )
        raise UsageError(f"expected tensors: {needed}")
    return tensors


def _timed(client: Client, call: Any) -> tuple[float, Answer[Outputs]]:
    began_s = time.perf_counter()
    answer = client.call(call)
    return time.perf_counter() - began_s, answer


def _found(calls: Sequence[tuple[float, Answer[Outputs]]]) -> dict[str, Any]:
    """Summarize the calls in seconds, FLOP/s and bytes/s; the rates are those of the median."""
    answers = [answer for _, answer in calls]
    report: Report = answers[-1].report
    call_s = _spread([seconds for seconds, _ in calls])
    compute_s = _spread([answer.report.compute_s for answer in answers])
    stages = [answer.server_timing_s for answer in answers]
    median_s = compute_s["p50"]
    return {
        "backend": report.backend,
        "kernels": sorted({answer.report.kernel for answer in answers}),
        "outputs": {
            name: f"{array.dtype}{list(array.shape)}" for name, array in answers[-1].outputs.items()
        },
        "repeats": len(calls),
        "attempts": sum(answer.attempts for answer in answers),
        "call_s": call_s,
        "compute_s": compute_s,
        "stages_s": {
            stage: float(np.median([each.get(stage, 0.0) for each in stages]))
            for stage in stages[-1]
        },
        "flops": report.flops,
        "bytes": report.bytes,
        "flops_per_s": report.flops / median_s if median_s else None,
        "bytes_per_s": report.bytes / median_s if median_s else None,
    }


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles by nearest rank, so that each is a measured time."""
    ranks = np.percentile(seconds, _PERCENTILES, method="inverted_cdf")
    named = {f"p{rank}": float(value) for rank, value in zip(_PERCENTILES, ranks, strict=True)}
    return {"min": min(seconds), **named, "max": max(seconds)}


def _as_text(operation: str, found: Mapping[str, Any]) -> str:
    spread = found["call_s"].keys()
    lines = [
        f"{operation} on {found['backend']}: {', '.join(found['kernels'])}",
        *(f"{name}: {described}" for name, described in found["outputs"].items()),
        "",
        f"{found['repeats']:,} calls, ms".ljust(20) + "".join(f"{name:>10}" for name in spread),
        _row("the whole call", found["call_s"]),
        _row("the kernel", found["compute_s"]),
        "",
        "on the server, median ms: "
        + ", ".join(f"{stage} {each * 1e3:.3f}" for stage, each in found["stages_s"].items()),
    ]
    if found["flops_per_s"] is not None:
        lines.append(
            f"the kernel, median: {found['flops_per_s'] / 1e9:,.1f} GFLOP/s, "
            f"{found['bytes_per_s'] / 1e9:,.2f} GB/s"
        )
    if found["attempts"] > found["repeats"]:
        lines.append(f"{found['attempts'] - found['repeats']:,} attempts were repeated")
    return "\n".join(lines)


def _row(name: str, seconds: Mapping[str, float]) -> str:
    return name.ljust(20) + "".join(f"{each * 1e3:10.3f}" for each in seconds.values())
