"""What every tensor codec checks before it touches data: the shape, and the bytes it needs."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

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
    """Bytes that are known by their number, and written to where they belong later.

    What a header needs of them is sliced from their beginning.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...

    def later(self, dtype: DType, shape: tuple[int, ...], offset: int) -> NDArray[Any]:
        """An array of this shape that has no data yet; the data is what follows ``offset``."""
        ...


Buffer = bytes | bytearray | memoryview

# The most dimensions any tensor here has is six or seven; NumPy itself stops at 64.
_MAX_DIMENSIONS = 32


def checked_shape(shape: Any, *, name: str) -> tuple[int, ...]:
    """``shape`` as a tuple, or MalformedRequest unless it is a short list of ints >= 0."""
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
    """The member that ``dtype`` names, or MalformedRequest."""
    if isinstance(dtype, str) and dtype in DType.__members__.values():
        return DType(dtype)
    raise MalformedRequest(f"{name}: expected dtype to be {_DTYPES}, got {shown(dtype)}")


def checked_bytes(dtype: DType, shape: tuple[int, ...], found_bytes: int, *, name: str) -> int:
    """The bytes that a tensor takes, or MalformedRequest unless so many were found for it."""
    # In Python's ints, which do not overflow, and before anything is allocated.
    needed_bytes = math.prod(shape) * dtype.itemsize
    if needed_bytes != found_bytes:
        raise MalformedRequest(
            f"{name}: shape {shown(shape)} of {dtype} takes {shown(needed_bytes)} bytes, "
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
    """A read-only array over ``buffer`` from ``offset`` to its end, which must fit exactly.

    Nothing is copied, but for data that does not lie on a multiple of its item size: kernels
    rely on aligned elements, so such data is copied once.
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
    """The element type of an array to be written, whatever its byte order; else TypeError."""
    dtype = DType.of(array.dtype.newbyteorder("="))
    if dtype is None:
        raise TypeError(f"{array.dtype} is none of {_DTYPES}")
    return dtype


def data_view(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, row-major and little-endian; copied only if they lie otherwise."""
    contiguous = np.ascontiguousarray(array)
    if contiguous.dtype.byteorder == ">":
        contiguous = contiguous.astype(contiguous.dtype.newbyteorder("<"))
    # Through uint8: the buffer protocol has no letter for bfloat16.
    return contiguous.reshape(-1).view(np.uint8).data


def reshaped(array: NDArray[Any], shape: tuple[int, ...], *, name: str) -> NDArray[Any]:
    """The array in a shape of as many elements, or MalformedRequest where NumPy has no such."""
    try:
        return array.reshape(shape)
    except ValueError:
        raise MalformedRequest(f"{name}: shape {shown(shape)} is too large") from None


def _empty(shape: tuple[int, ...], dtype: DType, name: str) -> NDArray[Any]:
    try:
        return np.empty(shape, dtype.numpy)
    except ValueError:
        # A zero beside extents whose product NumPy cannot hold.
        raise MalformedRequest(f"{name}: shape {shown(shape)} is too large") from None


_DTYPES = ", ".join(member.value for member in DType)
