"""Kernel parameters (``depthwise_weight_args.cuh``) and partial sums of all depthwise wgrad
kernels."""

from __future__ import annotations

from math import prod
from typing import Any

from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import Plane, fill_operands
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.program import ZEROS, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["CLUSTERED", "MOST_CLUSTER", "buffers_of", "elements_of", "fill_weight"]
__all__ += ["fitting_blocks", "is_clustered", "partials_of", "received_bytes"]

MOST_CLUSTER = 8
"""Blocks of a cluster."""
CLUSTERS = (1, 2, 3, 4, 5, 8)
"""Numbers of blocks of which clusters fill most of the parts of an H200 that they cannot exceed."""
CLUSTERED = 0.91
"""The part of an H200 that clusters of more than two blocks fill."""


def elements_of(work: ConvWork, plane: Plane) -> int:
    """Return the number of elements of both inputs."""
    return (prod(plane.input) + prod(plane.output)) * plane.batch * work.groups


def fill_weight(args: Any, work: ConvWork, plane: Plane) -> None:
    """Fill in the kernel parameters except addresses."""
    fill_operands(args, work, plane, work.x, work.y)
    args.channels = work.groups * work.out_channels
    args.x_size[:], args.y_size[:], args.pad[:] = plane.input, plane.output, plane.pad


def is_clustered(device: CudaDevice, blocks: int) -> bool:
    """Whether blocks that add to the same results are a cluster (``depthwise_weight_sum.cuh``)."""
    return blocks <= MOST_CLUSTER and device.capability >= OVERLAPPING


def fitting_blocks(device: CudaDevice, blocks: int, columns: int, resident: int) -> int:
    """Return about as many blocks, as a cluster if they are few and all columns' fit at once.

    ``resident`` blocks run at once. A reduction over a cluster is 2.5 us shorter, for which a third
    of the blocks may be left out.
    """
    if device.capability < OVERLAPPING or blocks > MOST_CLUSTER * 3 // 2:
        return blocks
    sizes = (one for one in CLUSTERS if one <= blocks + 1)
    fitting = (one for one in sizes if one * columns <= resident * (CLUSTERED if one > 2 else 1))
    return max(fitting, default=1)


def received_bytes(sums: int) -> int:
    """Return the shared memory in which a block of a cluster receives the others' sums."""
    return sums * 4 + MOST_CLUSTER * 16


def partials_of(work: ConvWork, blocks: int, sums: int) -> tuple[Workspace, ...]:
    """Return the workspace for partial sums if several ``blocks`` add to a result."""
    return (Workspace(f"{work.prefix}partials", sums * 4),) if blocks > 1 else ()


def buffers_of(work: ConvWork, partials: tuple[Workspace, ...]) -> dict[str, Operand | str | None]:
    """Return the buffers of the pointers among the kernel parameters."""
    return {
        "x": work.x,
        "y": work.y,
        "w": work.w,
        "accumulate": work.accumulate,
        "partials": partials[0].name if partials else None,
        "arrived": ZEROS,
    }
