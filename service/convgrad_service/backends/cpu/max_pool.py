"""Max pooling in 2D and 3D: kernels/pool_*.cpp.

`forward` and `backward` take views (N, C, *spatial) of any strides and return the bytes of scratch
memory used.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem, UnsupportedProblem
from convgrad_service.backends.cpu import pool_planes
from convgrad_service.backends.cpu.arguments import DTYPE_CODES, view_of
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.pool_args import PoolArgs
from convgrad_service.backends.cpu.pool_planes import PoolPlanesArgs, planes_args
from convgrad_service.backends.cpu.threads import Workers, WrongIndices
from convgrad_service.plans.cpu_device import sum_bytes
from convgrad_service.plans.planar import PLANS_KEPT, triple
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
# Kernels that read PoolPlanesArgs.
PLANE_KERNELS = ("pool_planes_forward", "pool_planes_backward")
# Windows whose gradients are scattered together, and least of a task.
SCATTERED_WINDOWS = 256
# With contiguous channels, a task has as many as make about so many tasks, but no fewer than this.
CHANNEL_TASKS, SCATTERED_CHANNELS = 4, 64


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
        return _run(library, workers, "pool_planes_forward", planes, planes, cancelled)
    merged, (input, output, *rest) = _merged(pool, tensors)
    plan = pool_forward_plan(merged, library.vector_bytes, library.vector_bytes // acc_bytes)
    if plan is None:
        single = _singly(pool, dtype, sums=False)
        return _run(library, workers, "pool_windows_forward", args, single, cancelled)
    args.x, args.y = view_of(input, 2), view_of(output, 2)
    if rest:
        args.indices = view_of(rest[0], 2)
    _tile(args, merged, plan)
    return _run(library, workers, "pool_forward", args, plan, cancelled)


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
    source = input if indices is None else indices
    if source is None:
        raise ValueError("max pooling backward needs the input or indices")
    tensors = (grad_output, grad_input, source)
    forms = tuple((array.shape, array.strides, array.dtype) for array in tensors)
    prepared = _prepared_backward(pool, dtype, library.vector_bytes, forms, indices is not None)
    args = type(prepared.args).from_buffer_copy(prepared.args)
    if prepared.keeps is not None:
        args.keeps = prepared.keeps
    args.pool.y.data, args.pool.grad_input.data, data = map(_address, tensors)
    if indices is not None:
        args.pool.indices.data = data
    else:
        args.pool.x.data = args.planar.src.data = data
    try:
        count = 0 if indices is None else indices.size
        return _run(library, workers, prepared.kernel, args, prepared, cancelled, indices=count)
    except WrongIndices:
        raise InvalidProblem(_wrong_index(pool, source)) from None


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What launches with the same pooling, shapes and strides share: arguments without tensors.

    Kernels for which ``planar`` means nothing read ``pool`` alone.
    """

    args: PoolPlanesArgs
    kernel: str
    tasks: int
    scratch_bytes: int
    keeps: object = None


Form = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]


@lru_cache(maxsize=PLANS_KEPT)
def _prepared_backward(
    pool: PoolShape,
    dtype: DType,
    vector_bytes: int,
    forms: tuple[Form, ...],
    from_indices: bool,
) -> _Prepared:
    """Choose the kernel; ``forms`` are those of grad_output, grad_input and the source."""
    tensors = [
        np.lib.stride_tricks.as_strided(np.empty(1, kind), shape, strides)
        for shape, strides, kind in forms
    ]
    args = _args(pool, dtype)
    args.y, args.grad_input = view_of(tensors[0], 2), view_of(tensors[1], 2)
    acc_bytes = sum_bytes(dtype)
    if from_indices:
        args.indices, args.index_bytes = view_of(tensors[2], 2), tensors[2].itemsize
        args.from_indices = 1
        scatter = _scatters(pool, acc_bytes, tensors)
        if scatter is not None:
            args.tile[:2] = scatter.tile
            return _prepared(args, scatter.kernel, scatter)
    else:
        planes = planes_args(pool, acc_bytes, vector_bytes, args, tensors[2], tensors)
        if planes is not None:
            kernel = "pool_planes_backward"
            return _Prepared(planes, kernel, planes.tasks, planes.scratch_bytes, planes.keeps)
    merged, views = _merged(pool, tensors)
    adjacent = views[1].strides[1] == views[1].itemsize
    lanes = vector_bytes // acc_bytes
    plan = pool_backward_plan(merged, vector_bytes, lanes, not from_indices, adjacent)
    if plan is None:
        views = tensors
    args.y, args.grad_input = view_of(views[0], 2), view_of(views[1], 2)
    if from_indices:
        args.indices = view_of(views[2], 2)
    else:
        args.x = view_of(views[2], 2)
    if plan is None:
        return _prepared(args, "pool_windows_backward", _singly(pool, dtype, sums=True))
    _tile(args, merged, plan)
    return _prepared(args, "pool_backward", plan)


