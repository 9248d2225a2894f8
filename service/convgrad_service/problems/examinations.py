"""Problems about a problem: a result to verify, a computation to time, a plan to explain.

They are scheduled like other problems. Random inputs, and outputs computed for comparison, are
outputs in the sense of `Problem`: memory of the request that is written but not sent. The response
is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad import layers
from convgrad.contract.base import validate
from convgrad.contract.examinations import (
    PlanRequest,
    TimeRequest,
    VerifyRequest,
    operation_examined,
)
from convgrad.contract.judged_results import judged_results
from convgrad.contract.operations import Operation
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem, MalformedRequest
from convgrad_service.problems.base import Lane, Piece, Problem, TensorSpec

__all__ = ["DRAWN", "OURS", "Examination", "Explain", "TimeIt", "Verify", "examination_from"]

DRAWN, OURS = "drawn_", "ours_"
"""Prefixes of the names of random inputs, and of outputs computed for comparison."""

# The work of a reference (value, sum of magnitudes, adjoint), as a multiple of the operation's.
_PASSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination(Problem):
    """What all of them share.

    Attributes
    ----------
    subject : Problem
        The problem that is verified, timed or explained.
    drawn : tuple of str
        Inputs drawn at random, by ``seed`` and ``distribution``.
    parameters, asked : str
        The operation's parameters and the request's own fields, as JSON.
    """

    subject: Problem
    name: str
    drawn: tuple[str, ...]
    seed: int
    distribution: str
    parameters: str
    asked: str
    layer: str | None

    @property
    def dtype(self) -> DType:  # type: ignore[override]
        return self.subject.dtype

    @property
    def operation(self) -> str:
        return self.name

    @property
    def computes(self) -> tuple[Problem, ...]:
        """See `Problem.computes`."""
        return (self.subject,)

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return {}

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        drawn = {f"{DRAWN}{name}": self.subject.inputs[name] for name in self.drawn}
        own = {f"{OURS}{name}": spec for name, spec in self.subject.outputs.items()}
        return {**drawn, **own}

    @property
    def flops(self) -> int:
        return self.subject.flops

    @property
    def valid_flops(self) -> int:
        return self.subject.valid_flops

    def _cut(self, parts: int) -> tuple[Piece, ...]:
        return (Piece.whole(self),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify(Examination):
    """A check of results against a float64 reference.

    ``given`` are the operation's tensors in the request, ``judged`` the results to check.
    """

    given: tuple[str, ...]
    judged: tuple[tuple[str, TensorSpec], ...]
    factors: str | None
    sums: str

    lane = Lane.LONG

    @property
    def batch(self) -> int:
        """The number of samples; a reference can be computed sample by sample."""
        shapes = (getattr(self.subject, name, None) for name in ("conv", "conv0", "pool"))
        return next((int(shape.batch) for shape in shapes if shape is not None), 1)

    @property
    def sample_elements(self) -> int:
        """The elements of the largest tensor in one sample."""
        specs = (*self.subject.inputs.values(), *self.subject.outputs.values())
        return max(spec.elements for spec in specs) // self.batch

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        own = {name: self.subject.inputs[name] for name in self.given}
        return {**own, **dict(self.judged)}

    @property
    def flops(self) -> int:
        return _PASSES * self.subject.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeIt(Examination):
    """A computation to be timed, with nothing else running."""

    standard_error: float
    budget_s: float
    peers: bool
    candidates: bool

    lane = Lane.ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain(Examination):
    """A plan to be explained; nothing is drawn or computed."""

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return {}

    @property
    def flops(self) -> int:
        return 0


def examination_from(request: Any, make: Callable[[str, object], Problem]) -> Examination:
    """Return the problem of a request to verify, time or explain.

    Parameters
    ----------
    make : callable
        Makes the problem of an operation's name and request.

    Raises
    ------
    MalformedRequest, InvalidProblem
        The layer cannot be parsed, a shape is missing, or sizes contradict each other.
    """
    operation = operation_examined(request.operation)
    if request.store:
        raise InvalidProblem(f"{request.operation} has no outputs to be stored; expected no store")
    found = ((name, _given(request, name)) for name in operation.tensors)
    given = {name: array for name, array in found if array is not None}
    layer = None if request.layer is None else _layer(request)
    shapes, parameters = _stated(request, operation, layer, given)
    dtype = _dtype(request, layer, given)
    blanks = {
        name: _blank(name, shape, dtype) for name, shape in shapes.items() if name not in given
    }
    _require_all(operation, {**given, **blanks}, request)
    subject_request = validate(operation.request, {**parameters, **given, **blanks})
    subject = make(operation.name, subject_request)
    shared: dict[str, Any] = {
        "subject": subject,
        "name": request.operation,
        "drawn": tuple(name for name in blanks if name in subject.inputs),
        "seed": request.seed,
        "distribution": request.distribution,
        "parameters": json.dumps(subject_request.parameters()),
        "asked": json.dumps(request.parameters()),
        "layer": None if layer is None else layers.text(layer),
    }
    if isinstance(request, VerifyRequest):
        return _verify(request, operation, subject, given, shared)
    if isinstance(request, TimeRequest):
        return TimeIt(
            **shared,
            standard_error=request.standard_error,
            budget_s=request.budget_s or 0.0,
            peers=request.peers == "auto",
            candidates=request.candidates,
        )
    assert isinstance(request, PlanRequest)  # noqa: S101
    return Explain(**shared)


def _given(request: Any, name: str) -> NDArray[Any] | None:
    found: NDArray[Any] | None = getattr(request, name, None)
    return found


def _layer(request: Any) -> layers.Layer:
    layer = layers.parse(request.layer)
    return layer if request.batch is None else layer.with_batch(request.batch)


def _stated(
    request: Any,
    operation: Operation,
    layer: layers.Layer | None,
    given: Mapping[str, NDArray[Any]],
) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return the shapes of tensors to draw, and the operation's parameters.

    Both come from the layer; the request's own fields override it.
    """
    own = {
        name: getattr(request, name)
        for name in request.model_fields_set
        if name in operation.request.model_fields
        and name not in operation.tensors
        and name not in ("response", "stored", "store")
    }
    shapes: dict[str, tuple[int, ...]] = {}
    parameters: dict[str, Any] = {}
    if layer is not None:
        shapes, parameters = layers.arguments(operation.name, layer, own.get("layout"))
    elif request.batch is not None:
        raise MalformedRequest("batch is for a layer; expected the batch in the tensors' shapes")
    for name in request.shapes:
        if name not in operation.tensors:
            raise MalformedRequest(
                f"shapes names {name[:64]!r}; {operation.name} takes {', '.join(operation.tensors)}"
            )
    shapes.update(request.shapes)
    if "indices" in given:  # they replace the input
        shapes.pop("input", None)
        if layer is not None:
            parameters["input_size"] = list(layer.input_size)
    elif "indices" in shapes and not operation.name.startswith("max_unpool"):
        raise MalformedRequest("indices cannot be drawn; send them, or the input instead")
    return shapes, {**parameters, **own}


