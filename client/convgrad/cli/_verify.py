"""``convgrad verify``: compare results in files, or a kernel, with a float64 reference.

Exit status: 0 all checks passed; 1 a check failed or the server returned an error; 2 usage error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import convgrad
from convgrad._display import described
from convgrad.cli._connection import add_connection_options, connect
from convgrad.cli._examined import add_problem_options, problem_fields, tensors_of
from convgrad.cli._failures import UsageError
from convgrad.cli._files import read_tensor
from convgrad.contract import OPERATIONS
from convgrad.contract.verification import Verification
from convgrad.errors import ClientError, ConvgradError
from convgrad.layers import operations_of

__all__ = ["run"]

_DESCRIPTION = """\
Compare results with a float64 reference, element by element. The tensors that they were computed
from are read from files, or drawn from a seed as convgrad.check.draw does:

  convgrad verify conv_bwd_data --layer mb2ic64ih56oc64oh56kh3ph1 --seed 7 --mine out.npy
  convgrad verify conv_bwd_data --layer ck_headline --kernel mykernels:bwd_data --local
  convgrad verify conv_bwd_data --suite resnet50 --batch 1 --kernel mykernels:bwd_data
"""


def run(argv: Sequence[str]) -> int:
    """Run ``convgrad verify`` with these arguments."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.mine is None) == (options.kernel is None):
        raise UsageError("expected either --mine FILE or --kernel MODULE:FUNCTION")
    if options.suite is not None and (options.layer is not None or options.mine is not None):
        raise UsageError("--suite needs --kernel and replaces --layer")
    if options.local:
        return _verified(options, None)
    with connect(options) as client:
        return _verified(options, client)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convgrad verify",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_problem_options(parser, files=True)
    parser.add_argument(
        "--suite", help="run --kernel on all layers of this suite (`convgrad layers` lists them)"
    )
    parser.add_argument(
        "--mine",
        action="append",
        metavar="[OUTPUT=]FILE[:KEY]",
        help="your result, .npy, .npz or .safetensors; may be repeated for several outputs",
    )
    for name, text in (
        ("--second", "the result of a second run, which must have the same bits"),
        ("--doubled", "the result with the operation's first tensor doubled"),
    ):
        parser.add_argument(
            name, action="append", default=[], metavar="[OUTPUT=]FILE[:KEY]", help=text
        )
    parser.add_argument(
        "--linear",
        action="append",
        default=[],
        metavar="TENSOR=FILE,FILE",
        help="results for the first output with this tensor x replaced by y, and by x + y; "
        "convgrad.check.linear_pair(TENSOR, x, seed) returns y and x + y",
    )
    parser.add_argument(
        "--kernel",
        metavar="MODULE:FUNCTION",
        help="a function to run in this process on drawn tensors: on integers and on normal "
        "numbers, each twice and again with changed tensors to check linearity",
    )
    parser.add_argument(
        "--local", action="store_true", help="compare in this process, without a server"
    )
    parser.add_argument(
        "--factors",
        metavar="HOW",
        help="how your kernel rounds factors: exact, tf32, tf32_truncated or bfloat16 (default: "
        "tf32 with precision=high, otherwise exact)",
    )
    parser.add_argument(
        "--sums",
        metavar="HOW",
        help="how it rounds sums: float32, to nearest (default), or tensor_core, truncated",
    )
    add_connection_options(parser)
    return parser


def _verified(options: argparse.Namespace, client: convgrad.Client | None) -> int:
    found: Iterator[tuple[str, Verification | ConvgradError]]
    found = _of_kernel(options, client) if options.kernel else _of_files(options, client)
    passed = True
    answers: list[dict[str, Any]] = []
    for name, verification in found:
        if isinstance(verification, ConvgradError):
            passed = False
            answers.append({"name": name, "passed": False, "error": str(verification)})
            if not options.json:
                print(f"{name}: not verified: {verification}", flush=True)
            continue
        passed = passed and verification.passed
        if options.json:
            answers.append({"name": name, **verification.json_values()})
        else:
            if options.kernel:
                print(name)
            print(convgrad.check.report(verification), flush=True)
    if options.json:
        print(json.dumps(answers if options.suite or options.kernel else answers[0], indent=2))
    return 0 if passed else 1


