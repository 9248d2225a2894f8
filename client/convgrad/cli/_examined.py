"""Command-line options that describe a problem to verify, time or explain."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from typing import Any

import convgrad
from convgrad.cli._files import read_tensor
from convgrad.cli._request import (
    known_tensor,
    named_values,
    parameter_value,
    set_once,
    shape_of,
)
from convgrad.contract import OPERATIONS

__all__ = ["add_problem_options", "problem_fields", "tensors_of"]

_FIELDS = ("layer", "batch", "dtype", "layout", "seed", "distribution", "factors", "sums")


def add_problem_options(parser: argparse.ArgumentParser, *, files: bool = False) -> None:
    """Add the operation, the options that describe a problem, and --json.

    With ``files``, tensors may come from files (--input) instead of being drawn.
    """
    parser.add_argument(
        "operation",
        choices=tuple(OPERATIONS),
        metavar="OPERATION",
        help="such as conv_bwd_data; `convgrad operations` lists all",
    )
    group = parser.add_argument_group("problem")
    group.add_argument(
        "--layer",
        help="a name that `convgrad layers` lists, a benchdnn problem, a MIOpenDriver command, a "
        "PyTorch module and its input's shape, or an ONNX node and its shapes",
    )
    group.add_argument(
        "--batch", type=int, metavar="N", help="number of samples; overrides the layer's"
    )
    group.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=8x64x56x56",
        help="shape of a tensor, without --layer or not defined by it; may be repeated",
    )
    group.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32", "float64"),
        help="of drawn tensors (default: the layer's, or float32)",
    )
    group.add_argument("--layout", help="such as NHWC (default: channels first)")
    group.add_argument(
        "--seed", type=int, metavar="N", help="seed of the drawn tensors (default: 0)"
    )
    group.add_argument(
        "--distribution",
        choices=("normal", "uniform", "integers"),
        help="of drawn elements (default: normal)",
    )
    if files:
        group.add_argument(
            "--input",
            action="append",
            default=[],
            metavar="NAME=FILE[:KEY]",
            help="a tensor of the operation; those not given are drawn",
        )
    group.add_argument(
        "--param",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the operation, such as stride=2 or padding=1,1",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")


def problem_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields given by the options."""
    fields = {
        name: value for name in _FIELDS if (value := getattr(options, name, None)) is not None
    }
    for name, text in named_values("--param", options.param):
        set_once(fields, name, parameter_value(text))
    shapes: dict[str, Any] = {}
    for name, text in named_values("--shape", options.shape):
        known_tensor("--shape", options.operation, name)
        set_once(shapes, name, shape_of(name, text))
    if shapes:
        set_once(fields, "shapes", shapes)
    for name, source in named_values("--input", getattr(options, "input", [])):
        known_tensor("--input", options.operation, name)
        set_once(fields, name, read_tensor(name, source))
    return fields


def tensors_of(operation: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation's tensors and parameters; generate missing tensors as a server does."""
    given = dict(fields)
    words, batch = given.pop("layer", None), given.pop("batch", None)
    dtype, seed = given.pop("dtype", None), given.pop("seed", 0)
    distribution = given.pop("distribution", "normal")
    shapes: dict[str, Any] = given.pop("shapes", {})
    parameters: dict[str, Any] = {}
    plane = None
    if words is not None:
        layer = convgrad.layers.parse(words)
        layer = layer if batch is None else layer.with_batch(batch)
        dtype, plane = dtype or layer.dtype, math.prod(layer.input_size)
        own, parameters = convgrad.layers.arguments(operation, layer, given.get("layout"))
        shapes = {**own, **shapes}
    missing = {name: shape for name, shape in shapes.items() if name not in given}
    drawn = {
        name: convgrad.check.spread_indices(shape, plane, given.get("layout"))
        if name == "indices" and plane is not None
        else convgrad.check.draw(name, shape, dtype or "float32", seed, distribution)
        for name, shape in missing.items()
    }
    return {**parameters, **drawn, **given}
