"""Kernel parameters (``depthwise_weight_args.cuh``) and partial sums of all depthwise wgrad
kernels."""

from __future__ import annotations

from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    Plane,
    channels_of,
    strides_of,
    why_not_depthwise,
    why_not_images,
)
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.program import ZEROS, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["CLUSTERED", "MOST_CLUSTER", "buffers_of", "elements_of", "fill_volume", "fill_weight"]
__all__ += ["fitting_blocks", "is_clustered", "partials_of", "received_bytes", "why_not_volume"]

# Of an image; offsets are 32-bit, in bytes.
MOST_ELEMENTS = 2**30
MOST_CLUSTER = 8
"""Blocks of a cluster."""
CLUSTERS = (1, 2, 3, 4, 5, 8)
"""Numbers of blocks of which clusters fill most of the parts of an H200 that they cannot exceed."""
CLUSTERED = 0.91
"""The part of an H200 that clusters of more than two blocks fill."""
CLUSTER_SMS = 16
"""SMs, of 17, among which a cluster lies."""


def elements_of(work: ConvWork) -> int:
    """Return the number of elements of both inputs."""
    return (prod(work.input) + prod(work.output)) * work.batch * work.groups


def fill_weight(args: Any, work: ConvWork, plane: Plane) -> None:
    """Fill in the kernel parameters except addresses."""
    args.x_stride[:], args.y_stride[:] = plane.strides(work.x), plane.strides(work.y)
    args.w_stride[:] = plane.weight_strides(work.w)
    if work.accumulate is not None:
        args.accumulate_stride[:] = plane.weight_strides(work.accumulate)
    args.alpha, args.beta, args.batch = work.alpha, work.beta, plane.batch
    args.channels, args.wide = channels_of(work), work.result_dtype == DType.FLOAT32
    args.x_size[:], args.y_size[:], args.pad[:] = plane.input, plane.output, plane.pad


def why_not_volume(work: ConvWork, *, in_planes: bool = False) -> str | None:
    """Return why a work is not a depthwise wgrad of tensors of up to three dimensions, channels
    last or not (`why_not_depthwise`), with a constant stride between rows of weights; None if it
    is."""
    if (reason := why_not_depthwise(work, in_planes=in_planes)) is not None:
        return reason
    if work.kernel[0] > 1 and work.w.strides[3] != work.kernel[1] * work.w.strides[4]:
        return "planes of weights that are not contiguous"
    return why_not_images(work, MOST_ELEMENTS)


def fill_volume(args: Any, work: ConvWork, vectors: int) -> None:
    """Fill in the kernel parameters of ``DepthwiseWeightVolume`` except addresses."""

    def weight_strides(operand: Operand) -> tuple[int, ...]:
        return operand.strides[0] // work.out_channels, *operand.strides[4:]

    args.x_stride[:], args.y_stride[:] = strides_of(work.x), strides_of(work.y)
    args.w_stride[:] = weight_strides(work.w)
    if work.accumulate is not None:
        args.accumulate_stride[:] = weight_strides(work.accumulate)
    args.alpha, args.beta, args.channels = work.alpha, work.beta, channels_of(work)
    args.x_size[:], args.y_size[:], args.pad[:] = work.input, work.output, work.pad
    args.stride[:], args.dilation[:] = work.stride[:2], work.dilation[:2]
    args.wide = work.result_dtype == DType.FLOAT32
    args.vectors, args.by_vectors = vectors, divider(vectors)


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
    return max((one for one in sizes if columns <= _clusters(device, one, resident)), default=1)


def _clusters(device: CudaDevice, size: int, resident: int) -> int:
    """Return the clusters of ``size`` blocks that run at once where ``resident`` blocks do."""
    if size <= 2:
        return resident // size
    together = CLUSTER_SMS * (resident // device.multiprocessors) // size
    parts = device.multiprocessors / (CLUSTER_SMS + 1)
    return min(int(parts * together), int(resident * CLUSTERED) // size)


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
