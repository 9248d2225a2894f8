"""Kernel parameters of implicit_gemm.cu: the tensors and axes of a convolution."""

from __future__ import annotations

from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import (
    CHUNK_BYTES,
    Config,
    Gemm,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import Phase, divider, gather_axes
from convgrad_service.backends.cuda.kernels.core.limits import in_order
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides
from convgrad_service.problems.sizes import Size3

__all__ = ["MAX_PHASES", "MAX_PLANE_TAPS", "arguments", "is_linear", "taps_follow_channels"]

MAX_PHASES = 8
MAX_PLANE_TAPS = 10
"""Taps along a dimension where channels are first (``TapSet`` in implicit_gemm_planes.cuh)."""


PhaseArgs = structure("conv/implicit_gemm_args.cuh", "GatherPhase")


AxisArgs = structure("conv/implicit_gemm_args.cuh", "GatherAxis")


ImplicitGemmArgs = structure("conv/implicit_gemm_args.cuh", "ImplicitGemmArgs")


def arguments(
    work: ConvWork,
    source: Operand,
    other: Operand,
    gemm: Gemm,
    config: Config,
) -> Any:
    """Return the kernel parameters without addresses.

    ``source`` and ``other`` are the inputs: with contiguous channels, unless planes are copied.
    """
    source_channels, result_channels = work.channels
    result = work.result
    weight, size = work.direction == "bwd_weight", work.dtype.itemsize
    written = work.sizes[1]
    axes = gather_axes(work)
    one_tap = all(
        len(axis.phases) == 1
        and axis.phases[0] == Phase(1, 0, 0, 0, axis.x_size)
        and axis.x_step == 1
        for axis in axes
    )
    args = ImplicitGemmArgs()
    args.source_stride[:] = [stride * size for stride in source.strides]
    strides = [stride * size for stride in other.strides]
    if work.direction == "bwd_data":
        strides[1:3] = strides[2:0:-1]
    args.other_stride[:] = strides
    args.result_stride[:] = result.strides
    args.rows, args.columns = gemm.rows, gemm.columns
    args.source_channels, args.result_channels = source_channels, result_channels
    args.tap_chunks = ceil_div(source_channels * size, CHUNK_BYTES)
    args.cluster_log = config.cluster.bit_length() - 1
    args.workspace = config.workspace
    args.ring_bytes = config.tile.pipeline_bytes(config.steps(gemm, work.dtype))
    args.linear_source = one_tap and is_linear(source, work.batch, written)
    args.linear_other = weight and is_linear(other, work.batch, work.output)
    args.linear_result = (
        not weight and len(gemm.phases) == 1 and is_linear(result, work.batch, written)
    )
    args.plain = work.epilogue_free
    extents = (
        (work.groups, work.out_channels, work.in_channels, *work.kernel)
        if weight
        else (work.batch, work.groups, result_channels, *written)
    )
    args.result_in_vectors = in_whole_chunks(result, extents, 2)
    if weight and gemm.copies.planes:
        # Columns are adjacent results.
        args.result_stride[2] = 1
        chunk = CHUNK_BYTES // result.dtype.itemsize
        args.result_in_vectors = not any(
            stride % chunk
            for stride, extent in zip(result.strides[:2], extents[:2], strict=True)
            if extent > 1
        )
    args.pixels_fastest = not weight and result.strides[2] != 1
    args.wide_result = work.result_dtype is DType.FLOAT32
    args.batch = work.batch
    args.activation = ACTIVATIONS[work.activation]
    args.alpha, args.beta = work.alpha, work.beta
    args.by_column_tiles = divider(ceil_div(gemm.columns, config.tile.n))
    args.by_tap_chunks = divider(args.tap_chunks)
    args.by_splits = divider(config.splits)
    for dim, axis in enumerate(axes):
        args.axis[dim] = AxisArgs(
            axis.x_size, axis.x_step, axis.x_tap, axis.y_step, axis.r_step, len(axis.phases)
        )
        for place, phase in enumerate(axis.phases):
            args.phase[place][dim] = PhaseArgs(
                phase.taps,
                phase.r0,
                phase.x0,
                phase.y0,
                phase.count,
                divider(max(phase.taps, 1)),
                divider(phase.count),
            )
    return args


def taps_follow_channels(work: ConvWork) -> bool:
    """Return whether a weight is contiguous as (channels, taps), for each output channel."""
    shape = work.in_channels, *work.kernel
    wanted = contiguous_strides(shape)
    strides = zip(shape, work.w.strides[2:], wanted, strict=True)
    return all(stride == want for extent, stride, want in strides if extent > 1)


def is_linear(operand: Operand, batch: int, size: Size3) -> bool:
    """Return whether pixel p is at offset p times the stride of W."""
    return in_order((operand.strides[0], *operand.strides[3:]), (batch, *size))
