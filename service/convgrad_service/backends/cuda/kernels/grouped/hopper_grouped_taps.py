"""Grouped wgrad on Hopper by TMA and wgmma (hopper_grouped_taps.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS, Requirements
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import box_map, why_not_pixels
from convgrad_service.backends.cuda.kernels.grouped.hopper_grouped_taps_boxes import (
    COLUMNS,
    ITEMS,
    PIXEL_BYTES,
    PRODUCTS,
    THREADS,
    WARPS,
    WIDTH,
    Box,
    Parts,
    Share,
    expected_s,
    shares_of,
)
from convgrad_service.backends.cuda.kernels.grouped.weight_boxes import (
    best_of,
    describe_result,
    describe_walk,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import ZEROS, Fragment, Instance, Launch, Workspace
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HopperGroupedTaps"]

SMALL_GROUPS = (4, 8, 16)
MOST_EXTENT, MAX_GRID_YZ = 2**24, 65535

HopperGroupedTapsArgs = structure(
    "grouped/hopper_grouped_taps.cu", "HopperGroupedTapsArgs", anonymous=("result",)
)


NEEDS = Requirements(IN_16_BITS, hopper=True, grouped=True)


class HopperGroupedTaps:
    """bwd_weight on sm_90a in 16-bit types, channels last, with 4, 8, 16, or a multiple of 32
    channels per group on both sides, of any stride, dilation and number of dimensions."""

    name = "hopper_grouped_taps"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        channels = work.in_channels
        if channels != work.out_channels or (channels % WIDTH and channels not in SMALL_GROUPS):
            return f"{channels} to {work.out_channels} channels per group"
        for side, operand in (("input", work.x), ("output", work.y)):
            reason = why_not_pixels(work, side, operand, channels)
            if reason is not None:
                return reason
        if max(*work.input, *work.output, work.batch) > MOST_EXTENT:
            return f"an extent is more than {MOST_EXTENT}"
        found = next(iter(shares_of(work, device)), None)
        if found is None:
            return f"{work.kernel[2]} taps in a row, or no boxes that the copy engine takes"
        parts = _parts(work, found[1])
        boxes, slices = parts.boxes(found[1].tile), max(parts.grid)
        if boxes > MAX_BLOCKS or slices > MAX_GRID_YZ:
            return f"{boxes} boxes of pixels or {slices} slices are more than a grid can have"
        refused = (one.why_not() for one in _maps(Box(parts, found[1].tile)))
        return next((reason for reason in refused if reason is not None), None)

    def launches(self, work: ConvWork, device: CudaDevice, share: Share | None = None) -> Fragment:
        """See `Family.launches`. ``share`` overrides the chosen share."""
        if share is None:
            share = best_of(work, shares_of(work, device))
        parts = _parts(work, share)
        box, splits = Box(parts, share.tile), share.splits
        x_map, y_map = _maps(box)
        partials = f"{work.prefix}partials"
        meets = splits > 1 and not share.in_cluster
        launch = Launch(
            _instance(work.dtype, parts.pairs, parts.rows, parts.columns),
            (splits, *parts.grid),
            (THREADS, 1, 1),
            pack_maps(
                _args(box, share),
                {"x_map": (work.x, x_map), "y_map": (work.y, y_map)},
                w=work.w,
                accumulate=work.accumulate,
                partials=partials if meets else None,
                met=ZEROS if meets else None,
            ),
            box.total_bytes(share.stages, splits if share.in_cluster else 0),
            cluster=splits if share.in_cluster else 1,
        )
        size = prod(parts.grid) * splits * parts.sums * 4
        return Fragment(
            f"{self.name}/{splits}",
            (launch,),
            (Workspace(partials, size),) if meets else (),
            expected_s=expected_s(box, share, device),
            order=str(share),
        )

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype, *products) for dtype in IN_16_BITS for products in PRODUCTS]


def _args(box: Box, share: Share) -> Any:
    parts, work = box.parts, box.parts.work
    axes, tile = parts.axes, box.tile
    args = HopperGroupedTapsArgs()
    describe_walk(args.walk, work, axes, tile, share.level, share.splits)
    args.by_slices[:], args.slices[:] = [divider(n) for n in parts.slices], parts.slices
    args.stages = share.stages
    fill(args, box, "stage_bytes", "y_at", "box_bytes", "sub_bytes", "steps")
    args.sub_boxes, args.sub_next = parts.sub_boxes, axes[2].lattice
    x_row, y_row = box.x_extent[3] * PIXEL_BYTES, box.y_extent[3] * parts.y_bytes
    x_plane, y_plane = box.x_extent[2] * x_row, box.y_extent[2] * y_row
    d_step, h_step = axes[0].x_step * x_plane, axes[1].x_step * x_row
    eights = 1 if box.pairs_rows else 2
    at_once = 2 if box.pairs_rows else 1
    args.x_eight, args.y_eight = COLUMNS * PIXEL_BYTES, COLUMNS * parts.y_bytes
    args.y_tap = parts.apart * y_row or parts.y_bytes
    args.x_step[:] = (box.x_extent[1] * x_plane, d_step, at_once * h_step, eights * args.x_eight)
    args.y_step[:] = (box.y_extent[1] * y_plane, y_plane, at_once * y_row, eights * args.y_eight)
    if box.pairs_rows:
        args.x_eight, args.y_eight = h_step, y_row
    args.step_counts[:] = box.step_counts
    args.by_steps[:] = [divider(count) for count in box.step_counts]
    args.steps_at, args.rows_at = box.steps_at(share.stages), box.rows_at(share.stages)
    args.received_at, args.in_cluster = box.received_at(share.stages), share.in_cluster
    w_strides = work.w.strides
    taps = sorted(
        (
            parts.residues[s] * box.sub_bytes
            + parts.shifts[s] * PIXEL_BYTES
            + r * axes[1].x_tap * x_row
            + t * axes[0].x_tap * x_plane,
            t * w_strides[3] + r * w_strides[4] + s * w_strides[5],
        )
        for t in range(parts.kernel[0])
        for r in range(parts.kernel[1])
        for s in range(parts.kernel[2])
    )
    args.taps = len(taps)
    for i, (x, w) in enumerate(taps):
        args.tap[i].x, args.tap[i].w = x, w
    channels = min(work.in_channels, WIDTH), min(work.out_channels, parts.columns)
    args.by_channels, args.groups, args.merged = divider(channels[0]), work.groups, parts.merged
    describe_result(args.result, work, channels, ITEMS)
    return args


def _maps(box: Box) -> tuple[TiledMap, TiledMap]:
    """Return the tensor maps of the input and of grad_output."""
    parts, work = box.parts, box.parts.work
    channels = work.groups * work.in_channels
    x = box_map(
        work.x, (work.batch, *work.input, channels), box.x_extent, parts.x_steps, PIXEL_BYTES
    )
    y = box_map(
        work.y, (work.batch, *work.output, channels), box.y_extent, parts.y_steps, parts.y_bytes
    )
    return replace(x, swizzle=PIXEL_BYTES), replace(y, swizzle=parts.y_bytes)


def _parts(work: ConvWork, share: Share) -> Parts:
    return Parts(work, share.level, share.by_rows)


def _instance(dtype: DType, pairs: int, rows: int, columns: int) -> Instance:
    return Instance.of(
        "grouped/hopper_grouped_taps.cu",
        HOPPER,
        ELEMENT=dtype,
        PAIRS=pairs,
        ROWS=rows,
        NF=columns // 8,
        WARPS=WARPS,
    )
