"""The protocol's names of element types."""

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
"""Element types whose values may stand as numbers; the 16-bit ones are sent as bytes alone."""


def protocol_name(dtype: DType) -> str:
    """The name of ``dtype`` in the protocol, e.g. ``FP32``."""
    return _NAMES[dtype]


def dtype_named(name: Any, *, tensor: str) -> DType:
    """The element type that the protocol names so, for the input ``tensor``.

    Raises
    ------
    MalformedRequest
        It names none, or one that no operation takes.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise MalformedRequest(
            f"{tensor}: expected datatype to be {', '.join(_DTYPES)}, got {shown(name)}"
        )
    return dtype
