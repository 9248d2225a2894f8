"""A grouped convolution of 3x3 taps on Hopper, forward or backward in its input."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.channels_last import Prepared, prepare_weight
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.gather_args import gather_sides
from convgrad_service.backends.cuda.kernels.tensor_maps import MapField, TileMap, pack_maps
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand

__all__ = ["Cut", "HopperGrouped", "cuts_of"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
SLICE = 64
"""Channels of a block: a row of 128 bytes in shared memory."""
TILES = {4: (1, 2, 4), 8: (1, 2, 4), 16: (1, 2), 32: (1,)}
"""By channels a group: how many tiles of 16 positions a warp may keep sums of in its registers."""
TILE, HALF = 16, 8
PIXEL_BYTES = 2 * SLICE
COPIED = 16
"""From so many channels on, weights come through shared memory."""
BOX_BYTES = 16384
"""Of a box of the source, about: enough that starting it costs little."""
PATTERN_BYTES = 1024
RESERVED_BYTES = 1024
BARRIER_BYTES = 8
SLOTS = 3
MOST_STAGES = 16
START_ROWS = 8
"""Rows that a multiprocessor might read while a unit begins and ends."""
ROW_PIXELS = 32
"""Pixels that it might read while a row's results wait for their products."""
MAX_EXTENT, MAX_INDEX, MAX_GRID = 2**24, 2**31 - 1, 65535


