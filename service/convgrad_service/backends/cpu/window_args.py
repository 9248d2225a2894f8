"""``kernels/windows.hpp`` mirrored in ctypes, and its initialisation from a problem's windows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu.arguments import DTYPE_CODES
from convgrad_service.plans.cpu_device import sum_bytes
from convgrad_service.plans.planar import triple
from convgrad_service.problems.layouts import Layout, activation_view
from convgrad_service.problems.planes import PlaneProblem
from convgrad_service.problems.sizes import Size
from convgrad_service.problems.windows import WindowAxis

__all__ = ["WindowArgs", "planes", "scratch_bytes", "set_windows", "task_count", "window_args"]

Array = NDArray[Any]
_Int64x3 = ctypes.c_int64 * 3
# Maximum channels per task, and the target number of elements per task.
BLOCK_CHANNELS = 256
TASK_ELEMENTS = 2**14


class PlaneView(ctypes.Structure):
    """A tensor of planes; strides are in elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("channel", ctypes.c_int64),
        ("step", ctypes.c_int64),
    )


class WindowRange(ctypes.Structure):
    """`WindowAxis` as the kernels read it."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("step", "first", "last", "unit", "low", "high")
    )

    @classmethod
    def of(cls, axis: WindowAxis) -> WindowRange:
        return cls(axis.step, axis.first, axis.last, axis.unit, axis.low, axis.high)


class WindowArgs(ctypes.Structure):
    """One pooling. The C++ header documents the fields."""

    _fields_ = (
        ("x", PlaneView),
        ("y", PlaneView),
        ("indices", PlaneView),
        ("batch", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("x_size", _Int64x3),
        ("y_size", _Int64x3),
        ("window", WindowRange * 3),
        ("counted", WindowRange * 3),
        ("divisor", ctypes.c_double),
        ("lanes", ctypes.c_int64),
        ("rows_per_task", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("index_bytes", ctypes.c_int32),
        ("divide", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def window_args(problem: PlaneProblem, x_size: Size, y_size: Size, index_bytes: int) -> WindowArgs:
    """Return the arguments of a pooling, without tensors and windows."""
    args = WindowArgs()
    args.batch, args.channels = problem.batch, problem.channels
    args.x_size[:], args.y_size[:] = triple(x_size, 1), triple(y_size, 1)
    last = problem.layout.channels_last and problem.channels > 1
    args.lanes = min(problem.channels, BLOCK_CHANNELS) if last else 0
    row = max(x_size[-1], y_size[-1]) * max(1, args.lanes)
    args.rows_per_task = max(1, TASK_ELEMENTS // row)
    args.dtype, args.index_bytes = DTYPE_CODES[problem.dtype], index_bytes
    return args


def set_windows(field: Any, axes: Sequence[WindowAxis]) -> None:
    """Set the field ``window`` or ``counted``, padded to three dimensions."""
    single = WindowAxis.sliding(1, 1, 1, 1, 0)
    for i, axis in enumerate((single,) * (3 - len(axes)) + tuple(axes)):
        field[i] = WindowRange.of(axis)


def task_count(args: WindowArgs) -> int:
    """Return the number of tasks of a kernel that iterates over rows of y."""
    width = max(1, args.lanes)
    rows = args.batch * -(-args.channels // width) * args.y_size[0] * args.y_size[1]
    return int(-(-rows // args.rows_per_task))


def scratch_bytes(args: WindowArgs, dtype: DType) -> int:
    """Return window_sums' scratch: a row of x and of y in the sum type, and all windows."""
    width = max(1, args.lanes)
    elements = (args.x_size[2] + args.y_size[2]) * width + 32 + max(args.x_size[2], args.y_size[2])
    return int(elements * sum_bytes(dtype) + 16 * sum(args.y_size))


def planes(array: Array, layout: Layout) -> PlaneView | None:
    """View a tensor as planes; None if a plane's elements are not equally spaced, row-major."""
    view = activation_view(array, layout, 1)[:, 0]
    batch, channel, *spatial = (stride // array.itemsize for stride in view.strides)
    size = view.shape[2:]
    # The stride of a dimension of extent 1 is arbitrary.
    steps = [
        stride / prod(size[axis + 1 :]) for axis, stride in enumerate(spatial) if size[axis] > 1
    ]
    if any(step != steps[0] for step in steps):
        return None
    step = int(steps[0]) if steps else 1
    return PlaneView(array.__array_interface__["data"][0], batch, channel, step)
