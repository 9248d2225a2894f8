"""Grouped wgrad with few channels per group (grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.core.lane_sum import lane_sum, lane_sum_instances
from convgrad_service.backends.cuda.kernels.core.split_sum import channel_last
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import (
    BoxStrides,
    LatticeAxis,
    Size4,
    box_args,
    candidate_tiles,
    lattice_axis,
)
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    DTYPES,
    Merge,
    is_exact,
    merge_of,
    odd_chunks,
    slices_of,
    why_not_grouped,
    widest,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["GroupedWeight", "Share", "shares_of"]

MAX_GRID_YZ = 65535
MOST_PIXELS = 512
# The most bytes of partial sums, unless the caller asks for more splits.
PARTIAL_BYTES = 64 * 2**20
STAGES = 2


@dataclass(frozen=True, slots=True)
class Item:
    """A warp tile: fragments of 16 rows (taps x channels) by columns of 8."""

    rows: int
    columns: int
    warps: int
    blocks: int
    windows: bool = False
    """Whether pixels form runs of 8 columns whose input rows are loaded once."""

    def defines(self, dtype: DType, exact: bool) -> tuple[tuple[str, str], ...]:
        return (
            ("EXACT", str(int(exact))),
            ("ELEMENT", CUDA_TYPES[dtype]),
            ("MT", str(self.rows)),
            ("NF", str(self.columns)),
            ("WARPS", str(self.warps)),
            ("BLOCKS", str(self.blocks)),
            ("WINDOWS", str(int(self.windows))),
        )


ITEMS = {
    1: Item(5, 1, 8, 2),
    2: Item(5, 2, 8, 2),
    3: Item(5, 3, 8, 2),
    4: Item(5, 4, 8, 1),
}
"""By columns. With 3x3 taps, five fragments hold all rows of 8 channels, or half of 16."""


SMALL = Item(5, 1, 8, 2, windows=True)
"""For 3x3 taps of 8 channels without dilation."""


@dataclass(frozen=True, slots=True)
class Share:
    """A block's tile of pixels (N, D, H, W), its number of merges, and the number of splits of all
    pixels, where 0 fills the device."""

    tile: Size4
    slice: int
    splits: int = 0

    @property
    def pixels(self) -> int:
        return prod(self.tile)


PhaseArgs = structure("grouped/grouped_weight.cu", "Phase")


GroupedWeightArgs = structure("grouped/grouped_weight.cu", "GroupedWeightArgs")


class GroupedWeight:
    """bwd_weight with 1 to 64 channels per group, channels last.

    Takes 16-bit types, float32 as TF32 (``precision: high``), and exact float32.
    """

    name = "grouped_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_grouped(work, device)
        if reason is not None:
            return reason
        if work.groups * work.out_channels * work.in_channels * work.taps % 4:
            return "the results are no multiple of four"
        shapes = _Shapes(work)
        share = next(_shares_of(shapes, device), None)
        if share is None:
            return "one pixel's taps do not fit in shared memory"
        if _boxes(shapes, share) > MAX_BLOCKS:
            return f"{_boxes(shapes, share)} boxes of pixels are more than are counted"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, share: Share | None = None) -> Fragment:
        """See `Family.launches`. ``share`` overrides the chosen share."""
        shapes = _Shapes(work)
        share = share or choose_share(shapes, device)
        splits = share.splits or _splits(shapes, share, device)
        merge, item, axes = shapes.merge, shapes.item, shapes.axes
        block = _Block(shapes, share)
        partials = f"{work.prefix}partials"

        args = GroupedWeightArgs()
        for name, operand in (("x", work.x), ("y", work.y)):
            size = operand.dtype.itemsize
            setattr(args, f"{name}_group", operand.strides[1])
            strides = BoxStrides(operand.strides[0] * size)
            strides.spatial[:] = [stride * size for stride in operand.strides[3:]]
            setattr(args, f"{name}_stride", strides)
        threads = item.warps * 32
        args.x_box = box_args(block.x_extent, merge.in_chunks * share.slice, block.x_pitch, threads)
        args.y_box = box_args(share.tile, merge.out_chunks * share.slice, block.y_pitch, threads)
        for name in ("batch", "groups", "in_channels", "out_channels"):
            setattr(args, name, getattr(work, name))
        args.merged, args.slice = merge.groups, share.slice
        args.row_blocks, args.column_blocks = shapes.row_blocks, shapes.column_blocks
        args.items = block.items
        args.boxes, args.more = divmod(_boxes(shapes, share), splits)
        args.kernel[:] = work.kernel
        args.tile[:], args.tiles[:] = share.tile, _tiles(shapes, share)
        args.x_size[:], args.y_size[:] = work.input, work.output
        for name in ("x_step", "x_tap", "lattice"):
            getattr(args, name)[:] = [getattr(axis, name) for axis in axes]
        args.y_step[:] = [axis.axis.y_step for axis in axes]
        for dim, axis in enumerate(axes):
            args.phases[dim] = len(axis.phases)
            for place, phase in enumerate(axis.phases):
                args.phase[dim][place] = PhaseArgs(phase.x0, phase.y0, phase.count)
        for name in ("y_at", "stage_bytes", "sources_at", "rows_at"):
            setattr(args, name, getattr(block, name))
        launch = Launch(
            _instance(item, work.dtype, is_exact(work)),
            (ceil_div(merge.count, share.slice), block.item_groups, splits),
            (item.warps * 32, 1, 1),
            pack(args, x=work.x, y=work.y, partials=partials),
            block.total_bytes,
        )
        extents = (work.groups, work.out_channels, *work.kernel, work.in_channels)
        accumulate = work.accumulate
        total = lane_sum(
            partials,
            splits,
            extents,
            channel_last(work.w),
            device,
            accumulate=None if accumulate is None else channel_last(accumulate),
            alpha=work.alpha,
            beta=work.beta,
        )
        workspace = Workspace(partials, splits * prod(extents) * DType.FLOAT32.itemsize)
        return Fragment(f"{self.name}/{splits}", (launch, total), (workspace,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        items = dict.fromkeys(ITEMS.values())
        return [
            *(_instance(item, dtype, False) for item in items for dtype in DTYPES),
            *(_instance(SMALL, dtype, False) for dtype in DTYPES if dtype.itemsize == 2),
            *(_instance(item, DType.FLOAT32, True) for item in items),
            *lane_sum_instances(),
        ]


class _Shapes:
    """Sizes that do not depend on the share."""

    def __init__(self, work: ConvWork) -> None:
        self.work = work
        self.merge: Merge = merge_of(work)
        columns = ceil_div(self.merge.out_channels, 8)
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        near = work.kernel == (1, 3, 3) and all(
            axis.x_step == axis.x_tap == 1 for axis in self.axes[1:]
        )
        small = near and columns == self.merge.in_chunks == 1 and work.dtype.itemsize == 2
        self.item = SMALL if small else ITEMS[widest(columns)]
        self.column_blocks = ceil_div(columns, self.item.columns)
        rows = ceil_div(work.taps * self.merge.in_channels, 16)
        self.row_blocks = ceil_div(rows, self.item.rows)

    @property
    def items(self) -> int:
        """Number of items per merge."""
        return self.row_blocks * self.column_blocks


class _Block:
    """The layout of a block's shared memory."""

    def __init__(self, shapes: _Shapes, share: Share) -> None:
        work, merge, item = shapes.work, shapes.merge, shapes.item
        extents = [
            axis.extent(size) for axis, size in zip(shapes.axes, share.tile[1:], strict=True)
        ]
        self.x_extent = (share.tile[0], *extents)
        self.x_pitch = _pitch(merge.in_chunks * share.slice, work.dtype)
        self.y_pitch = _pitch(merge.out_chunks * share.slice, work.dtype)
        depth = 2 * CHUNK_BYTES // work.dtype.itemsize
        pixels = ceil_div(share.pixels, depth) * depth
        self.y_at = prod(self.x_extent) * self.x_pitch
        # A column of 8 may extend past the last channel of the last pixel.
        self.stage_bytes = self.y_at + pixels * self.y_pitch + CHUNK_BYTES * 8
        items = share.slice * shapes.items
        self.items = min(items, item.warps)
        self.item_groups = ceil_div(items, self.items)
        sums = self.items * 32 * item.rows * item.columns * 4 * 4
        self.sources_at = max(STAGES * self.stage_bytes, sums)
        self.rows_at = self.sources_at + pixels * 4
        self.total_bytes = self.rows_at + shapes.row_blocks * item.rows * 16 * 4

    @property
    def copied_bytes(self) -> int:
        return self.stage_bytes


