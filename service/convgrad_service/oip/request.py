"""One inference as it was asked, in either form of the protocol, before any tensor is touched.

All of it follows from the head of a message, so memory can be made ready before data arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Operation
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown
from convgrad_service.oip.datatypes import protocol_name
from convgrad_service.oip.number_list import NumberList
from convgrad_service.oip.parameters import parsed

__all__ = ["InferInput", "InferOutput", "InferRequest", "Region", "Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor's bytes lie in the buffer that came with the request."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a shared-memory region that was registered under ``name``."""

    name: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class InferInput:
    """One input: what it is, and where its elements are.

    ``source`` is a span of bytes, row-major and little-endian, a shared-memory region, or, where
    the elements were spelt out as numbers, the array itself or the text of a long list of them.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Span | Region | NumberList | NDArray[Any]

    def __post_init__(self) -> None:
        """Hold the bytes that came against those that shape and datatype need."""
        if isinstance(self.source, Span | Region):
            needed_bytes = math.prod(self.shape) * self.dtype.itemsize
            if needed_bytes != self.source.size_bytes:
                raise MalformedRequest(
                    f"{self.name}: shape {shown(self.shape)} of {protocol_name(self.dtype)} takes "
                    f"{shown(needed_bytes)} bytes, got {shown(self.source.size_bytes)}"
                )


@dataclass(frozen=True, slots=True)
class InferOutput:
    """One output that the answer shall hold: as raw bytes or as numbers, or into ``region``."""

    name: str
    binary: bool
    region: Region | None = None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request for inference.

    ``outputs`` is empty where the request names none: then the answer holds what the operation
    gives by default, as raw bytes if ``binary_by_default``. ``timeout_s`` is None without one.
    ``in_parts``: the answer may come as several responses, each with rows of its outputs.
    ``parameters`` are the operation's own, scalars and JSON text not yet parsed.
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
        """Hold the names of inputs and outputs against the operation's."""
        operation = self.operation
        _check_names([tensor.name for tensor in self.inputs], operation.tensors, "input", operation)
        _check_names(
            [wanted.name for wanted in self.outputs], operation.outputs, "output", operation
        )

    def refuse_parts(self) -> None:
        """Raise MalformedRequest where an answer in parts is asked for and cannot be given."""
        if self.in_parts:
            raise MalformedRequest(
                "in_parts: an answer in several responses comes over ModelStreamInfer alone"
            )

    def wants_binary(self, output: str) -> bool:
        """Whether ``output`` shall be sent as raw bytes."""
        for wanted in self.outputs:
            if wanted.name == output:
                return wanted.binary
        return self.binary_by_default

    @property
    def store(self) -> Mapping[str, str]:
        """The outputs that are to be stored, each with its name there."""
        found = parsed(self.parameters).get("store") if "store" in self.parameters else None
        return found if isinstance(found, dict) else {}

    @property
    def regions(self) -> Mapping[str, Region]:
        """The tensors, inputs and outputs, that lie in shared memory."""
        places = [
            *((tensor.name, tensor.source) for tensor in self.inputs),
            *((output.name, output.region) for output in self.outputs),
        ]
        return {name: place for name, place in places if isinstance(place, Region)}

    def sends(self, output: str) -> bool:
        """Whether the answer holds the elements of ``output``."""
        return output not in self.store and self.region_of(output) is None

    def region_of(self, output: str) -> Region | None:
        """Where in shared memory ``output`` shall be written, if there."""
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
            raise MalformedRequest(f"the {what} {shown(name)} stands there twice")
        seen.add(name)
