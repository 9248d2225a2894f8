"""Elementwise activation of an array: kernels/activation.cpp."""

from __future__ import annotations

import ctypes
import threading
from math import prod
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import View
from convgrad_service.backends.cpu.planar_args import ACTIVATION_CODES, CODE_OF
from convgrad_service.backends.cpu.runner import Machine

__all__ = ["activate"]

ROWS_PER_TASK = 16


class _ActivationArgs(ctypes.Structure):
    _fields_ = (
        ("src", View),
        ("dst", View),
        ("size", ctypes.c_int64 * 6),
        ("src_dtype", ctypes.c_int32),
        ("dst_dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def activate(
    machine: Machine,
    activation: str,
    source: NDArray[Any],
    target: NDArray[Any],
    cancelled: threading.Event | None,
) -> None:
    """Compute target = activation(source), rounded once. NaN is propagated.

    ``source`` has the dtype of ``target``, or float32 if that has 16 bits. Both may be one array.
    """
    args = _ActivationArgs()
    # Vectors run along the last dimension, so target's contiguous one goes last.
    order = sorted(range(target.ndim), key=lambda axis: -abs(target.strides[axis]))
    for view, array in ((args.src, source), (args.dst, target)):
        view.data = array.ctypes.data
        strides = [array.strides[axis] // array.itemsize for axis in order]
        view.stride[:] = [0] * (6 - len(strides)) + strides
    sizes = [target.shape[axis] for axis in order]
    args.size[:] = [1] * (6 - len(sizes)) + sizes
    args.src_dtype, args.dst_dtype = CODE_OF[source.dtype], CODE_OF[target.dtype]
    args.activation = ACTIVATION_CODES[activation]
    rows = prod(sizes[:-1])
    machine.workers.launch(
        machine.library.kernel("activation"),
        args,
        tasks=-(-rows // ROWS_PER_TASK),
        cancelled=cancelled,
    )
