"""Grouped wgrad with few channels per group (grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import BoxStrides, box_args, box_map
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    is_exact,
    merge_of,
    why_not_grouped,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_blocks import (
    HALF_ITEMS,
    ITEMS,
    Block,
    Item,
    Parts,
    Share,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_weight_shares import (
    best_of,
    shares_of,
    time_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import (
    ZEROS,
    Arguments,
    Fragment,
    Instance,
    Launch,
    Workspace,
)
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["GroupedWeight"]

GroupedWeightArgs = structure(
    "grouped/grouped_weight.cu", "GroupedWeightArgs", anonymous=("result",)
)


class GroupedWeight(Solver[ConvWork, Share]):
    """bwd_weight with few channels per group, channels last.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and exact float32. On Hopper, boxes
    are copied by the copy engine.
    """

    name = "grouped_weight"

    def __init__(self, *, copy_engine: bool = True) -> None:
        """Create the family; without ``copy_engine`` it copies as on other GPUs."""
        self._copy_engine = copy_engine

    def solve(self, work: ConvWork, device: CudaDevice) -> Share | str:
        if (reason := why_not_grouped(work, device)) is not None:
            return reason
        share = best_of(work, device, self._has_engine(work, device))
        return share or "one pixel's taps do not fit in shared memory"

    def fragment(self, work: ConvWork, device: CudaDevice, share: Share) -> Fragment:
        engine = self._has_engine(work, device)
        parts = Parts(work, share.item, share.level, engine)
        block, splits = Block(parts, share.tile, share.slice), share.splits
        partials = f"{work.prefix}partials"
        meets = splits > 1 and not share.in_cluster
        size = prod(block.grid) * splits * block.items * parts.item.sums * 4
        pointers: dict[str, Operand | str | None] = {
            "w": work.w,
            "accumulate": work.accumulate,
            "partials": partials if meets else None,
            "met": ZEROS if meets else None,
        }
        args = _args(parts, block, share)
        if engine:
            x_map, y_map = _maps(parts, block, share)
            packed: Arguments = pack_maps(
                args, {"x_map": (work.x, x_map), "y_map": (work.y, y_map)}, **pointers
            )
        else:
            packed = pack(args, x=work.x, y=work.y, **pointers)
        launch = Launch(
            _instance(parts.item, work.dtype, is_exact(work), engine),
            (splits, *block.grid),
            ((parts.item.warps + engine) * 32, 1, 1),
            packed,
            block.total_bytes(share.stages, splits if share.in_cluster else 0),
            cluster=splits if share.in_cluster else 1,
        )
        return Fragment(
            f"{self.name}/{splits}",
            (launch,),
            (Workspace(partials, size),) if meets else (),
            expected_s=time_of(parts, block, share, device),
            order=str(share),
        )

    def instances(self) -> Iterable[Instance]:
        kinds = [(item, DType.BFLOAT16, False) for item in HALF_ITEMS]
        kinds += [(item, DType.FLOAT32, exact) for item in ITEMS for exact in (False, True)]
        return [_instance(*kind, engine) for engine in (False, True) for kind in kinds]

    def _has_engine(self, work: ConvWork, device: CudaDevice) -> bool:
        """Whether the copy engine copies the boxes."""
        if not self._copy_engine or device.architecture not in HOPPER:
            return False
        sides = (work.x, work.in_channels), (work.y, work.out_channels)
        if any(operand.strides[1] != channels for operand, channels in sides):
            return False
        if merge_of(work).padded:
            return False
        _, share = next(iter(shares_of(work, device, True)), (0.0, None))
        if share is None:
            return False
        parts = Parts(work, share.item, share.level, True)
        maps = _maps(parts, Block(parts, share.tile, share.slice), share)
        return all(one.why_not() is None for one in maps)


def _args(parts: Parts, block: Block, share: Share) -> Any:
    work, merge, axes, tile = parts.work, parts.merge, parts.axes, share.tile
    args = GroupedWeightArgs()
    args.by_item_groups, args.item_groups = divider(block.item_groups), block.item_groups
    args.slice_channels[:] = [
        share.slice * channels for channels in (merge.in_channels, merge.out_channels)
    ]
    args.stages = share.stages
    args.rows_at, args.sources_at = block.rows_at(share.stages), block.sources_at(share.stages)
    args.received_at, args.in_cluster = block.received_at(share.stages), share.in_cluster
    fill(args, block, "y_at", "stage_bytes", "box_bytes", "sub_bytes", "x_pitch", "y_pitch")
    fill(args, block, "x_swizzle", "y_swizzle")
    fill(args, parts, "sub_boxes", "sub_step", "x_step")
    args.sub_next, args.by_sub_step = axes[2].lattice, divider(parts.sub_step)
    _describe_walk(args.walk, parts, share)
    args.by_x_merge, args.by_in_channels = divider(merge.in_channels), divider(work.in_channels)
    args.by_kernel[:] = [divider(count) for count in parts.kernel[1:]]
    args.by_tile[:] = [divider(size) for size in tile[1:]]
    args.tile[:], args.kernel[:], args.x_extent[:] = tile, parts.kernel, block.x_extent
    args.x_tap[:] = [axis.x_tap for axis in axes]
    args.slice, args.merged, args.padded = share.slice, merge.groups, merge.padded
    args.merge_channels[:] = merge.in_channels, merge.out_channels
    args.batch, args.groups = work.batch, work.groups
    args.by_items = divider(block.items)
    fill(args, parts, "row_blocks", "column_blocks")
    args.by_row_blocks, args.by_column_blocks = map(
        divider, (parts.row_blocks, parts.column_blocks)
    )
    _describe_result(args.result, work, block.items)
    if not parts.engine:
        for name, operand in (("x", work.x), ("y", work.y)):
            size = operand.dtype.itemsize
            setattr(args, f"{name}_group", operand.strides[1])
            strides = BoxStrides(operand.strides[0] * size)
            strides.spatial[:] = [stride * size for stride in operand.strides[3:]]
            setattr(args, f"{name}_stride", strides)
        threads = parts.item.warps * 32
        extents = {"x": (block.x_extent, block.x_pitch), "y": (tile, block.y_pitch)}
        for name, (merge_bytes, piece) in parts.copies.items():
            box = box_args(*extents[name], share.slice, merge_bytes, piece, threads)
            setattr(args, f"{name}_box", box)
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.lattice[:], args.y_step[:] = parts.lattices, parts.y_steps
    return args


def _describe_walk(walk: Any, parts: Parts, share: Share) -> None:
    """Fill in a ``BoxWalk``."""
    axes, tile, tiles = parts.axes, share.tile, parts.tiles(share.tile)
    walk.boxes, walk.more = divmod(parts.boxes(tile), share.splits)
    walk.by_tiles[:], walk.tiles[:] = [divider(count) for count in tiles[1:]], tiles
    walk.tile_images = tile[0]
    for dim, axis in enumerate(axes):
        walk.x_next[dim] = tile[dim + 1] * axis.x_step * axis.lattice
        walk.y_next[dim] = tile[dim + 1] * axis.axis.y_step
        walk.phases[dim] = len(axis.phases)
        for place, phase in enumerate(axis.phases):
            walk.phase[dim][place].x, walk.phase[dim][place].y = phase.x0, phase.y0
        walk.first[dim] = walk.phase[dim][0]
    walk.tap_next[:] = [axis.x_tap * axis.lattice for axis in axes[:2]]
    rows = parts.work.kernel[1] if share.level == 2 else 1
    walk.by_tap_rows, walk.tap_rows = divider(rows), rows


def _describe_result(result: Any, work: ConvWork, items: int) -> None:
    """Fill in a ``WeightResult`` of blocks with so many items."""
    result.in_channels, result.out_channels = work.in_channels, work.out_channels
    result.items, result.quads = items, _in_quads(work)
    result.w_stride[:], result.alpha, result.beta = work.w.strides, work.alpha, work.beta
    result.wide = work.result_dtype is DType.FLOAT32
    result.bfloat16 = work.dtype is DType.BFLOAT16


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


def _maps(parts: Parts, block: Block, share: Share) -> tuple[TiledMap, TiledMap]:
    """Return the tensor maps of the input and of grad_output."""
    work = parts.work
    x_shape = (work.batch, *work.input, work.groups * work.in_channels)
    y_shape = (work.batch, *work.output, work.groups * work.out_channels)
    x = box_map(work.x, x_shape, block.x_extent, parts.x_steps, block.x_pitch)
    y = box_map(work.y, y_shape, share.tile, parts.y_steps, block.y_pitch)
    return (
        replace(x, swizzle=block.x_pitch if block.x_swizzle else 0),
        replace(y, swizzle=block.y_pitch if block.y_swizzle else 0),
    )


def _instance(item: Item, dtype: DType, exact: bool, engine: bool) -> Instance:
    architectures = HOPPER if engine else ARCHITECTURES
    return Instance.of(
        "grouped/grouped_weight.cu", architectures, **item.defines(dtype, exact, engine)
    )
