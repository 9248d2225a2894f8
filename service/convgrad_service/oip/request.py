"""One inference request, from either HTTP or gRPC, before any tensor's elements are read.

It is known from the head of a message, so that memory can be allocated before the data arrives.

The protocol's parameters are booleans, ints, floats and strings; other values of an operation
(lists of ints, objects) are sent as JSON text: ``"stride": "[2, 2]"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Operation
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.sentences import shown, shown_count
from convgrad_service.engine.execution import Filler
from convgrad_service.engine.shm.registry import RegionPart

T = TypeVar("T")
_NAMES = {
    DType.FLOAT16: "FP16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT32: "FP32",
    DType.FLOAT64: "FP64",
    DType.INT32: "INT32",
    DType.INT64: "INT64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

IN_JSON = frozenset({DType.FLOAT32, DType.FLOAT64, DType.INT32, DType.INT64})
"""Dtypes whose elements may be JSON numbers; 16-bit ones can only be sent as binary data."""
# No parameter is longer than a few hundred characters; the parser blocks all other threads.
_MAX_TEXT = 64 * 1024
_MAX_MICROSECONDS = 2**63 - 1
_COUNT, _BOOL = "an int >= 0", "true or false"
_REGION, _SIZE, _OFFSET = (
    "shared_memory_region",
    "shared_memory_byte_size",
    "shared_memory_offset",
)
_KEYS = (_REGION, _SIZE, _OFFSET)
# KServe's client sends those of the binary data extension over gRPC too, which has no use for
# them; MLServer's names with content_type the class in which its server would hold the tensor.
_INPUT_KEYS = ("binary_data_size", "content_type", *_KEYS)
_OUTPUT_KEYS = ("binary_data", "classification", "content_type", *_KEYS)
_INT64 = 2**63


def protocol_name(dtype: DType) -> str:
    """Return the protocol's name of ``dtype``, e.g. ``FP32``."""
    return _NAMES[dtype]


def dtype_named(name: Any, *, tensor: str) -> DType:
    """Return the dtype with the protocol's ``name``, for the input ``tensor``.

    Raises
    ------
    MalformedRequest
        There is no such dtype, or no operation takes it.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise MalformedRequest(
            f"{tensor}: expected datatype to be one of {', '.join(_DTYPES)}, got {shown(name)}"
        )
    return dtype


@dataclass(frozen=True, slots=True)
class Reserved:
    """The values of the protocol's reserved parameters; ``operation`` holds all others."""

    timeout_s: float | None = None
    binary_data_output: bool = False
    operation: Mapping[str, Any] = field(default_factory=dict)


def split_reserved(parameters: Mapping[str, Any]) -> Reserved:
    """Separate the protocol's reserved parameters from the operation's.

    Sequence and priority parameters are checked but have no effect: every operation is a pure
    function of its request, and requests are served in order of arrival. Nor has MLServer's
    ``content_type``.

    Raises
    ------
    MalformedRequest
        A value has the wrong type, or a reserved key is unknown.
    """
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in parameters.items():
        if key in _RESERVED:
            expected, accepts = _RESERVED[key]
            if not accepts(value):
                raise MalformedRequest(f"{key}: expected {expected}, got {shown(value)}")
            own[key] = value
        elif key.startswith("triton_"):
            raise MalformedRequest(
                f"the parameter {shown(key)} is reserved; of those that begin with triton_ this "
                "server knows triton_enable_empty_final_response, in gRPC"
            )
        else:
            others[key] = value
    microseconds = own.get("timeout", 0)
    return Reserved(
        # As Triton has it, 0 means none.
        timeout_s=microseconds / 1e6 if microseconds else None,
        binary_data_output=own.get("binary_data_output", False),
        operation=others,
    )


