"""Max pooling in 2D and 3D: kernels/pool_*.cpp.

`forward` and `backward` take views (N, C, *spatial) of any strides and return the bytes of scratch
memory used.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem, UnsupportedProblem
from convgrad_service.backends.cpu.arguments import DTYPE_CODES, view_of
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.pool_args import PoolArgs
from convgrad_service.backends.cpu.pool_planes import PoolPlanesArgs, planes_args
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans.cpu_device import sum_bytes
from convgrad_service.plans.planar import triple
from convgrad_service.plans.pooling import (
    SCRATCH_LIMIT_BYTES,
    PoolPlan,
    pool_backward_plan,
    pool_forward_plan,
)
from convgrad_service.problems.geometry import PoolShape

__all__ = ["backward", "forward"]

Array = NDArray[Any]
LARGEST_PLANE = 2**31 - 1


def forward(
    library: Library,
    workers: Workers,
    pool: PoolShape,
    dtype: DType,
    input: Array,
    output: Array,
    indices: Array | None = None,
    *,
    cancelled: threading.Event | None = None,
) -> int:
    """Write the maximum of each window and, if ``indices`` is given, its flat position."""
    tensors = [input, output] if indices is None else [input, output, indices]
    args = _args(pool, dtype)
    args.x, args.y = view_of(input, 2), view_of(output, 2)
    if indices is not None:
        args.indices, args.index_bytes = view_of(indices, 2), indices.itemsize
    acc_bytes = sum_bytes(dtype)
    planes = planes_args(pool, acc_bytes, library.vector_bytes, args, input, tensors)
    if planes is not None:
        return _run(library, workers, "pool_planes_forward", planes, planes, cancelled)[0]
    merged, (input, output, *rest) = _merged(pool, tensors)
    plan = pool_forward_plan(merged, library.vector_bytes, library.vector_bytes // acc_bytes)
    if plan is None:
        single = _singly(pool, dtype, sums=False)
        return _run(library, workers, "pool_windows_forward", args, single, cancelled)[0]
    args.x, args.y = view_of(input, 2), view_of(output, 2)
    if rest:
        args.indices = view_of(rest[0], 2)
    _tile(args, merged, plan)
    return _run(library, workers, "pool_forward", args, plan, cancelled)[0]


class _Launch(NamedTuple):
    """The number of tasks, and the bytes of scratch per thread."""

    tasks: int
    scratch_bytes: int


def _singly(pool: PoolShape, dtype: DType, *, sums: bool) -> _Launch:
    """Return a launch of kernels/pool_windows.cpp; ``sums`` if it accumulates gradients.

    Raises
    ------
    UnsupportedProblem
        A plane of float32 sums, which 16-bit types need, exceeds the scratch limit.
    """
    plane_bytes = prod(pool.input_size) * sum_bytes(dtype)
    aside = sums and dtype.itemsize < sum_bytes(dtype)
    if aside and plane_bytes > SCRATCH_LIMIT_BYTES:
        raise UnsupportedProblem(
            f"the windows ({pool.geometry_text}) are too wide to be tiled, and a plane of the "
            f"input takes {plane_bytes} bytes in sums; the CPU allows {SCRATCH_LIMIT_BYTES}"
        )
    return _Launch(pool.batch * pool.channels, plane_bytes if aside else 0)


def backward(
    library: Library,
    workers: Workers,
    pool: PoolShape,
    dtype: DType,
    grad_output: Array,
    grad_input: Array,
    *,
    input: Array | None = None,
    indices: Array | None = None,
    cancelled: threading.Event | None = None,
) -> int:
    """Compute grad_input[i] = the sum of grad_output over the windows whose maximum is at i.

    The positions of the maxima come from ``indices`` (int32 or int64), or are recomputed from
    ``input``.

    Raises
    ------
    InvalidProblem
        An index is not a position of its window inside the input.
    """
    tensors = [array for array in (grad_output, grad_input, input, indices) if array is not None]
    args = _args(pool, dtype)
    args.y, args.grad_input = view_of(grad_output, 2), view_of(grad_input, 2)
    if indices is not None:
        args.indices, args.index_bytes = view_of(indices, 2), indices.itemsize
        args.from_indices = 1
    acc_bytes = sum_bytes(dtype)
    planes = planes_args(pool, acc_bytes, library.vector_bytes, args, input, tensors)
    if planes is not None:
        used, error = _run(library, workers, "pool_planes_backward", planes, planes, cancelled)
    else:
        merged, views = _merged(pool, tensors)
        lanes = library.vector_bytes // acc_bytes
        plan = pool_backward_plan(merged, library.vector_bytes, lanes, indices is None)
        if plan is None:
            views = tensors
        args.y, args.grad_input = view_of(views[0], 2), view_of(views[1], 2)
        if indices is None:
            args.x = view_of(views[2], 2)
        else:
            args.indices = view_of(views[2], 2)
        if plan is None:
            single = _singly(pool, dtype, sums=True)
            used, error = _run(library, workers, "pool_windows_backward", args, single, cancelled)
        else:
            _tile(args, merged, plan)
            used, error = _run(library, workers, "pool_backward", args, plan, cancelled)
    if error and indices is not None:
        raise InvalidProblem(_wrong_index(pool, indices, error - 1))
    return used


def _wrong_index(pool: PoolShape, indices: Array, position: int) -> str:
    """Return the error message about an index outside its window."""
    at = tuple(int(i) for i in np.unravel_index(position, indices.shape))
    value = int(indices[at])
    size = prod(pool.input_size)
    where = f"indices{list(at)} (as N, C, then the output's dimensions) is {value}"
    if not 0 <= value < size:
        return f"{where}; expected a flat position in the input's plane, 0 to {size - 1}"
    ranges = []
    for axis, o in enumerate(at[2:]):
        first = o * pool.stride[axis] - pool.padding[axis][0]
        taps = range(first, first + pool.kernel_size[axis] * pool.dilation[axis])
        steps = taps[:: pool.dilation[axis]]
        inside = [i for i in steps if 0 <= i < pool.input_size[axis]]
        step = f" in steps of {pool.dilation[axis]}" if pool.dilation[axis] > 1 else ""
        ranges.append(f"{inside[0]} to {inside[-1]}{step}" if inside else "none")
    found = tuple(int(i) for i in np.unravel_index(value, pool.input_size))
    return (
        f"{where}, the input position {found}; expected one inside its window, "
        f"{' by '.join(ranges)}"
    )


def _merged(pool: PoolShape, tensors: list[Array]) -> tuple[PoolShape, list[Array]]:
    """Merge N and C into one dimension, to fill vectors, if the layout is channels-first."""
    batch, channels = pool.batch, pool.channels
    if batch == 1 or any(
        a.strides[0] != channels * a.strides[1] or a.strides[1] == a.itemsize for a in tensors
    ):
        return pool, tensors
    views = []
    for array in tensors:
        shape = (1, batch * channels, *array.shape[2:])
        strides = (array.strides[0] * batch, *array.strides[1:])
        views.append(np.lib.stride_tricks.as_strided(array, shape, strides))
    return replace(pool, batch=1, channels=batch * channels), views


def _args(pool: PoolShape, dtype: DType) -> PoolArgs:
    """Return the arguments that all kernels share, without tensors."""
    if prod(pool.input_size) > LARGEST_PLANE:
        raise UnsupportedProblem(
            f"the input's planes have {prod(pool.input_size)} elements; the CPU's max pooling "
            f"takes at most {LARGEST_PLANE}"
        )
    args = PoolArgs()
    args.batch, args.channels = pool.batch, pool.channels
    args.input[:] = triple(pool.input_size, 1)
    args.output[:] = triple(pool.output_size, 1)
    args.kernel[:] = triple(pool.kernel_size, 1)
    args.stride[:] = triple(pool.stride, 1)
    args.dilation[:] = triple(pool.dilation, 1)
    args.pad[:] = triple(tuple(before for before, _ in pool.padding), 0)
    args.dtype, args.index_bytes = DTYPE_CODES[dtype], 8
    return args


def _tile(args: PoolArgs, pool: PoolShape, plan: PoolPlan) -> None:
    """Copy the tiles of a plan into the arguments."""
    args.batch, args.channels = pool.batch, pool.channels
    args.tile[:], args.tiles[:], args.windows[:] = plan.tile, plan.tiles, plan.windows
    args.meeting_words, args.scratch_bytes = plan.meeting_words, plan.scratch_bytes


def _run(
    library: Library,
    workers: Workers,
    kernel: str,
    args: ctypes.Structure,
    plan: PoolPlan | PoolPlanesArgs | _Launch,
    cancelled: threading.Event | None,
) -> tuple[int, int]:
    """Launch a kernel; return the bytes of scratch used and the kernel's error value."""
    control = workers.launch(
        library.kernel(kernel),
        args,
        scratch_bytes=plan.scratch_bytes,
        tasks=plan.tasks,
        cancelled=cancelled,
    )
    return plan.scratch_bytes * workers.threads, int(control.error)
