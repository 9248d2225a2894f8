"""The options that make a request, from the contract of its operation: what `call` and `bench`
share."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray
from pydantic.fields import FieldInfo

from convgrad._call import Call, Outputs, make_call
from convgrad.cli._connection import add_connection_options
from convgrad.cli._failures import UsageError
from convgrad.cli._files import read_tensor
from convgrad.contract import OPERATIONS, Operation
from convgrad.errors import MalformedRequest

__all__ = [
    "add_operations",
    "known_tensor",
    "named_values",
    "parameter_value",
    "request_call",
    "set_once",
    "shape_of",
]

# Fields that the client sets itself.
_NOT_OPTIONS = frozenset({"response", "stored", "store"})
_PARAMETER = "parameter:"


def add_operations(
    parser: argparse.ArgumentParser,
) -> Mapping[str, argparse.ArgumentParser]:
    """Add a parser per operation, with options for tensors, parameters and the connection."""
    operations = parser.add_subparsers(dest="operation", metavar="OPERATION", required=True)
    return {
        operation.name: _add_options(operations, operation) for operation in OPERATIONS.values()
    }


def request_call(
    options: argparse.Namespace, tensors: Mapping[str, NDArray[Any]] | None = None
) -> Call[Outputs]:
    """Make the Call given by parsed options and further ``tensors``, or raise UsageError."""
    arguments: dict[str, Any] = {
        name.removeprefix(_PARAMETER): value
        for name, value in vars(options).items()
        if name.startswith(_PARAMETER)
    }
    for name, text in named_values("--param", options.param):
        set_once(arguments, name, parameter_value(text))
    for name, source in named_values("--input", options.input):
        set_once(
            arguments, known_tensor("--input", options.operation, name), read_tensor(name, source)
        )
    for name, tensor in (tensors or {}).items():
        set_once(arguments, name, tensor)
    try:
        return make_call(options.operation, arguments, dict)
    except MalformedRequest as refused:  # nothing was sent: the command line is at fault
        raise UsageError(str(refused)) from refused


def known_tensor(option: str, operation: str, name: str) -> str:
    """Return ``name``, or raise UsageError if it is not a tensor of the operation."""
    known = OPERATIONS[operation].tensors
    if name not in known:
        raise UsageError(f"{option}: {operation} takes {', '.join(known)}; it has no {name!r}")
    return name


def named_values(option: str, texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Split each NAME=VALUE into name and value."""
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"{option}: expected NAME=…, got {text!r}")
        yield name, value


def shape_of(name: str, text: str) -> list[int]:
    """Read the shape of tensor ``name``, such as 8x64x56x56."""
    if not re.fullmatch(r"\d{1,9}(x\d{1,9}){0,7}", text):
        raise UsageError(f"--shape: expected {name}=8x64x56x56 or the like, got {text!r}")
    return [int(size) for size in text.split("x")]


def _add_options(
    operations: argparse._SubParsersAction[argparse.ArgumentParser], operation: Operation
) -> argparse.ArgumentParser:
    # No abbreviations: a new option could change the meaning of an existing command line.
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
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter by name, such as stride=2 or padding=1,1; the same as the options below",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
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
    return parser


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
            flag,
            dest=dest,
            type=parameter_value,
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=text,
        )


def set_once(arguments: dict[str, Any], name: str, value: Any) -> None:
    """Set an argument, or raise UsageError if it has been given before."""
    if name in arguments:
        raise UsageError(f"{name} is given twice")
    arguments[name] = value


def parameter_value(text: str) -> Any:
    """Parse JSON (2, [1, 1], true) or a list without brackets (1,1); any other text is a string."""
    for as_json in (text, f"[{text}]") if "," in text else (text,):
        with contextlib.suppress(ValueError):
            return json.loads(as_json)
    return text


def _required_first(operation: Operation) -> list[str]:
    optional = [name for name in operation.tensors if name not in operation.required_tensors]
    return [*operation.required_tensors, *(f"{name} (optional)" for name in optional)]


def _plain(text: str) -> str:
    # argparse %-formats help texts.
    return text.replace("%", "%%")