def _dtype(request: Any, layer: layers.Layer | None, given: Mapping[str, NDArray[Any]]) -> DType:
    if request.dtype is not None:
        return DType(request.dtype)
    for array in given.values():
        found = DType.of(array.dtype)
        if found is not None and found.is_floating:
            return found
    return DType.FLOAT32 if layer is None or layer.dtype is None else layer.dtype


def _blank(name: str, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
    own = np.dtype(np.int64) if name == "indices" else dtype.numpy
    try:
        return np.broadcast_to(np.empty((), own), shape)
    except ValueError:
        raise InvalidProblem(f"{name}: shape {list(shape)} is too large") from None


def _require_all(operation: Operation, tensors: Mapping[str, Any], request: Any) -> None:
    for name in operation.required_tensors:
        if name not in tensors:
            where = "send it, or " if isinstance(request, VerifyRequest) else ""
            raise MalformedRequest(
                f"the size of {name} is not known; {where}give `layer`, or its shape in `shapes`"
            )


def _verify(
    request: VerifyRequest,
    operation: Operation,
    subject: Problem,
    given: Mapping[str, NDArray[Any]],
    shared: Mapping[str, Any],
) -> Verify:
    judged: list[tuple[str, TensorSpec]] = []
    for each in judged_results(operation.name):
        array = _given(request, each.name)
        if array is None:
            continue
        judged.append((each.name, _spec_of(each.name, array, each.output, subject)))
        if _given(request, f"result_{each.output}") is None:
            raise MalformedRequest(f"{each.name} is given without result_{each.output}")
    if not judged:
        wanted = " or ".join(f"result_{name}" for name in subject.outputs)
        raise MalformedRequest(f"there is no result to verify; expected {wanted}")
    return Verify(
        **shared,
        given=tuple(name for name in given if name in subject.inputs),
        judged=tuple(judged),
        factors=request.factors,
        sums=request.sums,
    )


def _spec_of(name: str, array: NDArray[Any], output: str, subject: Problem) -> TensorSpec:
    if output not in subject.outputs:
        raise InvalidProblem(
            f"{name} is given, but the request computes {', '.join(subject.outputs)}"
        )
    wanted = subject.outputs[output]
    if array.shape != wanted.shape or DType.of(array.dtype) is not wanted.dtype:
        raise InvalidProblem(
            f"{name} is {array.dtype.name} of shape {list(array.shape)}; expected {wanted.dtype} "
            f"of shape {list(wanted.shape)}"
        )
    return wanted
