"""Turns an inference request into the operation's named fields, ready to be validated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, Operation
from convgrad.errors import MalformedRequest, NotFound
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import Buffer
from convgrad_service.engine.request import blank
from convgrad_service.oip.request import InferInput, InferRequest, Span, parsed

__all__ = [
    "VERSION",
    "described",
    "operation_named",
    "output_fields",
    "request_fields",
    "tensor_in",
]

VERSION = "1"
"""The only version of every model."""


def operation_named(model: str, version: str = "") -> Operation:
    """Return the operation with a model's name; ``version`` is "" if the request has none.

    Raises
    ------
    NotFound
        There is no such operation, or no such version of it.
    """
    operation = OPERATIONS.get(model)
    if operation is None:
        raise NotFound(f"there is no model {shown(model)}; the models are {', '.join(OPERATIONS)}")
    if version not in ("", VERSION):
        raise NotFound(f"{model} has no version {shown(version)}; it has {VERSION}")
    return operation


def request_fields(
    request: InferRequest, array_of: Callable[[InferInput], NDArray[Any]]
) -> dict[str, Any]:
    """Return the fields of the operation's request: parameters, and inputs by ``array_of``.

    Raises
    ------
    MalformedRequest
        A parameter cannot be read, has the name of an input, or contradicts the named outputs.
    """
    operation = request.operation
    parameters = parsed(request.parameters)
    for name in parameters:
        if name in operation.tensors:
            raise MalformedRequest(
                f"{shown(name)} is given as a parameter; {operation.name} takes it as an input"
            )
    named = output_fields(operation, [output.name for output in request.outputs])
    for name, value in named.items():
        if name in parameters and not _agree(parameters[name], value):
            raise MalformedRequest(
                f"the parameter {shown(name)} is {shown(parameters[name])}, but the request's "
                f"outputs ask for {shown(value)}; expected them to agree, or one of them alone"
            )
    tensors = {tensor.name: array_of(tensor) for tensor in request.inputs}
    return {**parameters, **named, **tensors}


def output_fields(operation: Operation, names: list[str]) -> Mapping[str, Any]:
    """Return the fields that request the outputs ``names``; none if ``names`` is empty."""
    fields = operation.request.model_fields
    if not names:
        return {}
    if "outputs" in fields:
        return {"outputs": names}
    if "return_indices" in fields and "indices" in names:
        return {"return_indices": True}
    return {}


def _agree(given: Any, named: Any) -> bool:
    if isinstance(given, list) and isinstance(named, list):
        return sorted(map(str, given)) == sorted(named)
    return bool(given == named)


def described(tensor: InferInput) -> NDArray[Any]:
    """Return an input's array if it was sent as JSON, else a blank of its shape and dtype."""
    source = tensor.source
    if isinstance(source, np.ndarray):
        return source
    return blank(tensor.shape, tensor.dtype, name=tensor.name)


def tensor_in(buffer: Buffer, tensor: InferInput) -> NDArray[Any]:
    """Return an input as a read-only view of ``buffer``, which need not be aligned."""
    source = tensor.source
    if not isinstance(source, Span):
        assert isinstance(source, np.ndarray)  # noqa: S101 - a message holds no other form
        return source
    count = math.prod(tensor.shape)
    array: NDArray[Any] = np.frombuffer(buffer, tensor.dtype.numpy, count, source.start)
    array = array.reshape(tensor.shape)
    array.flags.writeable = False
    return array
