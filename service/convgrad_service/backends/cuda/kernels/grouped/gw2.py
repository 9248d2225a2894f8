"""Grouped wgrad with few channels per group (grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, ClassVar

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    BoxStrides,
    box_args,
    box_map,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    DTYPES,
    is_exact,
    why_not_grouped,
)
from convgrad_service.backends.cuda.kernels.grouped.gw2_shares import (
    HALF_ITEMS,
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
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import ZEROS, Fragment, Instance, Launch, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["GroupedWeight"]

STAMPED = False
DEFINES: tuple[tuple[str, str], ...] = ()
MOST_CHANNELS = 128

PhaseArgs = structure("grouped/gw2.cu", "Phase")


GroupedWeightArgs = structure(
    "grouped/gw2.cu", "GroupedWeightArgs", anonymous=("result",)
)


class GroupedWeight:
    """bwd_weight with few channels per group, channels last.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and exact float32.
    """

    name = "grouped_weight"
    engine: ClassVar[bool] = False

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_grouped(work, device, most=MOST_CHANNELS)
        if reason is not None:
            return reason
        found = next(shares_of(work, device, self.engine), None)
        if found is None:
            return "one pixel's taps do not fit in shared memory"
        boxes = Parts(work, found[1].item).boxes(found[1].tile)
        if boxes > MAX_BLOCKS:
            return f"{boxes} boxes of pixels are more than are counted"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, share: Share | None = None) -> Fragment:
        """See `Family.launches`. ``share`` overrides the chosen share."""
        if share is None:
            _, share = min(shares_of(work, device, self.engine), key=lambda one: one[0])
        parts = Parts(work, share.item, share.apart, self.engine)
        block = Block(parts, share.tile, share.slice)
        columns, splits = prod(block.grid), share.splits
        partials = f"{work.prefix}partials"
        size = columns * splits * block.items * parts.item.sums * 4
        pointers: dict[str, Operand | str | None] = {
            "w": work.w,
            "accumulate": work.accumulate,
            "partials": partials if splits > 1 else None,
            "met": ZEROS if splits > 1 else None,
            **({"stamps": "stamps"} if STAMPED else {}),
        }
        args = _args(parts, block, share)
        if self.engine:
            x_map, y_map = _maps(parts, block, share)
            packed = pack_maps(
                args, {"x_map": (work.x, x_map), "y_map": (work.y, y_map)}, **pointers
            )
        else:
            packed = pack(args, x=work.x, y=work.y, **pointers)
        launch = Launch(
            _instance(parts.item, work.dtype, is_exact(work), self.engine),
            (splits, *block.grid),
            ((parts.item.warps + self.engine) * 32, 1, 1),
            packed,
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
        half = [dtype for dtype in DTYPES if dtype.itemsize == 2]
        return [
            *(_instance(one, dtype, False, self.engine) for one in HALF_ITEMS for dtype in half),
            *(_instance(SMALL, dtype, False, self.engine) for dtype in half),
            *(_instance(one, DType.FLOAT32, e, self.engine) for one in ITEMS for e in (False, True)),
        ]


class HopperGroupedWeight(GroupedWeight):
    """The same on Hopper, with boxes copied by the copy engine."""

    name = "hopper_grouped_weight"
    engine = True

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no copies of tiles"
        for side, operand, channels in (
            ("input", work.x, work.in_channels),
            ("output", work.y, work.out_channels),
        ):
            if operand.strides[1] != channels and work.groups > 1:
                return f"the {side}'s groups are not contiguous"
        reason = super().why_not(work, device)
        if reason is not None:
            return reason
        _, share = next(shares_of(work, device, True))
        parts = Parts(work, share.item, share.apart, True)
        maps = _maps(parts, Block(parts, share.tile, share.slice), share)
        return next((why for one in maps if (why := one.why_not()) is not None), None)


def _args(parts: Parts, block: Block, share: Share) -> Any:
    work, merge, axes = parts.work, parts.merge, parts.axes
    args = GroupedWeightArgs()
    args.boxes, args.more = divmod(parts.boxes(share.tile), share.splits)
    tile, tiles = share.tile, parts.tiles(share.tile)
    args.by_item_groups, args.item_groups = divider(block.item_groups), block.item_groups
    args.by_tiles[:] = [divider(count) for count in tiles[1:]]
    args.slice_channels[:] = [
        share.slice * channels for channels in (merge.in_channels, merge.out_channels)
    ]
    args.tiles[:], args.tile[:] = tiles, tile
    for name in ("x_step", "x_tap", "lattice"):
        getattr(args, name)[:] = [getattr(axis, name) for axis in axes]
    args.y_step[:] = [axis.axis.y_step for axis in axes]
    for dim, axis in enumerate(axes):
        args.phases[dim] = len(axis.phases)
        for place, phase in enumerate(axis.phases):
            args.phase[place][dim] = PhaseArgs(phase.x0, phase.y0, phase.count)
    args.stages = share.stages
    args.rows_at, args.sources_at = block.rows_at(share.stages), block.sources_at(share.stages)
    for name in ("y_at", "stage_bytes", "box_bytes", "x_pitch", "y_pitch"):
        setattr(args, name, getattr(block, name))
    args.by_x_merge, args.by_in_channels = divider(merge.in_channels), divider(work.in_channels)
    args.by_kernel[:] = [divider(count) for count in work.kernel[1:]]
    args.by_tile[:] = [divider(size) for size in tile[1:]]
    args.kernel[:], args.x_extent[:] = work.kernel, block.x_extent
    args.tap_planes, args.slice, args.merged = parts.planes, share.slice, merge.groups
    args.batch, args.groups = work.batch, work.groups
    args.by_items = divider(block.items)
    for name in ("row_blocks", "column_blocks"):
        setattr(args, name, getattr(parts, name))
        setattr(args, f"by_{name}", divider(getattr(parts, name)))
    describe_result(args, work, (work.in_channels, work.out_channels), block.items)
    if not parts.engine:
        for name, operand in (("x", work.x), ("y", work.y)):
            size = operand.dtype.itemsize
            setattr(args, f"{name}_group", operand.strides[1])
            strides = BoxStrides(operand.strides[0] * size)
            strides.spatial[:] = [stride * size for stride in operand.strides[3:]]
            setattr(args, f"{name}_stride", strides)
        threads = parts.item.warps * 32
        args.x_box = box_args(block.x_extent, merge.in_chunks * share.slice, block.x_pitch, threads)
        args.y_box = box_args(tile, merge.out_chunks * share.slice, block.y_pitch, threads)
        args.x_size[:], args.y_size[:] = work.input, work.output
    return args


def _maps(parts: Parts, block: Block, share: Share) -> tuple[TiledMap, TiledMap]:
    """Return the tensor maps of the input and of grad_output."""
    work = parts.work
    x_shape = (work.batch, *work.input, work.groups * work.in_channels)
    y_shape = (work.batch, *work.output, work.groups * work.out_channels)
    return (
        box_map(work.x, x_shape, block.x_extent, parts.lattices, block.x_pitch),
        box_map(work.y, y_shape, share.tile, parts.y_steps, block.y_pitch),
    )


def describe_result(args: Any, work: ConvWork, channels: tuple[int, int], items: int) -> None:
    """Fill in the fields of the structure's base ``WeightResult``."""
    args.in_channels, args.out_channels = channels
    args.items, args.quads = items, _in_quads(work)
    args.w_stride[:], args.alpha, args.beta = work.w.strides, work.alpha, work.beta
    args.wide = work.result_dtype is DType.FLOAT32


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


def _instance(item: Item, dtype: DType, exact: bool, engine: bool) -> Instance:
    return Instance(
        "grouped/gw2.cu",
        "gw2",
        item.defines(dtype, exact, engine) + ((("STAMPS", "1"),) if STAMPED else ()) + DEFINES,
        HOPPER if engine else ARCHITECTURES,
    )