def _pitch(chunks: int, dtype: DType) -> int:
    """Return the pitch of pixels in bytes, which avoids bank conflicts between the chunks of eight
    pixels or, for 32-bit types, between eight words of four pixels."""
    if dtype.itemsize == 2:
        return odd_chunks(chunks)
    return (chunks + (2 - chunks) % 4) * CHUNK_BYTES


def shares_of(work: ConvWork, device: CudaDevice) -> Iterator[Share]:
    """Yield candidates that fit into shared memory."""
    return _shares_of(_Shapes(work), device)


def _shares_of(shapes: _Shapes, device: CudaDevice) -> Iterator[Share]:
    """Yield candidates that fit into shared memory."""
    work, merge = shapes.work, shapes.merge
    together = all(
        operand.strides[1] == channels
        for operand, channels in ((work.x, work.in_channels), (work.y, work.out_channels))
    )
    slices = slices_of(merge, together)
    steps = (1, 2, 8) if shapes.item.windows else (1, 1, 1)
    counts = [axis.count for axis in shapes.axes]
    for slice_ in slices:
        for tile in candidate_tiles(work.batch, counts, steps):
            share = Share(tile, slice_)
            if share.pixels > MOST_PIXELS:
                continue
            if _Block(shapes, share).total_bytes <= device.shared_bytes_per_block:
                yield share


