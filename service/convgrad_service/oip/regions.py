"""Reads the parameters by which a tensor refers to a shared-memory region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown
from convgrad_service.oip.request import Region

__all__ = ["known_keys", "region_of", "size_of"]

_REGION, _SIZE, _OFFSET = (
    "shared_memory_region",
    "shared_memory_byte_size",
    "shared_memory_offset",
)
_KEYS = (_REGION, _SIZE, _OFFSET)
_INT64 = 2**63


def region_of(
    parameters: Mapping[str, Any], tensor: str, others: tuple[str, ...] = ()
) -> Region | None:
    """Return the region that a tensor's parameters name, or None.

    ``others`` are the other parameters that the tensor may have.

    Raises
    ------
    MalformedRequest
        A parameter is unknown, missing or of the wrong type.
    """
    known_keys(parameters, (*others, *_KEYS), f"parameters of {shown(tensor)}")
    if not any(key in parameters for key in _KEYS):
        return None
    name = parameters.get(_REGION)
    if not isinstance(name, str):
        raise MalformedRequest(f"{tensor}: expected {_REGION} to be a string, got {shown(name)}")
    size_bytes = size_of(parameters.get(_SIZE), f"{tensor}: {_SIZE}")
    return Region(name, size_of(parameters.get(_OFFSET, 0), f"{tensor}: {_OFFSET}"), size_bytes)


def size_of(value: Any, what: str) -> int:
    """Return ``value`` if it is an int from 0 to 2**63 - 1; else raise MalformedRequest."""
    if type(value) is not int or not 0 <= value < _INT64:
        raise MalformedRequest(f"{what}: expected an int from 0 to 2**63 - 1, got {shown(value)}")
    return value


def known_keys(found: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    """Raise MalformedRequest for the first key of ``found`` that is not ``known``."""
    for key in found:
        if key not in known:
            raise MalformedRequest(
                f"{what}: unknown field {shown(key)}; expected {', '.join(known)}"
            )
