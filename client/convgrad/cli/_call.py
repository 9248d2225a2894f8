"""``convgrad call``: sends one request with tensors from files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any

from convgrad._call import Answer, Outputs
from convgrad.cli._connection import connect
from convgrad.cli._files import check_output, write_tensors
from convgrad.cli._request import add_operations, request_call
from convgrad.dtypes import DType

__all__ = ["run"]

_DESCRIPTION = """\
Send one request. Tensors come from .npy, .npz or .safetensors files:

  convgrad call conv_bwd_data --input grad_output=gy.npy --input weight=layer.npz:w \\
      --stride 2 --padding 1,1 --output grad_input.npy
"""


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad call`` with these arguments."""
    options = _parser().parse_args(argv)
    output = None if options.output is None else check_output(options.output)
    call = request_call(options)
    with connect(options, options.wire) as client:
        answer = client.call(call)
    if output is not None:
        write_tensors(answer.outputs, output)
    print(_as_json(answer) if options.json else _as_text(answer, options.output))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad call",
        description=_DESCRIPTION,
        epilog="`convgrad call OPERATION --help` lists an operation's own options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for operation in add_operations(parser).values():
        operation.add_argument(
            "--output",
            metavar="FILE",
            help="file to write the outputs to: .npy, .npz or .safetensors",
        )
    return parser


def _as_text(answer: Answer[Outputs], output: str | None) -> str:
    report = answer.report
    lines = [f"{name}: {_dtype(array)} {list(array.shape)}" for name, array in _items(answer)]
    speed = f", {report.flops / report.compute_s / 1e9:.1f} GFLOP/s" if report.compute_s else ""
    lines.append(f"{report.backend} kernel {report.kernel}: {report.compute_s * 1e3:.3f} ms{speed}")
    if output is not None:
        lines.append(f"written to {output}")
    return "\n".join(lines)


def _as_json(answer: Answer[Outputs]) -> str:
    fields = {
        "outputs": {
            name: {"dtype": _dtype(array), "shape": list(array.shape)}
            for name, array in _items(answer)
        },
        "report": answer.report.model_dump(),
        "server_timing_s": answer.server_timing_s,
        "request_id": answer.request_id,
        "attempts": answer.attempts,
    }
    return json.dumps(fields, indent=2)


def _items(answer: Answer[Outputs]) -> Iterable[tuple[str, Any]]:
    return answer.outputs.items()


def _dtype(array: Any) -> str:
    return DType.of(array.dtype) or str(array.dtype)
