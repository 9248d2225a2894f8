"""Max pooling of one plane at a time, if columns are contiguous: kernels/pool_planes.cpp.

Windows are accessed as in a depthwise convolution, so its plan is used here too.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import view_of
from convgrad_service.backends.cpu.planar_args import PlanarArgs, fill, tap_table
from convgrad_service.backends.cpu.pool_args import PoolArgs
from convgrad_service.plans.planar import PlanarPlan, forward_plan, triple
from convgrad_service.problems.geometry import ConvShape, PoolShape

__all__ = ["PoolPlanesArgs", "planes_args"]

SCRATCH_LIMIT_BYTES = 1024 * 1024
SLACK_VECTORS = 9
# Columns in larger steps are copied one by one, which takes longer than a transposition of vectors
# of channels if there are enough to fill one.
MOST_STRIDE = 2
# The kernel stores a maximum's offset from its window's tap 0 in 32 bits, and adds gradients at
# that offset. A larger reach would overflow and write outside the plane.
LARGEST_REACH = 2**30


class PoolPlanesArgs(ctypes.Structure):
    """``kernels/pool_planes.hpp`` mirrored in ctypes."""

    _fields_ = (("planar", PlanarArgs), ("pool", PoolArgs))
    scratch_bytes: int
    tasks: int
    keeps: object


def planes_args(
    pool: PoolShape,
    acc_bytes: int,
    vector_bytes: int,
    args: PoolArgs,
    input: NDArray[Any] | None,
    tensors: list[NDArray[Any]],
) -> PoolPlanesArgs | None:
    """Return the arguments; None if columns are not contiguous, a plane or window is too large, or
    vectors of channels are faster.

    ``args`` are the initialised arguments of the other pooling kernels. ``input`` is None if
    indices are given.
    """
    if any(array.strides[-1] != array.itemsize for array in tensors):
        return None
    if pool.stride[-1] > MOST_STRIDE and pool.channels >= vector_bytes // acc_bytes:
        return None
    described = _described(pool, acc_bytes, vector_bytes // acc_bytes)
    if described is None:
        return None
    planes = PoolPlanesArgs()
    planes.planar, planes.pool = described.planar, args
    if input is not None:
        planes.planar.src = view_of(input[:, :, None], 3)
    planes.scratch_bytes, planes.tasks = described.scratch_bytes, described.tasks
    planes.keeps = described
    return planes


@dataclass(frozen=True, slots=True)
class _Described:
    """The part that depends on the pooling only; ``planar`` points into the tables held here."""

    planar: PlanarArgs
    scratch_bytes: int
    tasks: int


@lru_cache(maxsize=256)
def _described(pool: PoolShape, acc_bytes: int, lanes: int) -> _Described | None:
    """Describe a pooling; None if a plane or a window is too large."""
    if _reach(pool) >= LARGEST_REACH:
        return None
    plan = _plan(pool, acc_bytes, lanes)
    if plan is None or plan.tiles != (1, 1, 1):
        return None
    scratch_bytes = _scratch_bytes(pool, plan, acc_bytes, lanes)
    if scratch_bytes > SCRATCH_LIMIT_BYTES:
        return None
    planar = PlanarArgs()
    _, height, width = triple(pool.input_size, 1)
    first, second, third = triple(pool.dilation, 1)
    strides = first * height * width, second * width, third
    fill(planar, plan, tap_table(plan, triple(pool.kernel_size, 1), strides))
    planar.batch, planar.groups = pool.batch, pool.channels
    planar.src_channels = planar.dst_channels = 1
    tasks = -(-pool.channels // plan.group_block) * pool.batch
    return _Described(planar, scratch_bytes, tasks)


def _reach(pool: PoolShape) -> int:
    """Return the distance from a window's first tap to its last, in elements of a padded plane."""
    _, height, width = triple(pool.input_size, 1)
    taps = zip(triple(pool.kernel_size, 1), triple(pool.dilation, 1), strict=True)
    steps = (height * width, width, 1)
    return sum((k - 1) * d * step for (k, d), step in zip(taps, steps, strict=True))


def _plan(pool: PoolShape, acc_bytes: int, lanes: int) -> PlanarPlan | None:
    conv = ConvShape(
        batch=pool.batch,
        groups=pool.channels,
        in_channels=pool.channels,
        out_channels=pool.channels,
        input_size=pool.input_size,
        kernel_size=pool.kernel_size,
        output_size=pool.output_size,
        stride=pool.stride,
        padding=pool.padding,
        dilation=pool.dilation,
    )
    return forward_plan(conv, acc_bytes, lanes, swap=False)


def _scratch_bytes(pool: PoolShape, plan: PlanarPlan, acc_bytes: int, lanes: int) -> int:
    """Return the bytes of scratch, as computed by scratch_of in the kernel."""
    box, tile = plan.box, plan.tile
    plane = _up(prod(box), lanes)
    source = plan.group_block * len(plan.src_phase) * plane + SLACK_VECTORS * lanes
    windows = _up(((tile[0] - 1) * box[1] + tile[1] - 1) * box[2] + tile[2], lanes)
    row = pool.output_size[-1]
    sums = (source, windows, windows, row, row, prod(pool.input_size))
    return _up(8 * len(plan.taps), 64) + sum(_up(count * acc_bytes, 64) for count in sums)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
