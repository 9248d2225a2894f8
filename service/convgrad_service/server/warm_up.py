"""``--warm-up FILE``: problems that a worker computes once before it is ready.

Requests like them then wait neither for a compiler nor for first-time allocations. The file has one
request per line, as it would be posted, plus its operation:

    {"operation": "conv_fwd", "input": {"shape": [8, 64, 28, 28], "dtype": "bfloat16"}, ...}

A tensor is a shape and a dtype, or any form valid in a request. Alternatively the file is a list of
network layers; the forward operation and all gradients of each are computed:

    {"batch": 8, "dtype": "bfloat16", "layout": "NHWC", "layers": [
        {"kind": "conv", "ndim": 2, "C": 64, "K": 64, "groups": 1, "input_size": [28, 28],
         "output_size": [28, 28], "kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1],
         "dilation": [1, 1]},
        {"kind": "maxpool", ...}]}

A layer may override batch (a number or a list), dtype and layout. The defaults are batch 1, float32
and channels first.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convgrad import layers
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, ServiceError
from convgrad.layers import Kind
from convgrad.wire.json_tensors import decode_tensor
from convgrad_service.backends.base import ServingBackend
from convgrad_service.backends.cuda.nvrtc import CompileError
from convgrad_service.engine.memory.tensor_layout import count_parts, pieces_of
from convgrad_service.problems import Problem, problem_from

_log = logging.getLogger("convgrad.warm_up")
# The kinds of layers in a file: `Layer.kind`, and operations, whose names may contain `ndim`.
_KINDS: Mapping[str, tuple[Kind, tuple[str, ...]]] = {
    "conv": ("conv", ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")),
    "maxpool": ("pool", ("maxpool{}d_fwd", "maxpool{}d_bwd")),
}


def read_warm_up(path: Path) -> list[Problem]:
    """Read the distinct problems in a warm-up file.

    Raises
    ------
    ValueError
        The file cannot be read or is invalid; the message says where and why.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    found: dict[Problem, None] = {}
    for where, operation, fields in _requests(text):
        try:
            if operation not in OPERATIONS:
                known = ", ".join(OPERATIONS)
                raise ValueError(f"expected an operation ({known}), got {operation!r}")
            arrays = {name: _array(name, value) for name, value in fields.items()}
            request = validate(OPERATIONS[operation].request, arrays)
            found[problem_from(operation, request)] = None
        except (ServiceError, ValueError) as error:
            raise ValueError(f"{path}, {where}: {error}") from None
    return list(found)


def warm_up(path: Path, backend: ServingBackend) -> None:
    """Compile the kernels of the file's problems concurrently, then compute each problem once.

    Problems that cannot be computed are logged and skipped.
    """
    started_s = time.monotonic()
    problems = [
        piece.problem
        for problem in read_warm_up(path)
        for piece in pieces_of(problem, count_parts(problem))
    ]
    problems = list(dict.fromkeys(problems))
    for problem in problems:
        # Start all compilations before running, and so waiting for, the first problem.
        _attempt(problem, partial(backend.compile_ahead, [problem]))
    done = [_attempt(problem, partial(_run, backend, problem)) for problem in problems]
    took_s = time.monotonic() - started_s
    _log.info("warmed up in %.1f s: %d of %d problems computed", took_s, sum(done), len(done))


def _run(backend: ServingBackend, problem: Problem) -> None:
    tensors = {
        name: np.zeros(spec.shape, spec.dtype.numpy) for name, spec in problem.inputs.items()
    }
    backend.run(problem, tensors)


def _attempt(problem: Problem, action: Callable[[], object]) -> bool:
    try:
        action()
    except (ServiceError, CompileError) as error:
        _log.warning("%s of the warm-up cannot be computed: %s", problem, error)
        return False
    return True


def _requests(text: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the location in the file, the operation and the fields of each request."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, list):
        whole = {"layers": whole}
    if isinstance(whole, dict) and "layers" in whole:
        defaults = {key: value for key, value in whole.items() if key != "layers"}
        for number, layer in enumerate(whole["layers"]):
            yield from _layer_requests(f"layer {number}", {**defaults, **layer})
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"line {number}"
            try:
                fields = json.loads(line)
                operation = fields.pop("operation", None)
            except (json.JSONDecodeError, AttributeError, TypeError):
                raise ValueError(f"{where}: expected an object in JSON") from None
            yield where, operation, fields


def _array(name: str, value: Any) -> Any:
    """Return a tensor's array, without memory if it has no data; return other values unchanged."""
    if not isinstance(value, Mapping) or not {"dtype", "npy"} & value.keys():
        return value
    if "shape" in value and "data" not in value:
        return np.broadcast_to(np.empty((), DType(value["dtype"]).numpy), tuple(value["shape"]))
    return decode_tensor(value, name=name)


def _layer_requests(
    where: str, given: Mapping[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the forward operation and all gradients of a layer, for each of its batches."""
    where = f"{where} ({given.get('name', 'without a name')})"
    batches = given.get("batch", given.get("N", 1))
    try:
        kind, operations = _KINDS[given["kind"]]
        for batch in batches if isinstance(batches, list) else [batches]:
            layer = _layer(given, kind, batch)
            for operation in (name.format(layer.ndim) for name in operations):
                shapes, parameters = layers.arguments(operation, layer)
                dtype = given.get("dtype", "float32")
                tensors = {name: {"shape": shape, "dtype": dtype} for name, shape in shapes.items()}
                yield where, operation, {**tensors, **parameters}
    except KeyError as missing:
        raise ValueError(f"{where}: {missing} is missing") from None
    except MalformedRequest as error:
        raise ValueError(f"{where}: {error}") from None


def _layer(given: Mapping[str, Any], kind: Kind, batch: int) -> layers.Layer:
    kernel, pools = given["kernel_size"], kind == "pool"
    padding = given.get("padding", [0] * len(kernel))
    return layers.Layer(
        kind=kind,
        batch=batch,
        in_channels=given["C"],
        out_channels=given["C"] if pools else given["K"],
        groups=1 if pools else given["groups"],
        input_size=tuple(given["input_size"]),
        kernel_size=tuple(kernel),
        stride=tuple(given.get("stride", kernel if pools else [1] * len(kernel))),
        padding=tuple((each, each) if isinstance(each, int) else tuple(each) for each in padding),
        dilation=tuple(given.get("dilation", [1] * len(kernel))),
        layout=given.get("layout"),
    )