def choose_share(shapes: _Shapes, device: CudaDevice) -> Share:
    """Return the candidate with the least predicted time."""
    return min(_shares_of(shapes, device), key=lambda share: _cost(shapes, share, device))


def _cost(shapes: _Shapes, share: Share, device: CudaDevice) -> float:
    """Return the cost in bytes of L2 traffic of an SM."""
    work, merge = shapes.work, shapes.merge
    block = _Block(shapes, share)
    resident = _resident(shapes, block, device)
    slices = ceil_div(merge.count, share.slice)
    splits = _splits(shapes, share, device)
    blocks = slices * block.item_groups * splits
    boxes = ceil_div(_boxes(shapes, share), splits)
    waves = ceil_div(blocks, resident * device.multiprocessors)
    # Warps without an item are idle.
    idle = block.items * block.item_groups / (share.slice * shapes.items)
    idle *= shapes.item.warps / (block.items * (shapes.item.warps // block.items))
    steps = ceil_div(share.pixels, 16) * 16 / share.pixels
    partial = work.groups * work.out_channels * work.in_channels * work.taps * 4
    busy = min(resident, ceil_div(blocks, device.multiprocessors))
    per_box = block.stage_bytes + 0.5 * share.pixels * steps * idle * block.y_pitch + 3000
    lonely = 1.0 + 0.6 / busy
    return waves * busy * boxes * per_box * lonely + 3 * splits * partial / device.multiprocessors


def _resident(shapes: _Shapes, block: _Block, device: CudaDevice) -> int:
    """Return the resident blocks per SM."""
    return max(1, min(shapes.item.blocks, device.fitting_blocks(block.total_bytes)))


def _splits(shapes: _Shapes, share: Share, device: CudaDevice) -> int:
    """Return the number of splits, which fills the device unless the caller sets it."""
    work = shapes.work
    block = _Block(shapes, share)
    boxes = _boxes(shapes, share)
    if work.split_k is not None:
        return max(1, min(work.split_k, boxes, MAX_GRID_YZ))
    columns = ceil_div(shapes.merge.count, share.slice) * block.item_groups
    wanted = max(1, device.multiprocessors * _resident(shapes, block, device) // columns)
    partial = work.groups * work.out_channels * work.in_channels * work.taps * 4
    wanted = min(wanted, boxes, MAX_GRID_YZ, max(1, PARTIAL_BYTES // partial))
    # The fewest splits that do not increase the boxes per block.
    return ceil_div(boxes, ceil_div(boxes, wanted))


def _tiles(shapes: _Shapes, share: Share) -> Size4:
    d, h, w = (
        ceil_div(axis.count, size) for axis, size in zip(shapes.axes, share.tile[1:], strict=True)
    )
    return ceil_div(shapes.work.batch, share.tile[0]), d, h, w


def _boxes(shapes: _Shapes, share: Share) -> int:
    phases = prod(len(axis.phases) for axis in shapes.axes)
    return phases * prod(_tiles(shapes, share))


def _instance(item: Item, dtype: DType, exact: bool) -> Instance:
    return Instance("grouped/grouped_weight.cu", "grouped_weight", item.defines(dtype, exact))
