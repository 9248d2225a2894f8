"""Checks that all tensor codecs make before they touch the data: the shape and its size."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown, shown_count

__all__ = [
    "Buffer",
    "array_view",
    "checked_bytes",
    "checked_dtype",
    "checked_shape",
    "data_view",
    "dtype_of",
    "reshaped",
]


class Deferred(Protocol):
    """Data of known size that is written to its destination later.

    Slicing returns bytes from the beginning, to read a header.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...

    def later(self, dtype: DType, shape: tuple[int, ...], offset: int) -> NDArray[Any]:
        """Return an array to be filled later with the data that begins at ``offset``."""
        ...


Buffer = bytes | bytearray | memoryview

# Tensors here have at most six or seven dimensions; NumPy allows 64.
_MAX_DIMENSIONS = 32


def checked_shape(shape: Any, *, name: str) -> tuple[int, ...]:
    """Return ``shape`` as a tuple; raise MalformedRequest unless it is a list of ints >= 0."""
    if not isinstance(shape, list | tuple) or len(shape) > _MAX_DIMENSIONS:
        raise MalformedRequest(
            f"{name}: expected shape to be a list of at most {_MAX_DIMENSIONS} ints, "
            f"got {shown(shape)}"
        )
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise MalformedRequest(f"{name}: expected ints >= 0 in shape, got {shown(extent)}")
    return tuple(shape)


def checked_dtype(dtype: Any, *, name: str) -> DType:
    """Return the member that ``dtype`` names, or raise MalformedRequest."""
    if isinstance(dtype, str) and dtype in DType.__members__.values():
        return DType(dtype)
    raise MalformedRequest(f"{name}: expected dtype to be one of {_DTYPES}, got {shown(dtype)}")


def checked_bytes(dtype: DType, shape: tuple[int, ...], found_bytes: int, *, name: str) -> int:
    """Return the size of a tensor; raise MalformedRequest unless it equals ``found_bytes``."""
    # Python ints do not overflow; nothing is allocated yet.
    needed_bytes = math.prod(shape) * dtype.itemsize
    if needed_bytes != found_bytes:
        raise MalformedRequest(
            f"{name}: shape {shown(shape)} of {dtype} takes {shown_count(needed_bytes)} bytes, "
            f"got {found_bytes}"
        )
    return needed_bytes


def array_view(
    buffer: Buffer | Deferred,
    dtype: DType,
    shape: tuple[int, ...],
    *,
    name: str,
    offset: int = 0,
) -> NDArray[Any]:
    """View ``buffer`` from ``offset`` to its end, which must fit exactly, as a read-only array.

    Only misaligned data is copied, because kernels require aligned elements.
    """
    if checked_bytes(dtype, shape, len(buffer) - offset, name=name) == 0:
        array: NDArray[Any] = _empty(shape, dtype, name)
    elif not isinstance(buffer, Buffer):
        return buffer.later(dtype, shape, offset)
    else:
        array = np.frombuffer(buffer, dtype.numpy, offset=offset).reshape(shape)
        if not array.flags.aligned:
            array = array.copy()
    array.flags.writeable = False
    return array


def dtype_of(array: NDArray[Any]) -> DType:
    """Return the element type of an array of any byte order, or raise TypeError."""
    dtype = DType.of(array.dtype.newbyteorder("="))
    if dtype is None:
        raise TypeError(f"{array.dtype} is none of {_DTYPES}")
    return dtype


def data_view(array: NDArray[Any]) -> memoryview:
    """Return an array's bytes, row-major and little-endian; copy only if it is stored otherwise."""
    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype.byteorder == ">":
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("<"))
    # Via uint8, because the buffer protocol has no format code for bfloat16.
    return contiguous.reshape(-1).view(np.uint8).data


def reshaped(array: NDArray[Any], shape: tuple[int, ...], *, name: str) -> NDArray[Any]:
    """Reshape an array; raise MalformedRequest if NumPy does not support the shape."""
    try:
        return array.reshape(shape)
    except ValueError:
        raise MalformedRequest(f"{name}: shape {shown(shape)} is too large") from None


def _empty(shape: tuple[int, ...], dtype: DType, name: str) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype.numpy)
    except ValueError:
        # An empty shape whose other extents overflow NumPy's size type.
        raise MalformedRequest(f"{name}: shape {shown(shape)} is too large") from None


_DTYPES = ", ".join(member.value for member in DType)
