"""Grouped wgrad with few channels per group (grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import BoxStrides, box_args
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    DTYPES,
    is_exact,
    why_not_grouped,
)
from convgrad_service.backends.cuda.kernels.grouped.gw2_shares import (
    ITEMS,
    SMALL,
    Block,
    Item,
    Parts,
    Share,
    shares_of,
    time_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ZEROS, Fragment, Instance, Launch, Workspace
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["GroupedWeight"]

STAMPED = False
DEFINES: tuple[tuple[str, str], ...] = ()
MOST_CHANNELS = 128

PhaseArgs = structure("grouped/gw2.cu", "Phase")


GroupedWeightArgs = structure("grouped/gw2.cu", "GroupedWeightArgs")


class GroupedWeight:
    """bwd_weight with few channels per group, channels last.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and exact float32.
    """

    name = "grouped_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_grouped(work, device, most=MOST_CHANNELS)
        if reason is not None:
            return reason
        found = next(shares_of(work, device), None)
        if found is None:
            return "one pixel's taps do not fit in shared memory"
        boxes = Parts(work).boxes(found[1].tile)
        if boxes > MAX_BLOCKS:
            return f"{boxes} boxes of pixels are more than are counted"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, share: Share | None = None) -> Fragment:
        """See `Family.launches`. ``share`` overrides the chosen share."""
        if share is None:
            _, share = min(shares_of(work, device), key=lambda one: one[0])
        parts = Parts(work, share.apart)
        block = Block(parts, share.tile, share.slice)
        columns, splits = prod(block.grid), share.splits
        partials = f"{work.prefix}partials"
        size = columns * splits * block.items * parts.item.sums * 4
        launch = Launch(
            _instance(parts.item, work.dtype, is_exact(work)),
            (*block.grid, splits),
            (parts.item.warps * 32, 1, 1),
            pack(
                _args(parts, block, share),
                x=work.x,
                y=work.y,
                w=work.w,
                accumulate=work.accumulate,
                partials=partials if splits > 1 else None,
                met=ZEROS if splits > 1 else None,
                **({"stamps": "stamps"} if STAMPED else {}),
            ),
            block.total_bytes(share.stages),
        )
        return Fragment(
            f"{self.name}/{splits}",
            (launch,),
            (
                *((Workspace(partials, size),) if splits > 1 else ()),
                *((Workspace("stamps", 2**20),) if STAMPED else ()),
            ),
            expected_s=time_of(parts, block, share, device),
            order=str(share),
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        items = dict.fromkeys(ITEMS.values())
        return [
            *(_instance(item, dtype, False) for item in items for dtype in DTYPES),
            *(_instance(SMALL, dtype, False) for dtype in DTYPES if dtype.itemsize == 2),
            *(_instance(item, DType.FLOAT32, True) for item in items),
        ]


def _args(parts: Parts, block: Block, share: Share) -> Any:
    work, merge, axes = parts.work, parts.merge, parts.axes
    args = GroupedWeightArgs()
    for name, operand in (("x", work.x), ("y", work.y)):
        size = operand.dtype.itemsize
        setattr(args, f"{name}_group", operand.strides[1])
        strides = BoxStrides(operand.strides[0] * size)
        strides.spatial[:] = [stride * size for stride in operand.strides[3:]]
        setattr(args, f"{name}_stride", strides)
    threads = parts.item.warps * 32
    args.x_box = box_args(block.x_extent, merge.in_chunks * share.slice, block.x_pitch, threads)
    args.y_box = box_args(share.tile, merge.out_chunks * share.slice, block.y_pitch, threads)
    for name in ("batch", "groups", "in_channels", "out_channels"):
        setattr(args, name, getattr(work, name))
    args.merged, args.slice = merge.groups, share.slice
    args.row_blocks, args.column_blocks = parts.row_blocks, parts.column_blocks
    args.items, args.item_groups = block.items, block.item_groups
    args.tap_planes, args.stages = parts.planes, share.stages
    args.boxes, args.more = divmod(parts.boxes(share.tile), share.splits)
    args.kernel[:] = work.kernel
    args.tile[:], args.tiles[:] = share.tile, parts.tiles(share.tile)
    args.x_size[:], args.y_size[:] = work.input, work.output
    for name in ("x_step", "x_tap", "lattice"):
        getattr(args, name)[:] = [getattr(axis, name) for axis in axes]
    args.y_step[:] = [axis.axis.y_step for axis in axes]
    for dim, axis in enumerate(axes):
        args.phases[dim] = len(axis.phases)
        for place, phase in enumerate(axis.phases):
            args.phase[place][dim] = PhaseArgs(phase.x0, phase.y0, phase.count)
    args.y_at, args.stage_bytes = block.y_at, block.stage_bytes
    args.sources_at = block.sources_at(share.stages)
    args.w_stride[:], args.alpha, args.beta = work.w.strides, work.alpha, work.beta
    args.wide = work.result_dtype is DType.FLOAT32
    args.quads = _in_quads(work)
    return args


def _in_quads(work: ConvWork) -> bool:
    """Whether four adjacent channels of the result are an aligned vector."""
    extents = (work.groups, work.out_channels, 4, *work.kernel)
    others = (
        stride
        for axis, (stride, extent) in enumerate(zip(work.w.strides, extents, strict=True))
        if axis != 2 and extent > 1
    )
    return (
        work.in_channels % 4 == 0
        and work.w.strides[2] == 1
        and not any(stride % 4 for stride in others)
    )


def _instance(item: Item, dtype: DType, exact: bool) -> Instance:
    return Instance(
        "grouped/gw2.cu",
        "gw2",
        item.defines(dtype, exact) + ((("STAMPS", "1"),) if STAMPED else ()) + DEFINES,
    )
