"""``convgrad call``: one request from files, its options made from the operation's contract."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from convgrad._call import Answer, Call, Outputs, make_call
from convgrad.cli._connection import add_connection_options, connect
from convgrad.cli._failures import UsageError
from convgrad.cli._files import check_output, read_tensor, write_tensors
from convgrad.contract import OPERATIONS, Operation
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest

__all__ = ["run"]

_DESCRIPTION = """\
Send one request. Tensors come from .npy, .npz or .safetensors files:

  convgrad call conv_bwd_data --input grad_output=gy.npy --input weight=layer.npz:w \\
      --stride 2 --padding '[1, 1]' --output grad_input.npy
"""
# The form of tensors in a JSON answer is between the client and the server alone.
_NOT_OPTIONS = frozenset({"response", "stored", "store"})
_PARAMETER = "parameter:"


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad call`` with these arguments."""
    options = _parser().parse_args(argv)
    output = None if options.output is None else check_output(options.output)
    call = _call(options)
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
    operations = parser.add_subparsers(dest="operation", metavar="OPERATION", required=True)
    for operation in OPERATIONS.values():
        _add_options(operations, operation)
    return parser


def _add_options(
    operations: argparse._SubParsersAction[argparse.ArgumentParser], operation: Operation
) -> None:
    # Abbreviations would let a new option change what an old command line means.
    parser = operations.add_parser(
        operation.name,
        help=_plain(operation.summary),
        description=operation.summary,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE[:KEY]",
        help=f"a tensor: {', '.join(_required_first(operation))}; may be repeated",
    )
    parser.add_argument(
        "--output", metavar="FILE", help="where to write what comes back: .npy, .npz, .safetensors"
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter by name, as JSON or bare text; the same as the options below",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--wire",
        choices=("safetensors", "json"),
        default="safetensors",
        help="the form of the body (default: %(default)s)",
    )
    parameters = parser.add_argument_group("parameters")
    for name, field in operation.request.model_fields.items():
        if name not in operation.tensors and name not in _NOT_OPTIONS:
            _add_parameter(parameters, name, field)
    add_connection_options(parser)


def _add_parameter(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = _plain(field.description or "")
    dest = f"{_PARAMETER}{name}"
    if isinstance(field.default, bool):
        group.add_argument(
            flag,
            dest=dest,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        group.add_argument(
            flag, dest=dest, type=_value, metavar="VALUE", default=argparse.SUPPRESS, help=text
        )


def _call(options: argparse.Namespace) -> Call[Outputs]:
    arguments: dict[str, Any] = {
        name.removeprefix(_PARAMETER): value
        for name, value in vars(options).items()
        if name.startswith(_PARAMETER)
    }
    for name, text in _pairs("--param", options.param):
        _set(arguments, name, _value(text))
    known = OPERATIONS[options.operation].tensors
    for name, source in _pairs("--input", options.input):
        if name not in known:
            raise UsageError(
                f"--input: {options.operation} takes {', '.join(known)}; it has no {name!r}"
            )
        _set(arguments, name, read_tensor(name, source))
    try:
        return make_call(options.operation, arguments, dict)
    except MalformedRequest as refused:  # nothing was sent: the command line is at fault
        raise UsageError(str(refused)) from refused


def _set(arguments: dict[str, Any], name: str, value: Any) -> None:
    if name in arguments:
        raise UsageError(f"{name} is given twice")
    arguments[name] = value


def _pairs(option: str, texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option}: expected NAME=…, got {text!r}")
        yield name, value


def _value(text: str) -> Any:
    """JSON where it is JSON (2, [1, 1], true), else the text itself (NHWC)."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _required_first(operation: Operation) -> list[str]:
    optional = [name for name in operation.tensors if name not in operation.required_tensors]
    return [*operation.required_tensors, *(f"{name} (optional)" for name in optional)]


def _plain(text: str) -> str:
    # argparse formats help with %.
    return text.replace("%", "%%")


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