def _prepared(args: PoolArgs, kernel: str, launch: PoolPlan | _Launch | _Scatter) -> _Prepared:
    return _Prepared(PoolPlanesArgs(pool=args), kernel, launch.tasks, launch.scratch_bytes)


class _Scatter(NamedTuple):
    """A launch of a kernel that adds gradients at given indices, and its tile of two sizes."""

    tasks: int
    scratch_bytes: int
    kernel: str
    tile: tuple[int, int]


def _scatters(pool: PoolShape, acc_bytes: int, tensors: list[Array]) -> _Scatter | None:
    """Return the launch if windows have no dilation, and planes or channels are contiguous."""
    if any(d != 1 for d in pool.dilation):
        return None
    last = all(np.moveaxis(array, 1, -1)[0].flags.c_contiguous for array in tensors)
    if last and pool.channels > 1 and tensors[1].itemsize == acc_bytes:
        parts = -(-CHANNEL_TASKS // pool.batch)
        channels = min(pool.channels, max(SCATTERED_CHANNELS, -(-pool.channels // parts)))
        tasks = pool.batch * -(-pool.channels // channels)
        return _Scatter(tasks, 0, "pool_channels_indices", (channels, 1))
    if not all(array[0, 0].flags.c_contiguous for array in tensors):
        return None
    windows = prod(pool.output_size)
    tables_bytes = 4 * (-(-windows * acc_bytes // 64) * 64)
    scratch_bytes = tables_bytes + prod(pool.input_size) * acc_bytes
    if scratch_bytes > pool_planes.SCRATCH_LIMIT_BYTES:
        return None
    planes = max(1, SCATTERED_WINDOWS // windows)
    rows = max(1, SCATTERED_WINDOWS // pool.output_size[-1])
    tasks = -(-pool.batch * pool.channels // planes)
    return _Scatter(tasks, scratch_bytes, "pool_planes_indices", (planes, rows))


def _wrong_index(pool: PoolShape, indices: Array) -> str:
    """Return the error message about the first index outside its window."""
    right = (indices >= 0) & (indices < prod(pool.input_size))
    found = np.unravel_index(np.where(right, indices, 0), pool.input_size)
    for axis, positions in enumerate(found):
        o = np.arange(pool.output_size[axis]).reshape(-1, *(1,) * (len(found) - axis - 1))
        reach = positions - o * pool.stride[axis] + pool.padding[axis][0]
        tap, rest = np.divmod(reach, pool.dilation[axis])
        right &= (rest == 0) & (tap >= 0) & (tap < pool.kernel_size[axis])
    at = tuple(int(i) for i in np.unravel_index(int(np.argmin(right)), indices.shape))
    value = int(indices[at])
    size = prod(pool.input_size)
    where = f"indices{list(at)} (as N, C, then the output's dimensions) is {value}"
    if not 0 <= value < size:
        return f"{where}; expected a flat position in the input's plane, 0 to {size - 1}"
    ranges = []
    for axis, out in enumerate(at[2:]):
        first = out * pool.stride[axis] - pool.padding[axis][0]
        taps = range(first, first + pool.kernel_size[axis] * pool.dilation[axis])
        steps = taps[:: pool.dilation[axis]]
        inside = [i for i in steps if 0 <= i < pool.input_size[axis]]
        step = f" in steps of {pool.dilation[axis]}" if pool.dilation[axis] > 1 else ""
        ranges.append(f"{inside[0]} to {inside[-1]}{step}" if inside else "none")
    place = tuple(int(i) for i in np.unravel_index(value, pool.input_size))
    return (
        f"{where}, the input position {place}; expected one inside its window, "
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
    args.vectors = plan.vectors


def _run(
    library: Library,
    workers: Workers,
    kernel: str,
    args: ctypes.Structure,
    plan: PoolPlan | PoolPlanesArgs | _Launch | _Prepared,
    cancelled: threading.Event | None,
    indices: int = 0,
) -> int:
    """Launch a kernel; return the bytes of scratch used."""
    if isinstance(args, PoolPlanesArgs) and kernel not in PLANE_KERNELS:
        args = args.pool
    workers.launch(
        library.kernel(kernel),
        args,
        scratch_bytes=plan.scratch_bytes,
        tasks=plan.tasks,
        indices=indices,
        cancelled=cancelled,
    )
    return plan.scratch_bytes * workers.threads
