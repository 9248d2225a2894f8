"""The parameters of an inference request: those reserved by the protocol, and the operation's.

The protocol's parameters are booleans, ints, floats and strings; other values of an operation
(lists of ints, objects) are sent as JSON text: ``"stride": "[2, 2]"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.sentences import shown

__all__ = ["Reserved", "parsed", "separated"]

# No parameter is longer than a few hundred characters; the parser blocks all other threads.
_MAX_TEXT = 64 * 1024
_MAX_MICROSECONDS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Reserved:
    """The values of the protocol's reserved parameters.

    ``in_parts`` is this server's extension: an answer in several responses. ``operation`` holds all
    other parameters.
    """

    timeout_s: float | None = None
    binary_data_output: bool = False
    in_parts: bool = False
    operation: Mapping[str, Any] = field(default_factory=dict)


def separated(parameters: Mapping[str, Any]) -> Reserved:
    """Separate the protocol's reserved parameters from the operation's.

    Sequence and priority parameters are checked but have no effect: every operation is a pure
    function of its request, and requests are served in order of arrival.

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
        in_parts=own.get("in_parts", False),
        operation=others,
    )


def parsed(parameters: Mapping[str, Any]) -> dict[str, Any]:
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


_COUNT, _BOOL = "an int >= 0", "true or false"
_RESERVED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "timeout": ("an int >= 0, in microseconds", _is_count),
    "priority": (_COUNT, _is_count),
    "sequence_id": (
        "an int >= 0 or a string",
        lambda value: isinstance(value, str) or _is_count(value),
    ),
    "sequence_start": (_BOOL, _is_bool),
    "sequence_end": (_BOOL, _is_bool),
    "binary_data_output": (_BOOL, _is_bool),
    "in_parts": (_BOOL, _is_bool),
    "triton_enable_empty_final_response": (_BOOL, _is_bool),
}