def parse_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the operation's parameters, with JSON text parsed into lists and objects.

    A string is JSON text if it begins with ``[`` or ``{``, as no name of a layout or format does.

    Raises
    ------
    MalformedRequest
        Such a text is not JSON, or a value has a type that the protocol does not have.
    """
    return {name: _value(name, value) for name, value in parameters.items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, str):
        if not value.startswith(("[", "{")):
            return value
        if len(value) > _MAX_TEXT:
            raise MalformedRequest(
                f"{name}: expected at most {_MAX_TEXT:,} characters, got {len(value):,}"
            )
        return strict_json.loads(value, f"the parameter {shown(name)}")
    if isinstance(value, bool | int | float):
        return value
    raise MalformedRequest(
        f"{name}: expected a bool, a number or a string, got {shown(value)}; a list is written as "
        'JSON text, such as "[2, 2]"'
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_MICROSECONDS


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_RESERVED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "timeout": ("an int >= 0, in microseconds", _is_count),
    "content_type": ("a string", lambda value: isinstance(value, str)),
    "priority": (_COUNT, _is_count),
    "sequence_id": (
        "an int >= 0 or a string",
        lambda value: isinstance(value, str) or _is_count(value),
    ),
    "sequence_start": (_BOOL, _is_bool),
    "sequence_end": (_BOOL, _is_bool),
    "binary_data_output": (_BOOL, _is_bool),
    "triton_enable_empty_final_response": (_BOOL, _is_bool),
}


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a tensor's bytes in the request's buffer."""

    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class InferInput:
    """One input.

    ``source`` is a span of bytes (row-major, little-endian), a shared-memory region, or, if the
    elements came as JSON numbers, the array itself or what parses a long list into one.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Span | RegionPart | Filler | NDArray[Any]

    def __post_init__(self) -> None:
        """Check the size of the data against shape and dtype."""
        if isinstance(self.source, Span | RegionPart):
            needed_bytes = math.prod(self.shape) * self.dtype.itemsize
            if needed_bytes != self.source.size_bytes:
                raise MalformedRequest(
                    f"{self.name}: shape {shown(self.shape)} of {protocol_name(self.dtype)} takes "
                    f"{shown_count(needed_bytes)} bytes, got {self.source.size_bytes}"
                )


@dataclass(frozen=True, slots=True)
class InferOutput:
    """One requested output: as raw bytes, as numbers, or written to ``region``."""

    name: str
    binary: bool
    region: RegionPart | None = None


@dataclass(frozen=True)
class InferRequest:
    """One inference request.

    If ``outputs`` is empty, the answer holds the operation's default outputs, as raw bytes if
    ``binary_by_default``. ``parameters`` are the operation's: scalars, and JSON text not parsed
    yet.
    """

    operation: Operation
    id: str
    inputs: tuple[InferInput, ...]
    outputs: tuple[InferOutput, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    binary_by_default: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check the names of inputs and outputs."""
        operation = self.operation
        _check_names([tensor.name for tensor in self.inputs], operation.tensors, "input", operation)
        _check_names(
            [wanted.name for wanted in self.outputs], operation.outputs, "output", operation
        )

    @cached_property
    def _wanted(self) -> Mapping[str, InferOutput]:
        return {wanted.name: wanted for wanted in self.outputs}

    def wants_binary(self, output: str) -> bool:
        """Whether ``output`` is to be sent as raw bytes."""
        wanted = self._wanted.get(output)
        return self.binary_by_default if wanted is None else wanted.binary

    @cached_property
    def store(self) -> Mapping[str, str]:
        """The outputs to be stored on the server, with their names there."""
        found = (
            parse_parameters(self.parameters).get("store") if "store" in self.parameters else None
        )
        return found if isinstance(found, dict) else {}

    def answer_names(self, computed: Iterable[str]) -> Iterable[str]:
        """Return the outputs that the answer holds: those requested, in order, or all."""
        return self._wanted or computed

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The inputs whose elements were numbers in the head."""
        inputs = ((tensor.name, tensor.source) for tensor in self.inputs)
        return {name: source for name, source in inputs if isinstance(source, np.ndarray)}

    @property
    def regions(self) -> Mapping[str, RegionPart]:
        """The shared-memory region of each input and output that uses one, by name."""
        places = [
            *((tensor.name, tensor.source) for tensor in self.inputs),
            *((output.name, output.region) for output in self.outputs),
        ]
        return {name: place for name, place in places if isinstance(place, RegionPart)}

    def sends(self, output: str) -> bool:
        """Whether the answer contains the elements of ``output``."""
        wanted = self._wanted.get(output)
        return output not in self.store and (wanted is None or wanted.region is None)


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


def input_region(parameters: Mapping[str, Any], tensor: str) -> RegionPart | None:
    """Return the region that an input's parameters name, or None.

    Raises
    ------
    MalformedRequest
        A parameter is unknown, missing or of the wrong type.
    """
    return _region(parameters, tensor, _INPUT_KEYS)


def output_region(parameters: Mapping[str, Any], tensor: str) -> RegionPart | None:
    """Return the region that an output's parameters name, or None; raises as `input_region`."""
    if parameters.get("classification", 0) != 0:
        raise MalformedRequest(f"{tensor}: this server has no classification extension")
    return _region(parameters, tensor, _OUTPUT_KEYS)


def _region(
    parameters: Mapping[str, Any], tensor: str, known: tuple[str, ...]
) -> RegionPart | None:
    refuse_unknown_keys(parameters, known, f"parameters of {shown(tensor)}")
    if not any(key in parameters for key in _KEYS):
        return None
    name = require_type(
        parameters.get(_REGION), str, f"{tensor}: expected {_REGION} to be a string"
    )
    size_bytes = require_size(parameters.get(_SIZE), f"{tensor}: {_SIZE}")
    offset = require_size(parameters.get(_OFFSET, 0), f"{tensor}: {_OFFSET}")
    return RegionPart("", name, offset, size_bytes)


def require_type(value: Any, kind: type[T], expected: str) -> T:
    """Return ``value`` if it is of this kind; else raise MalformedRequest."""
    if not isinstance(value, kind):
        raise MalformedRequest(f"{expected}, got {shown(value)}")
    return value


def require_size(value: Any, what: str) -> int:
    """Return ``value`` if it is an int from 0 to 2**63 - 1; else raise MalformedRequest."""
    if type(value) is not int or not 0 <= value < _INT64:
        raise MalformedRequest(f"{what}: expected an int from 0 to 2**63 - 1, got {shown(value)}")
    return value


def refuse_unknown_keys(found: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise MalformedRequest for the first key of ``found`` that is not ``known``."""
    for key in found:
        if key not in known:
            raise MalformedRequest(
                f"{what}: unknown field {shown(key)}; expected {', '.join(known)}"
            )
