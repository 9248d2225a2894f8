"""The kernels' argument structures: ``kernels/conv_args.hpp`` mirrored in ctypes."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.plans.cpu_dense import dense_of
from convgrad_service.problems.geometry import ConvShape

__all__ = [
    "DTYPE_CODES",
    "Buffer",
    "Control",
    "ConvArgs",
    "View",
    "address_of",
    "aligned_array",
    "aligned_empty",
    "conv_args",
    "view_of",
]

DTYPE_CODES = {DType.FLOAT16: 0, DType.BFLOAT16: 1, DType.FLOAT32: 2, DType.FLOAT64: 3}
_CODE_OF = {dtype.numpy: code for dtype, code in DTYPE_CODES.items()}
PHASES, SHARES = 6, 8
ALIGNMENT = 64
_BYTE = np.dtype(np.uint8)
_Strides = ctypes.c_int64 * 6


class View(ctypes.Structure):
    """A strided view of at most six dimensions, strides in elements. Null if absent."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", _Strides))


class ConvArgs(ctypes.Structure):
    """One convolution. The C++ header documents the fields."""

    _fields_ = (
        ("x", View),
        ("w", View),
        ("y", View),
        ("accumulate", View),
        ("bias", View),
        ("batch", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("in_channels", ctypes.c_int64),
        ("out_channels", ctypes.c_int64),
        ("input", ctypes.c_int64 * 3),
        ("kernel", ctypes.c_int64 * 3),
        ("output", ctypes.c_int64 * 3),
        ("stride", ctypes.c_int64 * 3),
        ("dilation", ctypes.c_int64 * 3),
        ("pad", ctypes.c_int64 * 3),
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
        ("dtype", ctypes.c_int32),
        ("result_dtype", ctypes.c_int32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("block", ctypes.c_int64 * 8),
    )


class Control(ctypes.Structure):
    """The task counters of one launch; see ``kernels/conv_args.hpp``."""

    _fields_ = (
        ("cancelled", ctypes.c_int64),
        ("error", ctypes.c_int64),
        ("shares", ctypes.c_int64),
        ("next", ctypes.c_int64 * SHARES * PHASES),
        ("done", ctypes.c_int64 * PHASES),
    )

    @classmethod
    def of(cls, threads: int) -> Control:
        """Return counters of which nothing is claimed."""
        control = cls()
        control.shares = min(threads, SHARES)
        return control


def view_of(array: NDArray[Any] | None, lead: int = 0) -> View:
    """Return the view of an array, which must outlive the launch.

    If ``lead`` is not 0, the dimensions after the first ``lead`` are spatial, and are padded in
    front with extents of 1 so that every convolution has three spatial dimensions.
    """
    if array is None:
        return View()
    return View(address_of(array), _strides(array.strides, array.itemsize, lead))


@lru_cache(maxsize=4096)
def _strides(strides: tuple[int, ...], itemsize: int, lead: int) -> ctypes.Array[ctypes.c_int64]:
    elements = [stride // itemsize for stride in strides]
    if lead:
        elements[lead:lead] = [0] * (lead + 3 - len(elements))
    return _Strides(*elements)


_DATA = object.__basicsize__
_pointer_at = ctypes.c_void_p.from_address


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's first element.

    Reads ``PyArrayObject.data``, the first field of NumPy's C structure, which its binary interface
    fixes: ten times as fast as ``__array_interface__``.
    """
    return _pointer_at(id(array) + _DATA).value or 0


def conv_args(conv: ConvShape, dtype: np.dtype[Any], result_dtype: np.dtype[Any]) -> ConvArgs:
    """Return the arguments of a convolution without tensors, with alpha 1 and beta 0.

    The kernel reads ``dtype`` and writes ``result_dtype``.
    """
    return ConvArgs.from_buffer_copy(_numbers(conv, dtype, result_dtype))


@lru_cache(maxsize=256)
def _numbers(conv: ConvShape, dtype: np.dtype[Any], result_dtype: np.dtype[Any]) -> ConvArgs:
    dense = dense_of(conv)
    args = ConvArgs()
    args.batch, args.groups = dense.batch, dense.groups
    args.in_channels, args.out_channels = dense.in_channels, dense.out_channels
    for name in ("input", "kernel", "output", "stride", "dilation", "pad"):
        getattr(args, name)[:] = getattr(dense, name)
    args.alpha = 1.0
    args.dtype, args.result_dtype = _CODE_OF[dtype], _CODE_OF[result_dtype]
    return args


class Buffer(NamedTuple):
    """Uninitialised memory, aligned to 64 bytes, its address and its size."""

    memory: NDArray[np.uint8]
    address: int
    size_bytes: int

    @classmethod
    def of(cls, size_bytes: int) -> Buffer:
        """Allocate a buffer."""
        memory = aligned_empty(size_bytes)
        return cls(memory, address_of(memory), size_bytes)


def aligned_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array aligned to 64 bytes."""
    raw = np.empty(prod(shape) * dtype.itemsize + ALIGNMENT, _BYTE)
    return np.ndarray(shape, dtype, raw, -address_of(raw) % ALIGNMENT)


def aligned_empty(size_bytes: int) -> NDArray[np.uint8]:
    """Return uninitialised bytes aligned to 64 bytes, for vector stores."""
    return aligned_array((size_bytes,), _BYTE)
