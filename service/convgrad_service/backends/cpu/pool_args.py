"""``kernels/pool_args.hpp`` mirrored in ctypes."""

from __future__ import annotations

import ctypes

from convgrad_service.backends.cpu.arguments import View

__all__ = ["PoolArgs"]

_Int64x3 = ctypes.c_int64 * 3


class PoolArgs(ctypes.Structure):
    """One max pooling. The C++ header documents the fields."""

    _fields_ = (
        ("x", View),
        ("y", View),
        ("indices", View),
        ("grad_input", View),
        ("batch", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("input", _Int64x3),
        ("output", _Int64x3),
        ("kernel", _Int64x3),
        ("stride", _Int64x3),
        ("dilation", _Int64x3),
        ("pad", _Int64x3),
        ("tile", _Int64x3),
        ("tiles", _Int64x3),
        ("windows", _Int64x3),
        ("meeting_words", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("index_bytes", ctypes.c_int32),
        ("from_indices", ctypes.c_int32),
        ("vectors", ctypes.c_int32),
    )
