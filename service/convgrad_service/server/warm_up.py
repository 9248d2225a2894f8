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

The other kinds are conv_transpose (with output_padding), avg_pool (with count_include_pad),
adaptive_avg_pool and adaptive_max_pool (with output_size and no window). Poolings may have
ceil_mode. A layer may override batch (a number or a list), dtype and layout. The defaults are
batch 1, float32, channels first, and otherwise PyTorch's.
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
from convgrad.errors import MalformedRequest, ServiceError
from convgrad.layers import Kind
from convgrad.wire.json_tensors import decode_tensor
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import checked_dtype, checked_shape
from convgrad_service.backends.base import ServingBackend
from convgrad_service.backends.cuda.nvrtc import CompileError
from convgrad_service.engine.memory.tensor_layout import count_parts, pieces_of
from convgrad_service.problems import Problem, problem_from

_log = logging.getLogger("convgrad.warm_up")
# The kinds of layers in a file: `Layer.kind`, and operations, whose names may contain `ndim`.
_KINDS: Mapping[str, tuple[Kind, tuple[str, ...]]] = {
    "conv": ("conv", ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")),
    "conv_transpose": ("deconv", ("conv_transpose_fwd", "conv_transpose_backward")),
    "maxpool": ("pool", ("maxpool{}d_fwd", "maxpool{}d_bwd")),
    "avg_pool": ("avg_pool", ("avg_pool_fwd", "avg_pool_bwd")),
    "adaptive_avg_pool": ("adaptive_pool", ("adaptive_avg_pool_fwd", "adaptive_avg_pool_bwd")),
    "adaptive_max_pool": ("adaptive_pool", ("adaptive_max_pool_fwd", "adaptive_max_pool_bwd")),
}


def read_warm_up(path: Path) -> list[Problem]:
    """Read the distinct problems in a warm-up file.

    Raises
    ------
    ValueError
        The file cannot be read or is invalid; the message says where and why.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    found: dict[Problem, None] = {}
    for where, given in _parts(text):
        try:
            for operation, fields in _requests(given):
                found[_problem(operation, fields)] = None
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


def _parts(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the location in the file and the object of each request, or of each layer."""
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None
    if isinstance(whole, list):
        whole = {"layers": whole}
    if isinstance(whole, dict) and isinstance(whole.get("layers"), list):
        for number, layer in enumerate(whole["layers"]):
            known = isinstance(layer, dict)
            name = layer.get("name", "without a name") if known else "without a name"
            yield f"layer {number} ({name})", {**whole, **layer} if known else layer
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError:
                yield f"line {number}", None


def _requests(given: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the operation and the fields of a request, or of each that a layer stands for."""
    if not isinstance(given, dict):
        raise MalformedRequest("expected an object in JSON")
    if "layers" in given:
        yield from _layer_requests(given)
    else:
        yield given.get("operation"), {k: v for k, v in given.items() if k != "operation"}


def _problem(operation: Any, fields: Mapping[str, Any]) -> Problem:
    if not isinstance(operation, str) or operation not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise MalformedRequest(f"expected an operation ({known}), got {shown(operation)}")
    arrays = {name: _array(name, value) for name, value in fields.items()}
    return problem_from(operation, validate(OPERATIONS[operation].request, arrays))


def _array(name: str, value: Any) -> Any:
    """Return a tensor's array, without memory if it has no data; return other values unchanged."""
    if not isinstance(value, Mapping) or not {"dtype", "npy"} & value.keys():
        return value
    if "shape" in value and "data" not in value:
        dtype = checked_dtype(value["dtype"], name=name)
        return np.broadcast_to(np.empty((), dtype.numpy), checked_shape(value["shape"], name=name))
    return decode_tensor(value, name=name)


def _layer_requests(given: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the forward operation and all gradients of a layer, for each of its batches."""
    kind, operations = _KINDS[_field(given, "kind", _KIND)]
    batches = given.get("batch", given.get("N", 1))
    for batch in batches if isinstance(batches, list) else [batches]:
        layer = _layer({**given, "batch": batch}, kind)
        for operation in (name.format(layer.ndim) for name in operations):
            shapes, parameters = layers.arguments(operation, layer)
            dtype = given.get("dtype", "float32")
            tensors = {name: {"shape": shape, "dtype": dtype} for name, shape in shapes.items()}
            yield operation, {**tensors, **parameters}


def _layer(given: Mapping[str, Any], kind: Kind) -> layers.Layer:
    pools, adaptive = kind not in ("conv", "deconv"), kind == "adaptive_pool"
    channels = _field(given, "C", _INT)
    kernel = [] if adaptive else _field(given, "kernel_size", _INTS)
    zeros, ones = [0] * len(kernel), [1] * len(kernel)
    padding = [] if adaptive else _field(given, "padding", _PADDING, zeros)
    return layers.Layer(
        kind=kind,
        batch=_field(given, "batch", _INT),
        in_channels=channels,
        out_channels=channels if pools else _field(given, "K", _INT),
        groups=1 if pools else _field(given, "groups", _INT),
        input_size=tuple(_field(given, "input_size", _INTS)),
        kernel_size=tuple(kernel),
        stride=tuple(_field(given, "stride", _INTS, kernel if pools else ones)),
        padding=tuple((each, each) if isinstance(each, int) else tuple(each) for each in padding),
        dilation=tuple(_field(given, "dilation", _INTS, ones)),
        output_padding=tuple(_field(given, "output_padding", _INTS, zeros)),
        ceil_mode=_field(given, "ceil_mode", _BOOL, False),
        count_include_pad=_field(given, "count_include_pad", _BOOL, True),
        adaptive_size=tuple(_field(given, "output_size", _INTS)) if adaptive else (),
        layout=None if given.get("layout") is None else _field(given, "layout", _TEXT),
    )


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(_are_ints(each) and len(each) == 2 for each in value)


_Expected = tuple[str, Callable[[Any], bool]]
_TEXT: _Expected = "text", lambda value: isinstance(value, str)
_BOOL: _Expected = "true or false", lambda value: isinstance(value, bool)
_INT: _Expected = "an integer", lambda value: type(value) is int
_INTS: _Expected = "a list of integers", _are_ints
_PADDING: _Expected = (
    "a list of integers or of pairs of them",
    lambda value: _are_ints(value) or _are_pairs(value),
)
_KIND: _Expected = (
    f"one of {', '.join(_KINDS)}",
    lambda value: isinstance(value, str) and value in _KINDS,
)


def _field(given: Mapping[str, Any], name: str, expected: _Expected, default: Any = None) -> Any:
    value = given.get(name, default)
    if value is None:
        raise MalformedRequest(f"{name!r} is missing")
    sentence, fits = expected
    if not fits(value):
        raise MalformedRequest(f"{name} is {shown(value)}; expected {sentence}")
    return value