def _of_files(
    options: argparse.Namespace, client: convgrad.Client | None
) -> Iterator[tuple[str, Verification]]:
    fields = problem_fields(options)
    judged = {
        role: _results(options.operation, given)
        for role, given in (
            ("result", options.mine),
            ("second", options.second),
            ("doubled", options.doubled),
        )
    }
    result = judged.pop("result")
    more: dict[str, Any] = {role: arrays for role, arrays in judged.items() if arrays}
    if options.linear:
        more["linear"] = dict(_pair(options.operation, each) for each in options.linear)
    if client is not None:
        yield options.operation, client.verify(options.operation, result, **more, **fields)
        return
    how = {name: fields.pop(name) for name in ("factors", "sums") if name in fields}
    arguments = tensors_of(options.operation, fields)
    yield (
        options.operation,
        convgrad.check.bounded(options.operation, result, **more, **how, **arguments),
    )


def _results(operation: str, given: Sequence[str]) -> dict[str, Any]:
    known = OPERATIONS[operation].outputs
    found = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = known[0], text
        if name not in known:
            raise UsageError(
                f"--mine: {operation} has no output {name!r}; expected {', '.join(known)}"
            )
        found[name] = read_tensor(name, source)
    return found


def _pair(operation: str, given: str) -> tuple[str, tuple[Any, Any]]:
    tensor, _, sources = given.partition("=")
    addend, comma, total = sources.partition(",")
    if tensor not in OPERATIONS[operation].tensors or not comma:
        raise UsageError(f"--linear: expected TENSOR=FILE,FILE, got {given!r}")
    output = OPERATIONS[operation].outputs[0]
    return tensor, (read_tensor(output, addend), read_tensor(output, total))


def _of_kernel(
    options: argparse.Namespace, client: convgrad.Client | None
) -> Iterator[tuple[str, Verification | ConvgradError]]:
    """Yield the verifications of each layer; of a suite's layer also an error."""
    function = _reported(options.kernel, _function(options.kernel))
    fields = problem_fields(options)
    words = [fields.pop("layer", None)]
    if options.suite is not None:
        suite = [each.layer for each in convgrad.layers.suite(options.suite)]
        fitting = [each for each in suite if options.operation in operations_of(each)]
        if not fitting:
            raise UsageError(f"--suite: {options.operation} takes no layer of {options.suite}")
        words = [each.name for each in fitting]
    known = ("dtype", "layout", "batch", "seed", "factors", "sums")
    more = {name: fields.pop(name) for name in known if name in fields}
    if fields:
        raise UsageError(
            f"--kernel does not take {', '.join(fields)}: its tensors follow from the layer"
        )
    for layer in words:
        if layer is None:
            raise UsageError("--kernel needs --layer or --suite")
        verify = None if client is None else client.verify
        try:
            found = convgrad.check.kernel(function, options.operation, layer, verify=verify, **more)
        except ConvgradError as error:
            if options.suite is None:
                raise
            yield layer, error
            continue
        for gate, verification in found.gates.items():
            yield f"{layer}, {gate} inputs", verification


def _reported(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` with its exceptions printed, and raised as errors that show the call."""

    def run(**arguments: Any) -> Any:
        try:
            return kernel(**arguments)
        except Exception as error:
            traceback.print_exc()
            called = ", ".join(f"{key}={described(value)}" for key, value in arguments.items())
            raise ClientError(f"{name}({called}) raised {type(error).__name__}: {error}") from error

    return run


def _function(text: str) -> Callable[..., Any]:
    module, colon, name = text.partition(":")
    if not colon:
        raise UsageError(f"--kernel: expected MODULE:FUNCTION, got {text!r}")
    # As with `python -m`, modules in the current directory are found.
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as refused:
        raise UsageError(f"--kernel: {refused}") from refused
    return found
