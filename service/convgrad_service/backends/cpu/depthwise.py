"""Depthwise convolutions with contiguous channels: kernels/depthwise.cpp, depthwise_weight.cpp.

They take the arguments of the grouped kernels (grouped.py makes them) and need no padded planes.
Channels first, and channel multipliers, stay with the grouped kernels.
"""

from __future__ import annotations

import threading
from math import prod
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.planar_args import PlanarArgs
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.problems.geometry import ConvShape

__all__ = ["applies", "bwd_weight", "correlate"]

WEIGHT_LIMIT_BYTES = 1024 * 1024
TASKS = 128
SPLITS = 32
ROW_TAP_BYTES = 32


def applies(conv: ConvShape, acc_bytes: int, *activations: NDArray[Any] | None) -> bool:
    """One channel a group, channels side by side in every tensor, weights that fit the cache."""
    if conv.groups == 1 or conv.in_channels != conv.groups or conv.out_channels != conv.groups:
        return False
    if prod(conv.kernel_size) * conv.groups * acc_bytes > WEIGHT_LIMIT_BYTES:
        return False
    return all(
        array is None
        or (array.strides[1] == array.itemsize and array.strides[-1] != array.itemsize)
        for array in activations
    )


def correlate(
    library: Library,
    workers: Workers,
    args: PlanarArgs,
    acc_bytes: int,
    cancelled: threading.Event | None,
) -> int:
    """Forward or backward with respect to data; returns the bytes of work memory used."""
    rows = args.batch * prod(-(-args.dst_size[d] // args.dst_step[d]) for d in (0, 1))
    args.tile[0] = -(-rows // TASKS)
    lanes = library.vector_bytes // acc_bytes
    scratch_bytes = (
        _up64(args.taps * ROW_TAP_BYTES)
        + _up64((args.groups + lanes) * acc_bytes)
        + _up64((args.taps * args.groups + lanes) * acc_bytes)
    )
    workers.launch(
        library.kernel("depthwise_correlate"),
        args,
        scratch_bytes=scratch_bytes,
        tasks=-(-rows // args.tile[0]),
        cancelled=cancelled,
    )
    return scratch_bytes * workers.threads


def bwd_weight(
    library: Library,
    workers: Workers,
    args: PlanarArgs,
    acc_bytes: int,
    cancelled: threading.Event | None,
) -> int:
    """Backward with respect to the weight; returns the bytes of work memory used."""
    args.splits = min(SPLITS, args.batch * args.dst_size[0] * args.dst_size[1])
    lanes = library.vector_bytes // acc_bytes
    scratch_bytes = _up64(args.taps * ROW_TAP_BYTES)
    sums_bytes = args.splits * (args.taps * args.groups + lanes) * acc_bytes
    workspace = workers.workspaces.take(sums_bytes)
    try:
        args.workspace = workspace.ctypes.data
        workers.launch(
            library.kernel("depthwise_bwd_weight"),
            args,
            scratch_bytes=scratch_bytes,
            tasks=args.splits,
            cancelled=cancelled,
        )
    finally:
        workers.workspaces.give(workspace)
    return int(sums_bytes) + scratch_bytes * workers.threads


def _up64(size_bytes: int) -> int:
    return -(-size_bytes // 64) * 64
