"""Grouped 3x3 wgrad on Hopper by TMA and wgmma (hopper_grouped_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS, Requirements
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import why_not_counted
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import why_not_pixels
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.base import round_up
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import (
    ZEROS,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["HopperGroupedWeight", "Share", "shares_of"]

KERNEL = (1, 3, 3)
TAPS = 3
WIDTH = 32
"""Channels of a block on both sides. M of a wgmma is these channels of two rows of the input. With
16 channels of four rows, fewer products would be unused, but pixels would be copied and read as 32
bytes, which costs more than it saves (measured on an H200)."""
GROUP_CHANNELS = (4, 8, 16, 32)
NEAR = (8, 16, 32)
"""By instance, the adjacent channels whose products are used: those of a group, at least 8."""
ROWS, COLUMNS = 2, 8
SUMMERS, THREADS = 256, 384
APART = 1
ALIGNMENT, STATIC_BYTES = 512, 1024
LEAST_STAGES, MOST_STAGES = 4, 16
"""The fewest stages and the most. A warpgroup releases a tile only once it has its next one, and
images start with alternate warpgroups: with three stages, it could wait for one that it holds."""
MOST_BOX = 256
MOST_COLUMNS = 64
MAX_SIZE, MAX_SPLITS = 2**30, 255
# Cost model, in clocks of an H200: products of two rows and 16 columns; copies of a pixel and of a
# box; overhead of a tile and of a block; memory bytes per clock of all SMs; and the reduction over
# the blocks of a slice: fixed, per byte of a block's sums, and per share.
PRODUCT_CLOCKS, PIXEL_CLOCKS, BOX_CLOCKS, TILE_CLOCKS, START_CLOCKS = 160, 2.3, 350, 400, 2600
MEMORY_BYTES_A_CLOCK, CLOCKS_A_SECOND = 2400, 1.755e9
PUT_CLOCKS, MEET_CLOCKS, SUM_BYTES_A_CLOCK = 3500, 2600, 12.5
SHARES_CLOCKS, SHARES_AT_ONCE = 700, 16


@dataclass(frozen=True, slots=True)
class Share:
    """Images, rows and columns of a tile, and the number of splits of all tiles."""

    images: int
    rows: int
    columns: int
    splits: int


HopperGroupedWeightArgs = structure("grouped/hopper_grouped_weight.cu", "HopperGroupedWeightArgs")


NEEDS = Requirements(IN_16_BITS, hopper=True, grouped=True)


class HopperGroupedWeight(Solver[ConvWork, Share]):
    """bwd_weight on sm_90a of 3x3 kernels with stride 1 in 16-bit types, channels last, with 4, 8,
    16 or 32 channels per group on both sides."""

    name = "hopper_grouped_weight"

    def solve(self, work: ConvWork, device: CudaDevice) -> Share | str:
        """See `Solver.solve`. Splitting along N or a spatial dimension does not change whether
        there is a share."""
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.kernel != KERNEL or max(work.stride) > 1 or max(work.dilation) > 1:
            return "taps other than 3 x 3 without dilation, with stride 1"
        if work.input[0] != 1 or work.output[0] != 1 or work.pad[0] != 0:
            return "planes along D"
        channels = work.in_channels
        if channels != work.out_channels or channels not in GROUP_CHANNELS:
            return f"{channels} to {work.out_channels} channels per group; {GROUP_CHANNELS} on both"
        for side, operand in (("input", work.x), ("output", work.y)):
            reason = why_not_pixels(work, side, operand, channels)
            if reason is not None:
                return reason
        if max(*work.input, *work.output, work.batch) > MAX_SIZE:
            return f"an extent is more than {MAX_SIZE}"
        # The smallest boxes have the most slices.
        boxes = _Boxes(work, Share(1, 2 * ROWS, COLUMNS, 1))
        reasons = why_not_counted(boxes.slices), *(one.why_not() for one in _maps(boxes))
        if (reason := next(filter(None, reasons), None)) is not None:
            return reason
        return min(shares_of(work, device), key=lambda one: _clocks(work, one, device))

    def fragment(self, work: ConvWork, device: CudaDevice, share: Share) -> Fragment:
        boxes = _Boxes(work, share)
        args = _args(work, boxes, share.splits, device)
        x_map, y_map = _maps(boxes)
        partials = f"{work.prefix}partials"
        launch = Launch(
            _instance(work.dtype, boxes.near),
            (boxes.slices, share.splits, 1),
            (THREADS, 1, 1),
            pack_maps(
                args,
                {"x_map": (work.x, x_map), "y_map": (work.y, y_map)},
                partials=partials,
                w=work.w,
                accumulate=work.accumulate,
                met=ZEROS,
            ),
            boxes.shared_bytes(device),
        )
        return Fragment(
            f"{self.name}/{share.splits}",
            (launch,),
            (Workspace(partials, boxes.partial_bytes * share.splits),),
            expected_s=_clocks(work, share, device) / CLOCKS_A_SECOND,
            order=str(share),
        )

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype, near) for dtype in IN_16_BITS for near in NEAR]


class _Boxes:
    """The boxes and products of a share's tiles."""

    def __init__(self, work: ConvWork, share: Share) -> None:
        self.work, self.share = work, share
        self.pixel_bytes = WIDTH * 2
        self.eights = ceil_div(share.columns, COLUMNS)
        # An odd number of pixels, so that the next row starts in other banks.
        self.y_extent = self.eights * COLUMNS + APART, share.rows + TAPS - 1, share.images
        self.column_tiles = ceil_div(work.output[2], share.columns)
        self.x_extent = self._x_columns(), share.rows, share.images
        x_bytes = prod(self.x_extent) * self.pixel_bytes
        # Past the last pixel of a row, products read the first pixels of the next row, which are
        # padding; past the last row, zeros that no copy overwrites.
        beyond = self.eights * COLUMNS + TAPS - 1 - self.x_extent[0]
        self.y_at = round_up(x_bytes + max(beyond, 0) * self.pixel_bytes, ALIGNMENT)
        self.x_gap = self.y_at - x_bytes if beyond > 0 else 0
        self.stage_bytes = self.y_at + round_up(prod(self.y_extent) * self.pixel_bytes, ALIGNMENT)
        self.row_tiles = ceil_div(work.input[1], share.rows)
        self.tiles = ceil_div(work.batch, share.images) * self.row_tiles * self.column_tiles
        self.slices = ceil_div(work.groups * work.in_channels, WIDTH)
        self.near = max(work.in_channels, NEAR[0])
        each = TAPS * self.near // 8
        self.partial_bytes = self.slices * SUMMERS * (ceil_div(each, 2) + ceil_div(each, 4)) * 16
        # Vectors that warps exchange in the reduction: one of two, then three of four.
        self.sum_bytes = SUMMERS * (each // 2 + each) * 16

    def _x_columns(self) -> int:
        """Columns of a row of the input that a box has: those that products read, or if a tile has
        whole rows, the row and its left padding. An odd number."""
        read = self.eights * COLUMNS + TAPS - 1
        if self.column_tiles > 1:
            return read + APART
        before, width, given = self.work.pad[2], self.work.input[2], self.work.output[2]
        least = max(width + before, given + TAPS - 1 - before)
        return min(read + APART, least | 1)

    @property
    def pairs_rows(self) -> bool:
        """Whether the two 8-column halves of a product belong to two sets of rows."""
        return self.eights % 2 == 1

    def stages(self, device: CudaDevice) -> int:
        room = device.shared_bytes_per_block - STATIC_BYTES - ALIGNMENT
        return min(MOST_STAGES, room // self.stage_bytes)

    def shared_bytes(self, device: CudaDevice) -> int:
        return ALIGNMENT + max(self.stages(device) * self.stage_bytes, self.sum_bytes)

    def products(self, rows: int) -> int:
        """Return the products of a tile with ``rows`` rows of the input."""
        if self.pairs_rows:
            return ceil_div(rows, 2 * ROWS) * self.eights
        return ceil_div(rows, ROWS) * (self.eights // 2)


def shares_of(work: ConvWork, device: CudaDevice) -> Iterator[Share]:
    """Yield candidates that fit into shared memory."""
    width = work.output[2]
    whole = ceil_div(width, COLUMNS) * COLUMNS
    columns = {min(width, extent) for extent in range(COLUMNS, MOST_COLUMNS + 1, COLUMNS)}
    for extent in sorted(columns):
        if extent < min(whole, MOST_COLUMNS) // 2 and extent < width:
            continue
        for rows in range(2, MOST_BOX - TAPS, 2):
            one = Share(1, rows, extent, 1)
            boxes = _Boxes(work, one)
            step = ROWS * (2 if boxes.pairs_rows else 1)
            if rows % step or rows >= work.input[1] + step:
                continue
            if boxes.stages(device) < LEAST_STAGES:
                break
            yield from _split(work, one, device)
            for images in (2, 4, 8):
                one = Share(images, rows, extent, 1)
                if rows < work.input[1] or images > work.batch:
                    break
                if _Boxes(work, one).stages(device) >= LEAST_STAGES:
                    yield from _split(work, one, device)


def _split(work: ConvWork, share: Share, device: CudaDevice) -> Iterator[Share]:
    """Yield splits that fill the device once, and fewer ones, which reduce faster."""
    boxes = _Boxes(work, share)
    if work.split_k is not None:
        yield replace(share, splits=max(1, min(work.split_k, boxes.tiles, MAX_SPLITS)))
        return
    most = min(max(1, device.multiprocessors // boxes.slices), boxes.tiles, MAX_SPLITS)
    for wanted in dict.fromkeys(max(1, most // part) for part in (1, 2, 3, 4, 6, 8)):
        # The fewest splits that do not increase the tiles per block.
        yield replace(share, splits=ceil_div(boxes.tiles, ceil_div(boxes.tiles, wanted)))


def _clocks(work: ConvWork, share: Share, device: CudaDevice) -> float:
    """Return the predicted clocks of a launch."""
    boxes = _Boxes(work, share)
    turns = ceil_div(boxes.slices * share.splits, device.multiprocessors)
    tiles = ceil_div(boxes.tiles, share.splits)
    whole, rest = divmod(work.input[1], share.rows)
    products = (whole * boxes.products(share.rows) + boxes.products(rest)) / boxes.row_tiles
    multiplied = share.images * products * PRODUCT_CLOCKS + TILE_CLOCKS
    copied = max((prod(boxes.x_extent) + prod(boxes.y_extent)) * PIXEL_CLOCKS, BOX_CLOCKS)
    pixels = prod(work.input) + prod(work.output)
    size = work.batch * pixels * work.groups * work.in_channels * work.dtype.itemsize
    fetched = size / (turns * MEMORY_BYTES_A_CLOCK)
    # Either all products follow the first tile's copies, or the last tile's follow all copies.
    loop = max(copied + tiles * multiplied, max(tiles * copied, fetched) + multiplied)
    added: float = PUT_CLOCKS
    if share.splits > 1:
        more = ceil_div(share.splits, SHARES_AT_ONCE) - 1
        partial = boxes.partial_bytes / boxes.slices / SUM_BYTES_A_CLOCK
        added = MEET_CLOCKS + partial + more * SHARES_CLOCKS
    return turns * (START_CLOCKS + loop) + added


def _args(work: ConvWork, boxes: _Boxes, splits: int, device: CudaDevice) -> Any:
    args = HopperGroupedWeightArgs()
    args.tiles, args.more = divmod(boxes.tiles, splits)
    args.w_stride[:], args.alpha, args.beta = work.w.strides, work.alpha, work.beta
    args.wide = work.result_dtype is DType.FLOAT32
    args.channels = work.groups * work.in_channels
    args.group_channels = work.in_channels
    args.by_columns, args.by_rows = divider(boxes.column_tiles), divider(boxes.row_tiles)
    args.x_size[:], args.pad[:] = work.input[1:], work.pad[1:]
    share, args.batch = boxes.share, work.batch
    args.images, args.tile_rows, args.tile_columns = share.images, share.rows, share.columns
    fill(args, boxes, "row_tiles", "column_tiles", "y_at", "stage_bytes")
    args.stages, args.x_gap = boxes.stages(device), boxes.x_gap
    args.x_bytes = prod(boxes.x_extent) * boxes.pixel_bytes
    args.y_bytes = prod(boxes.y_extent) * boxes.pixel_bytes
    args.x_image, args.y_image = args.x_bytes // share.images, args.y_bytes // share.images
    args.x_row, args.y_row = (
        extent[0] * boxes.pixel_bytes for extent in (boxes.x_extent, boxes.y_extent)
    )
    eight = COLUMNS * boxes.pixel_bytes
    x_set, y_set = ROWS * args.x_row, ROWS * args.y_row
    if boxes.pairs_rows:
        args.outer_rows, args.inner = 2 * ROWS, boxes.eights
        args.x_outer, args.y_outer, args.inner_bytes = 2 * x_set, 2 * y_set, eight
        args.x_eight, args.y_eight = x_set, y_set
    else:
        args.outer_rows, args.inner = ROWS, boxes.eights // 2
        args.x_outer, args.y_outer, args.inner_bytes = x_set, y_set, 2 * eight
        args.x_eight = args.y_eight = eight
    return args


def _maps(boxes: _Boxes) -> tuple[TiledMap, TiledMap]:
    """Return the tensor maps of the input and of grad_output (C, W, H, N)."""
    work = boxes.work
    channels, swizzle = work.groups * work.in_channels, boxes.pixel_bytes
    x_box, y_box = (WIDTH, *boxes.x_extent), (WIDTH, *boxes.y_extent)
    return (
        TiledMap.of_images(work.x, channels, work.input[1:], work.batch, x_box, swizzle),
        TiledMap.of_images(work.y, channels, work.output[1:], work.batch, y_box, swizzle),
    )


def _instance(dtype: DType, near: int) -> Instance:
    return Instance.of("grouped/hopper_grouped_weight.cu", HOPPER, ELEMENT=dtype, NEAR=near)
