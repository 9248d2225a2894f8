"""The protocol's names of dtypes."""

from __future__ import annotations

from typing import Any

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = ["IN_JSON", "dtype_named", "protocol_name"]

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
            f"{tensor}: expected datatype to be {', '.join(_DTYPES)}, got {shown(name)}"
        )
    return dtype
