"""One inference request, from either HTTP or gRPC, before any tensor's elements are read.

It is known from the head of a message, so that memory can be allocated before the data arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Operation
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown
from convgrad_service.oip.datatypes import protocol_name
from convgrad_service.oip.json_text import NumberList
from convgrad_service.oip.parameters import parsed

__all__ = ["InferInput", "InferOutput", "InferRequest", "Region", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a tensor's bytes in the request's buffer."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the shared-memory region registered as ``name``."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class InferInput:
    """One input.

    ``source`` is a span of bytes (row-major, little-endian), a shared-memory region, or, if the
    elements came as JSON numbers, the array itself or a long list not parsed yet.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Span | Region | NumberList | NDArray[Any]

    def __post_init__(self) -> None:
        """Check the size of the data against shape and dtype."""
        if isinstance(self.source, Span | Region):
            needed_bytes = math.prod(self.shape) * self.dtype.itemsize
            if needed_bytes != self.source.size_bytes:
                raise MalformedRequest(
                    f"{self.name}: shape {shown(self.shape)} of {protocol_name(self.dtype)} takes "
                    f"{shown(needed_bytes)} bytes, got {shown(self.source.size_bytes)}"
                )


@dataclass(frozen=True, slots=True)
class InferOutput:
    """One requested output: as raw bytes, as numbers, or written to ``region``."""

    name: str
    binary: bool
    region: Region | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One inference request.

    If ``outputs`` is empty, the answer holds the operation's default outputs, as raw bytes if
    ``binary_by_default``. ``in_parts`` allows several responses, each with some rows of the
    outputs. ``parameters`` are the operation's: scalars, and JSON text not parsed yet.
    """

    operation: Operation
    id: str
    inputs: tuple[InferInput, ...]
    outputs: tuple[InferOutput, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    binary_by_default: bool = True
    timeout_s: float | None = None
    in_parts: bool = False

    def __post_init__(self) -> None:
        """Check the names of inputs and outputs."""
        operation = self.operation
        _check_names([tensor.name for tensor in self.inputs], operation.tensors, "input", operation)
        _check_names(
            [wanted.name for wanted in self.outputs], operation.outputs, "output", operation
        )

    def refuse_parts(self) -> None:
        """Raise MalformedRequest if an answer in parts is requested."""
        if self.in_parts:
            raise MalformedRequest(
                "in_parts: an answer in several responses comes over ModelStreamInfer alone"
            )

    def wants_binary(self, output: str) -> bool:
        """Whether ``output`` is to be sent as raw bytes."""
        for wanted in self.outputs:
            if wanted.name == output:
                return wanted.binary
        return self.binary_by_default

    @property
    def store(self) -> Mapping[str, str]:
        """The outputs to be stored on the server, with their names there."""
        found = parsed(self.parameters).get("store") if "store" in self.parameters else None
        return found if isinstance(found, dict) else {}

    def answer_names(self, computed: Iterable[str]) -> list[str]:
        """Return the outputs that the answer holds: those requested, in order, or all."""
        return [wanted.name for wanted in self.outputs] or list(computed)

    def answer_outputs(self, outputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the arrays of `answer_names`."""
        return {name: outputs[name] for name in self.answer_names(outputs)}

    @property
    def regions(self) -> Mapping[str, Region]:
        """The shared-memory region of each input and output that uses one, by name."""
        places = [
            *((tensor.name, tensor.source) for tensor in self.inputs),
            *((output.name, output.region) for output in self.outputs),
        ]
        return {name: place for name, place in places if isinstance(place, Region)}

    def sends(self, output: str) -> bool:
        """Whether the answer contains the elements of ``output``."""
        return output not in self.store and self.region_of(output) is None

    def region_of(self, output: str) -> Region | None:
        """Return the shared-memory region that ``output`` is to be written to, or None."""
        for wanted in self.outputs:
            if wanted.name == output:
                return wanted.region
        return None


def _check_names(names: list[str], known: tuple[str, ...], what: str, operation: Operation) -> None:
    seen = set()
    for name in names:
        if name not in known:
            raise MalformedRequest(
                f"{operation.name} has no {what} {shown(name)}; its {what}s are {', '.join(known)}"
            )
        if name in seen:
            raise MalformedRequest(f"the {what} {shown(name)} is repeated")
        seen.add(name)
