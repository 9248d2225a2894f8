"""``kernels/planar_args.hpp`` mirrored in ctypes, and its initialisation from a plan."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import DTYPE_CODES, View
from convgrad_service.plans.planar import PlanarPlan, Triple

__all__ = ["ACTIVATION_CODES", "CODE_OF", "PlanarArgs", "fill", "tap_table"]

ACTIVATION_CODES = {"none": 0, "relu": 1, "relu6": 2, "silu": 3}

CODE_OF = {dtype.numpy: code for dtype, code in DTYPE_CODES.items()}

_Int64x3 = ctypes.c_int64 * 3


class PlanarArgs(ctypes.Structure):
    """One launch of a grouped kernel. The C++ header documents the fields."""

    _fields_ = (
        ("src", View),
        ("dst", View),
        ("accumulate", View),
        ("weight", View),
        ("bias", View),
        ("batch", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("src_channels", ctypes.c_int64),
        ("dst_channels", ctypes.c_int64),
        ("src_size", _Int64x3),
        ("dst_size", _Int64x3),
        ("src_step", _Int64x3),
        ("dst_step", _Int64x3),
        ("origin", _Int64x3),
        ("tile", _Int64x3),
        ("tiles", _Int64x3),
        ("box", _Int64x3),
        ("group_block", ctypes.c_int64),
        ("src_phases", ctypes.c_int64),
        ("dst_phases", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("src_phase", ctypes.c_void_p),
        ("dst_phase", ctypes.c_void_p),
        ("first_tap", ctypes.c_void_p),
        ("tap", ctypes.c_void_p),
        ("alpha", ctypes.c_double),
        ("beta", ctypes.c_double),
        ("workspace", ctypes.c_void_p),
        ("splits", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("result_dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("paired", ctypes.c_int32),
    )
    # Pointers into tables, which the attribute `keeps` keeps alive.
    TABLES = ("src_phase", "dst_phase", "first_tap", "tap")
    keeps: tuple[PlanarPlan, NDArray[np.int64]]


def fill(args: PlanarArgs, plan: PlanarPlan, taps: NDArray[np.int64]) -> None:
    """Copy a plan into the structure, which keeps the plan's tables alive."""
    args.keeps = (plan, taps)
    for name in ("src_size", "dst_size", "src_step", "dst_step"):
        setattr(args, name, _Int64x3(*getattr(plan, name)))
    for name in ("origin", "tile", "tiles", "box"):
        setattr(args, name, _Int64x3(*getattr(plan, name)))
    args.group_block = plan.group_block
    args.src_phases = len(plan.src_phase)
    args.dst_phases = len(plan.dst_phase)
    args.taps = len(taps)
    args.src_phase = plan.src_phase.ctypes.data
    args.dst_phase = plan.dst_phase.ctypes.data
    args.first_tap = plan.first_tap.ctypes.data
    args.tap = taps.ctypes.data
    args.splits, args.paired = plan.splits, plan.paired
    args.scratch_bytes = plan.scratch_bytes


def tap_table(plan: PlanarPlan, kernel: Triple, strides: Triple) -> NDArray[np.int64]:
    """Return the plan's taps, with each kernel index replaced by its offset in elements."""
    taps = plan.taps.copy()
    index = taps[:, 4]
    rest, third = np.divmod(index, kernel[2])
    first, second = np.divmod(rest, kernel[1])
    taps[:, 4] = first * strides[0] + second * strides[1] + third * strides[2]
    return taps