@dataclass(frozen=True, slots=True)
class Cut:
    """How images are cut into units: tiles and rows of each, of one image or of two that are half
    a tile wide. A row in a box has so many pixels, and what is right of the source is the next
    row's first one if ``shared``."""

    tiles: int
    teams: int
    images: int
    rows: int
    pieces: tuple[int, int]
    row_pixels: int
    shared: bool
    source_rows: int
    box_rows: int
    slot_rows: int
    weight_bytes: int
    blocks: int
    slots: int = SLOTS

    @property
    def columns(self) -> int:
        return self.tiles * TILE // self.images

    @property
    def boxes(self) -> int:
        """Of a unit, at most."""
        return ceil_div(self.source_rows, self.box_rows)

    @property
    def box_bytes(self) -> int:
        return self.teams * self.images * self.box_rows * self.row_pixels * PIXEL_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.teams * self.slot_rows * self.tiles * TILE * PIXEL_BYTES

    def stages(self, device: CudaDevice, turns: int) -> int:
        """As many as fit, or a block has boxes."""
        room = device.shared_bytes_per_multiprocessor // self.blocks - RESERVED_BYTES
        room = min(room, device.shared_bytes_per_block)
        room -= 2 * PATTERN_BYTES + self.slots * self.slot_bytes + self.weight_bytes
        room -= (MOST_STAGES + 2 * self.slots) * BARRIER_BYTES
        return min(room // self.box_bytes, MOST_STAGES, turns * self.boxes)

    @property
    def least_stages(self) -> int:
        """Boxes that may have to be there before a slot of results is whole."""
        return min(self.boxes, ceil_div(self.slot_rows + 2, self.box_rows) + 1)

    def units(self, batch: int) -> int:
        return ceil_div(batch, self.teams * self.images) * self.pieces[0] * self.pieces[1]


class HopperGroupedArgs(ctypes.Structure):
    """See ``hopper_grouped.cuh``."""

    _fields_ = (
        ("x_map", MapField),
        ("y_map", MapField),
        ("x", ctypes.c_uint64),
        ("w", ctypes.c_uint64),
        ("x_stride", ctypes.c_int64 * 3),
        ("w_group", ctypes.c_int64),
        ("w_stride", ctypes.c_int32 * 4),
        ("w_pairs", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("x_size", ctypes.c_int32 * 2),
        ("y_size", ctypes.c_int32 * 2),
        ("first", ctypes.c_int32 * 2),
        ("units", ctypes.c_int32),
        ("images", ctypes.c_int32),
        ("piece", ctypes.c_int32 * 2),
        ("pieces", ctypes.c_int32 * 2),
        *(
            (name, ctypes.c_int32)
            for name in (
                "row_pixels",
                "box_rows",
                "stages",
                "stage_bytes",
                "slot_rows",
                "slots",
                "slot_bytes",
                "result_row",
                "source_half",
                "result_half",
                "source_team",
                "result_team",
                "slots_at",
                "weights_at",
                "barriers_at",
                "zeroes",
            )
        ),
    )


class HopperGrouped:
    """fwd and bwd_data in 16 bits, of 3x3 taps with stride 1: rows stream through shared memory."""

    name = "hopper_grouped"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Judged by what a cut along N or H does not change."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no copies of tiles"
        if work.dtype not in DTYPES or work.result_dtype is not work.dtype:
            return f"{work.dtype} to {work.result_dtype}, not 16 bits on both sides"
        channels = work.in_channels, work.out_channels
        if work.groups == 1 or channels[0] != channels[1] or channels[0] not in TILES:
            return f"{work.groups} groups of {channels[0]} and {channels[1]} channels"
        if work.kernel != (1, 3, 3) or work.output[0] != work.input[0]:
            return f"a kernel of {work.kernel}: rows are kept for 3 taps by 3"
        if (*work.stride, *work.dilation) != (1,) * 6:
            return f"a stride of {work.stride}, a dilation of {work.dilation}"
        if work.input[0] != 1:
            return f"{work.input[0]} planes"
        if not work.epilogue_free:
            return "sums that are not the results themselves: those go out by the copy engine"
        x_size, y_size = _sizes(work)
        above = -_first(work, 1)
        if max(above, y_size[0] + 2 - above - x_size[0]) > 2:
            return f"a padding of {work.pad}: rows of results that meet no source"
        source, result = gather_sides(work)
        for side, operand in (("source", source), ("result", result)):
            reason = _why_not_operand(work, operand)
            if reason is not None:
                return f"the {side}'s {reason}"
        if max(work.w.strides[1:]) * max(channels) > MAX_INDEX:
            return "weights of a group that lie far apart"
        if channels[0] >= COPIED and work.w.strides[2] == 1 and not _follow(work):
            return "weights that do not follow one another"
        if max(*work.input, *work.output, work.batch, *(abs(pad) for pad in work.pad)) > MAX_EXTENT:
            return f"an extent of more than {MAX_EXTENT}"
        if ceil_div(work.groups * channels[0], SLICE) > MAX_INDEX:
            return f"{work.groups} groups"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`; ``cut`` where another than the chosen one is tried."""
        cut = cut or min(cuts_of(work, device), key=lambda cut: _cost(work, cut, device))
        backward = work.direction == "bwd_data"
        source, result = gather_sides(work)
        x_size, y_size = _sizes(work)
        weight = Prepared(work.w)
        if cut.weight_bytes:
            weight = prepare_weight(
                work.w,
                work.groups,
                work.out_channels,
                work.in_channels,
                work.kernel,
                f"{work.prefix}weight_channels_last",
                device,
            )
        w = weight.operand
        slices, workers = _grid(work, cut, device)
        args = HopperGroupedArgs()
        args.x_stride[:] = (source.strides[0], *source.strides[4:])
        args.w_group = w.strides[0]
        _, k, c, _, r, s = w.strides
        args.w_stride[:] = (k, c, r, s)
        args.w_pairs = c == 1 and not any(stride % 2 for stride in (w.strides[0], k, r, s))
        args.groups, args.batch = work.groups, work.batch
        args.x_size[:], args.y_size[:] = x_size, y_size
        args.first[:] = [_first(work, dim) for dim in (1, 2)]
        args.units, args.images = cut.units(work.batch), cut.images
        args.piece[:], args.pieces[:] = (cut.rows, cut.columns), cut.pieces
        args.row_pixels, args.zeroes = cut.row_pixels, cut.shared
        args.box_rows, args.stage_bytes = cut.box_rows, cut.box_bytes
        args.stages = cut.stages(device, ceil_div(args.units, workers))
        args.slot_rows, args.slots, args.slot_bytes = cut.slot_rows, cut.slots, cut.slot_bytes
        args.result_row = cut.columns * PIXEL_BYTES
        args.source_half = args.result_half = HALF * PIXEL_BYTES
        if cut.images > 1:
            args.source_half = cut.box_bytes // (cut.teams * cut.images)
            args.result_half = cut.slot_bytes // (cut.teams * cut.images)
        args.source_team = cut.box_bytes // cut.teams
        args.result_team = cut.slot_bytes // cut.teams
        args.slots_at = args.stages * cut.box_bytes + (PATTERN_BYTES if cut.shared else 0)
        args.weights_at = args.slots_at + cut.slots * cut.slot_bytes
        args.barriers_at = args.weights_at + cut.weight_bytes
        total = args.barriers_at + (args.stages + 2 * cut.slots) * BARRIER_BYTES
        x_box = cut.row_pixels, cut.box_rows, cut.teams * cut.images
        y_box = cut.columns, cut.slot_rows, cut.teams * cut.images
        maps = {
            "x_map": (source, _map(work, source, x_size, x_box)),
            "y_map": (result, _map(work, result, y_size, y_box)),
        }
        launch = Launch(
            _instance(
                work.dtype, work.in_channels, cut.tiles, cut.teams, cut.blocks, backward=backward
            ),
            (slices, workers, 1),
            (((4 if cut.weight_bytes else 8) * cut.teams + 1) * 32, 1, 1),
            pack_maps(args, maps, x=source, w=w),
            total + PATTERN_BYTES,
        )
        return Fragment(
            f"{self.name}_{work.direction}", (*weight.steps, launch), (*weight.workspace,)
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(
                dtype, channels, tiles, teams, _blocks(channels, tiles, teams), backward=backward
            )
            for dtype in DTYPES
            for backward in (False, True)
            for channels, some in TILES.items()
            for tiles in some
            for teams in ((2, 1) if channels >= COPIED else (1,))
        ]


def cuts_of(work: ConvWork, device: CudaDevice) -> Iterator[Cut]:
    """Those that fit in shared memory. Every one gives the same bits."""
    x_size, y_size = _sizes(work)
    channels = work.in_channels
    weight_bytes = SLICE * (9 * channels * work.dtype.itemsize + 16) if channels >= COPIED else 0
    images = 2 if y_size[1] <= HALF else 1
    for teams, tiles in product((2, 1), TILES[channels]):
        if teams > 1 and (channels < COPIED or work.batch < teams * images):
            continue
        if any(y_size[1] <= fewer * TILE for fewer in TILES[channels] if fewer < tiles):
            continue
        columns = tiles * TILE // images
        across = ceil_div(y_size[1], columns)
        first = _first(work, 2)
        last = first + y_size[1] + 1
        row = y_size[1] + (1 if first < 0 and last >= x_size[1] else 2)
        row = columns + 2 if across > 1 else row
        shared = across == 1 and row < y_size[1] + 2 and row % HALF == 0
        row = ceil_div(row, HALF) * HALF
        for box_bytes in (BOX_BYTES * teams, BOX_BYTES * teams // 2, BOX_BYTES * teams // 4):
            most = max(1, box_bytes // (teams * images * row * PIXEL_BYTES))
            found = False
            for down in range(1, y_size[0] + 1):
                rows = ceil_div(y_size[0], down)
                # Units of whole slots, of about as many rows each.
                slots = ceil_div(rows, most)
                slot_rows = ceil_div(rows, slots)
                rows = slots * slot_rows if down > 1 else y_size[0]
                if ceil_div(y_size[0], rows) != down:
                    continue
                source_rows = min(rows + 2, x_size[0])
                boxes = ceil_div(source_rows, most)
                cut = Cut(
                    tiles,
                    teams,
                    images,
                    rows,
                    (down, across),
                    row,
                    shared,
                    source_rows,
                    ceil_div(source_rows, boxes),
                    slot_rows,
                    weight_bytes,
                    _blocks(channels, tiles, teams),
                )
                if cut.stages(device, 2**16) >= cut.least_stages:
                    found = True
                    yield cut
                elif down == 1:
                    break
            if found:
                break


def _cost(work: ConvWork, cut: Cut, device: CudaDevice) -> int:
    """In pixels that one multiprocessor reads, one after another."""
    slices, workers = _grid(work, cut, device)
    turns = ceil_div(cut.units(work.batch), workers)
    turns *= ceil_div(slices * workers, _resident(cut, device))
    pixels = cut.row_pixels * cut.images * cut.teams + ROW_PIXELS
    return turns * cut.blocks * (cut.source_rows + START_ROWS) * pixels


def _blocks(channels: int, tiles: int, teams: int) -> int:
    """Of a multiprocessor at once, as registers allow."""
    return 1 if teams > 1 or (channels < COPIED and tiles > 2) else 2


def _resident(cut: Cut, device: CudaDevice) -> int:
    return cut.blocks * device.multiprocessors


def _grid(work: ConvWork, cut: Cut, device: CudaDevice) -> tuple[int, int]:
    """Slices of channels, and blocks of each: as many as run at once."""
    slices = ceil_div(work.groups * work.in_channels, SLICE)
    units = cut.units(work.batch)
    workers = max(1, min(units, _resident(cut, device) // slices, MAX_GRID))
    return slices, ceil_div(units, ceil_div(units, workers))


def _sizes(work: ConvWork) -> tuple[tuple[int, int], tuple[int, int]]:
    """H and W of the source and of the result."""
    sizes = work.input[1:], work.output[1:]
    return (sizes[1], sizes[0]) if work.direction == "bwd_data" else sizes


def _first(work: ConvWork, dim: int) -> int:
    """Where the source meets the first result's first tap."""
    pad = work.pad[dim]
    return pad - 2 if work.direction == "bwd_data" else -pad


def _why_not_operand(work: ConvWork, operand: Operand) -> str | None:
    channels = work.in_channels
    if operand.strides[2] != 1 or operand.strides[1] != channels:
        return "channels do not lie side by side"
    if work.groups * channels % 8:
        return f"{work.groups * channels} channels are no whole chunks of 16 bytes"
    if any(operand.strides[axis] % 8 for axis in (0, 4, 5)):
        return "pixels do not start at multiples of 16 bytes"
    if max(operand.strides) > MAX_INDEX:
        return "pixels lie far apart"
    return None


def _follow(work: ConvWork) -> bool:
    """Whether weights lie as (G, K/G, R, S, C/G) without gaps."""
    channels = work.in_channels
    row = 9 * channels
    group, k, c, _, r, s = work.w.strides
    return (group, k, c, r, s) == (row * channels, row, 1, 3 * channels, channels)


def _map(
    work: ConvWork, operand: Operand, size: tuple[int, int], box: tuple[int, int, int]
) -> TileMap:
    """Of so many columns, rows and images at once."""
    n, _, _, _, h, w = operand.strides
    item = operand.dtype.itemsize
    return TileMap(
        dtype=operand.dtype,
        sizes=(work.groups * work.in_channels, size[1], size[0], work.batch),
        strides=tuple(max(stride * item, 16) for stride in (w, h, n)),
        swizzle=PIXEL_BYTES,
        box=(SLICE, *box),
    )


def _instance(
    dtype: DType, channels: int, tiles: int, teams: int, blocks: int, *, backward: bool
) -> Instance:
    defines = (
        ("ELEMENT", CUDA_TYPES[dtype]),
        ("ACROSS", str(int(backward))),
        ("CHANNELS", str(channels)),
        ("TILES", str(tiles)),
        ("TEAMS", str(teams)),
        ("BLOCKS", str(blocks)),
    )
    return Instance("hopper_grouped.cu", "hopper_grouped", defines, HOPPER)
