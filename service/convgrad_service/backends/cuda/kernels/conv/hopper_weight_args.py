"""Kernel parameters of hopper_weight.cu and hopper_weight_sum.cu."""

from __future__ import annotations

from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_cuts import Cut
from convgrad_service.backends.cuda.kernels.conv.hopper_weight_tiles import TILES_OF
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.planes import PixelRows
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["WeightSumArgs", "arguments", "beside", "dims_of", "fill_result"]

DIVIDERS = ("by_groups", "by_along", "by_kernel", "by_row", "by_parted", "by_group")
HopperWeightArgs = {
    parts: structure(
        "conv/hopper_weight.cu", "HopperWeightArgs", anonymous=("result", "source"), PARTS=parts
    )
    for parts in TILES_OF
}
WeightSumArgs = structure("conv/hopper_weight_sum.cu", "WeightSumArgs", anonymous=("result",))


def dims_of(work: ConvWork) -> int:
    """Return the number of spatial dimensions that are not trivial."""
    for dim in range(2):
        if max(work.input[dim], work.output[dim], work.kernel[dim]) > 1 or work.pad[dim] != 0:
            return 3 - dim
    return 1


def beside(work: ConvWork, count: int) -> bool:
    """Return whether the result's channels are contiguous in aligned groups of ``count``."""
    strides = work.w.strides
    extents = work.groups, work.out_channels, *work.kernel
    outer = zip((*strides[:2], *strides[3:]), extents, strict=True)
    return (
        strides[2] == 1
        and work.in_channels % count == 0
        and all(stride % count == 0 for stride, extent in outer if extent > 1)
    )


def fill_result(args: Any, work: ConvWork, cut: Cut) -> None:
    """Fill in the result and its tiling (``WeightResult``)."""
    args.w_stride[:], args.kernel[:] = work.w.strides, work.kernel
    args.alpha, args.beta = work.alpha, work.beta
    args.in_channels, args.out_channels = work.in_channels, work.out_channels
    fill(
        args,
        cut,
        "shared_taps",
        "boxes",
        "row_tiles",
        "column_tiles",
        "rows_first",
        "whole",
        "shares",
    )
    fill(args, cut.tile, "warpgroups", "rows", "products", "channels", "spread")
    args.fragments = cut.tile.columns // 8
    args.share_steps = cut.steps // (cut.shares * cut.summing)
    args.along = ceil_div(work.kernel[2], cut.shared_taps)
    groups = work.kernel[0] * work.kernel[1] * args.along
    row = cut.row_tiles if cut.rows_first else cut.column_tiles
    parted = (cut.tiles if cut.sums else cut.parted) // cut.copying
    args.group_tiles = cut.row_tiles // work.groups
    counts = groups, args.along, work.kernel[1], row, max(1, parted), args.group_tiles
    for name, count in zip(DIVIDERS, counts, strict=True):
        setattr(args, name, divider(count))
    args.eights = work.epilogue_free and beside(work, 8)
    args.pairs, args.wide = beside(work, 2), work.result_dtype is DType.FLOAT32


def arguments(
    work: ConvWork,
    cut: Cut,
    device: CudaDevice,
    rows: PixelRows | None,
    x: Operand,
    y: Operand,
) -> Any:
    """Return the kernel parameters of hopper_weight.cu, whose operands may be ``rows``."""
    args, read = HopperWeightArgs[cut.tile.parts](), rows or work
    fill_result(args, work, cut)
    args.batch, args.y_size[:] = read.batch, read.output
    fill(args, read, "stride", "dilation", "pad")
    args.dims, args.box_bytes = dims_of(work), cut.box_bytes
    pixels = read.output[2] if rows is None else rows.y.extents[0]
    args.halo = cut.halo if rows is None else -pixels % rows.step_pixels
    args.stages = cut.stages(device)
    args.stage_bytes, args.step_bytes = cut.stage_bytes, cut.arriving_bytes
    for dim, size in enumerate((*read.output[:2], pixels + args.halo)):
        args.by_size[dim] = divider(size)
    args.slices = cut.slices if cut.together else 1
    if work.groups > 1:
        args.x_group, args.y_group = (side.strides[1] // side.strides[2] for side in (x, y))
    return args
