"""Grouped wgrad with few channels per group (grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
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
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["GroupedWeight", "Share", "shares_of"]

MOST_PIXELS = 512
MOST_SPLITS = 255
"""What the word at which blocks meet can count."""
PARTIAL_BYTES = 64 * 2**20
"""The most bytes of partial sums, unless the caller asks for more splits."""
STAGES = (2, 3, 4)


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

    @property
    def slab_bytes(self) -> int:
        """Shared memory for a warp's sums."""
        return self.columns * 8 * (self.rows * 16 + 4) * 4

    @property
    def sums(self) -> int:
        return self.rows * 16 * self.columns * 8


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
    """What a block computes.

    Attributes
    ----------
    tile : tuple of int
        Pixels of a box: N, D, H, W.
    slice : int
        Merges.
    apart : bool
        Whether a block has the taps of one position along D and H, instead of all taps.
    stages : int
        Boxes in shared memory.
    splits : int
        Of all boxes; 0 fills the device.
    """

    tile: Size4
    slice: int
    apart: bool = False
    stages: int = 2
    splits: int = 0

    @property
    def pixels(self) -> int:
        return prod(self.tile)


PhaseArgs = structure("grouped/gw2.cu", "Phase")


GroupedWeightArgs = structure("grouped/gw2.cu", "GroupedWeightArgs")


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
        shapes = _Shapes(work)
        share = next(_shares_of(shapes, device), None)
        if share is None:
            return "one pixel's taps do not fit in shared memory"
        if _boxes(shapes, share) > MAX_BLOCKS:
            return f"{_boxes(shapes, share)} boxes of pixels are more than are counted"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, share: Share | None = None) -> Fragment:
        """See `Family.launches`. ``share`` overrides the chosen share."""
        if share is None:
            share = choose_share(_Shapes(work), device)
        shapes = _Shapes(work, share.apart)
        if not share.splits:
            share = replace(share, splits=_splits(shapes, share, device)[0])
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
        args.items, args.item_groups = block.items, block.item_groups
        args.tap_planes, args.stages = shapes.planes, share.stages
        args.boxes, args.more = divmod(_boxes(shapes, share), share.splits)
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
        for name in ("y_at", "stage_bytes", "sources_at"):
            setattr(args, name, getattr(block, name))
        args.w_stride[:], args.alpha, args.beta = work.w.strides, work.alpha, work.beta
        args.wide = work.result_dtype is DType.FLOAT32
        args.quads = _in_quads(work)
        blocks = ceil_div(merge.count, share.slice) * block.rows_of_blocks
        launch = Launch(
            _instance(item, work.dtype, is_exact(work)),
            (ceil_div(merge.count, share.slice), block.rows_of_blocks, share.splits),
            (item.warps * 32, 1, 1),
            pack(
                args,
                x=work.x,
                y=work.y,
                w=work.w,
                accumulate=work.accumulate,
                partials=partials if share.splits > 1 else None,
                met=ZEROS if share.splits > 1 else None,
            ),
            block.total_bytes,
        )
        size = blocks * share.splits * block.items * item.sums * 4 if share.splits > 1 else 0
        return Fragment(
            f"{self.name}/{share.splits}",
            (launch,),
            (Workspace(partials, size),) if size else (),
            expected_s=expected_s(shapes, share, device),
            order=f"{share}",
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        items = dict.fromkeys(ITEMS.values())
        return [
            *(_instance(item, dtype, False) for item in items for dtype in DTYPES),
            *(_instance(SMALL, dtype, False) for dtype in DTYPES if dtype.itemsize == 2),
            *(_instance(item, DType.FLOAT32, True) for item in items),
        ]


class _Shapes:
    """Sizes that depend on the share only in whether a block has all taps."""

    def __init__(self, work: ConvWork, apart: bool = False) -> None:
        self.work, self.apart = work, apart
        self.merge: Merge = merge_of(work)
        self.planes = work.kernel[0] * work.kernel[1] if apart else 1
        columns = ceil_div(self.merge.out_channels, 8)
        forward = replace(work, direction="fwd")
        self.axes: list[LatticeAxis] = [lattice_axis(forward, dim) for dim in range(3)]
        near = work.kernel == (1, 3, 3) and all(
            axis.x_step == axis.x_tap == 1 for axis in self.axes[1:]
        )
        small = near and columns == self.merge.in_chunks == 1 and work.dtype.itemsize == 2
        self.item = SMALL if small and not apart else ITEMS[widest(columns)]
        self.column_blocks = ceil_div(columns, self.item.columns)
        rows = ceil_div(work.taps // self.planes * self.merge.in_channels, 16)
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
            axis.extent(size, taps=1 if shapes.apart and dim < 2 else None)
            for dim, (axis, size) in enumerate(zip(shapes.axes, share.tile[1:], strict=True))
        ]
        self.x_extent = (share.tile[0], *extents)
        self.x_pitch = _pitch(merge.in_chunks * share.slice, work.dtype)
        self.y_pitch = _pitch(merge.out_chunks * share.slice, work.dtype)
        depth = 2 * CHUNK_BYTES // work.dtype.itemsize
        self.steps = ceil_div(share.pixels, depth)
        self.y_at = prod(self.x_extent) * self.x_pitch
        # A column of 8 may extend past the last channel of the last pixel.
        self.stage_bytes = self.y_at + self.steps * depth * self.y_pitch + CHUNK_BYTES * 8
        items = share.slice * shapes.items
        self.item_groups = ceil_div(items, item.warps)
        self.items = ceil_div(items, self.item_groups)
        self.rows_of_blocks = self.item_groups * shapes.planes
        self.k_splits = item.warps // self.items
        self.sources_at = max(share.stages * self.stage_bytes, item.warps * item.slab_bytes)
        self.total_bytes = self.sources_at + self.steps * depth * 4


def _pitch(chunks: int, dtype: DType) -> int:
    """Return the pitch of pixels in bytes, which avoids bank conflicts between the chunks of eight
    pixels or, for 32-bit types, between eight words of four pixels."""
    if dtype.itemsize == 2:
        return odd_chunks(chunks)
    return (chunks + (2 - chunks) % 4) * CHUNK_BYTES


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


def shares_of(work: ConvWork, device: CudaDevice) -> Iterator[Share]:
    """Yield candidates that fit into shared memory."""
    for apart in (False, True) if prod(work.kernel[:2]) > 1 else (False,):
        yield from _shares_of(_Shapes(work, apart), device)


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
            share = Share(tile, slice_, shapes.apart)
            if share.pixels > MOST_PIXELS:
                continue
            for stages in STAGES:
                one = replace(share, stages=stages)
                if _Block(shapes, one).total_bytes <= device.shared_bytes_per_block:
                    yield one


def choose_share(shapes: _Shapes, device: CudaDevice) -> Share:
    """Return the candidate with the least predicted time."""
    return min(
        candidates(shapes.work, device),
        key=lambda share: expected_s(_Shapes(shapes.work, share.apart), share, device),
    )


def candidates(work: ConvWork, device: CudaDevice) -> Iterator[Share]:
    """Yield shares with their splits."""
    for apart in (False, True) if prod(work.kernel[:2]) > 1 else (False,):
        shapes = _Shapes(work, apart)
        for share in _shares_of(shapes, device):
            for splits in _splits(shapes, share, device):
                yield replace(share, splits=splits)


def expected_s(shapes: _Shapes, share: Share, device: CudaDevice) -> float:
    """Return the predicted time."""
    f = features(shapes, share, device)
    loop = (f["copy"] ** 3 + f["compute"] ** 3 + f["dram"] ** 3) ** (1 / 3)
    return 3.1e-6 + f["fixed"] + loop + f["slabs"] + f["meet"]


def features(shapes: _Shapes, share: Share, device: CudaDevice) -> dict[str, float]:
    work, merge, item = shapes.work, shapes.merge, shapes.item
    block = _Block(shapes, share)
    clock = 1.755e9
    resident = max(1, min(item.blocks, device.fitting_blocks(block.total_bytes)))
    blocks = ceil_div(merge.count, share.slice) * block.rows_of_blocks * share.splits
    each = ceil_div(blocks, device.multiprocessors)
    waves = ceil_div(each, resident)
    boxes = ceil_div(_boxes(shapes, share), share.splits)
    busy = block.items * block.k_splits
    steps = ceil_div(block.steps, block.k_splits)
    bytes_ = prod(block.x_extent) * merge.in_chunks + share.pixels * merge.out_chunks
    copied = bytes_ * share.slice * CHUNK_BYTES
    mma = steps * busy * item.rows * item.columns * (2.0 if work.dtype.itemsize == 2 else 4.0)
    loads = steps * busy * (3 if item.windows else item.rows + item.columns / 2) * 4
    latency = steps * (item.rows * item.columns * 8 + 60)
    size = work.dtype.itemsize
    unique = work.batch * work.groups * (
        prod(work.input) * work.in_channels + prod(work.output) * work.out_channels
    ) * size + work.taps * work.groups * work.in_channels * work.out_channels * size
    sums = block.items * item.sums * 4
    used = 1 / merge.groups
    meet = 0.0
    if share.splits > 1:
        meet = 1.2e-6 + each * sums * used * 2 / (25 * clock)
    return {
        "fixed": waves * (1.2e-6 + boxes * 250 / clock),
        "copy": each * boxes * copied / (40 * clock),
        "compute": max(each * boxes * max(mma, loads), waves * boxes * latency) / clock,
        "dram": unique / 3.6e12,
        "slabs": each * (sums * block.k_splits / 64 + sums / 16) / clock,
        "meet": meet,
    }


def _splits(shapes: _Shapes, share: Share, device: CudaDevice) -> list[int]:
    """Return numbers of splits that fill the device or a part of it, unless the caller sets it."""
    work = shapes.work
    block = _Block(shapes, share)
    boxes = _boxes(shapes, share)
    columns = ceil_div(shapes.merge.count, share.slice) * block.rows_of_blocks
    if columns > ZEROS_BYTES // 4:
        return [1]
    if work.split_k is not None:
        return [max(1, min(work.split_k, boxes, MOST_SPLITS))]
    resident = max(1, min(shapes.item.blocks, device.fitting_blocks(block.total_bytes)))
    full = device.multiprocessors * resident
    found = {}
    partial = columns * block.items * shapes.item.sums * 4
    for part in (1, 2, 4, 8):
        wanted = max(1, full // part // columns)
        wanted = min(wanted, boxes, MOST_SPLITS, max(1, PARTIAL_BYTES // partial))
        # The fewest splits that do not increase the boxes per block.
        found[ceil_div(boxes, ceil_div(boxes, wanted))] = None
    return [*found, 1] if 1 not in found and boxes <= 8 else list(found)


def _tiles(shapes: _Shapes, share: Share) -> Size4:
    d, h, w = (
        ceil_div(axis.count, size) for axis, size in zip(shapes.axes, share.tile[1:], strict=True)
    )
    return ceil_div(shapes.work.batch, share.tile[0]), d, h, w


def _boxes(shapes: _Shapes, share: Share) -> int:
    phases = prod(len(axis.phases) for axis in shapes.axes)
    return phases * prod(_tiles(shapes, share))


def _instance(item: Item, dtype: DType, exact: bool) -> Instance:
    return Instance("grouped/gw2.cu", "gw2", item.defines(dtype, exact))
