"""A grouped convolution of 3x3 taps on Hopper, forward or backward in its input."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
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
STRIPS = {4: (2, 4, 7), 8: (2, 4, 7), 16: (1, 2, 4), 32: (1, 2)}
"""By channels a group: how many strips of 8 columns a warp may keep rows of in its registers."""
BLOCKS = {4: 1, 8: 1, 16: 2, 32: 2}
"""Likewise, of a multiprocessor at once."""
STRIP = 8
PIXEL_BYTES = 2 * SLICE
BOX_BYTES = 8192
"""Of a box of the source, where one has several pairs of rows: enough that starting it costs
little."""
PATTERN_BYTES = 1024
RESERVED_BYTES = 1024
BARRIER_BYTES = 8
SLOTS = 2
MOST_STAGES = 16
START_PAIRS = 4
"""Pairs of rows that a multiprocessor might read while a unit begins and ends."""
MAX_EXTENT, MAX_INDEX, MAX_GRID = 2**24, 2**31 - 1, 65535


@dataclass(frozen=True, slots=True)
class Cut:
    """How an image is cut into units: strips and rows of each. A row in a box has so many pixels,
    and what is right of the source is the next row's first one if ``shared``."""

    strips: int
    rows: int
    pieces: tuple[int, int]
    row_pixels: int
    shared: bool
    box_pairs: int
    slot_pairs: int
    blocks: int
    slots: int = SLOTS

    @property
    def pairs(self) -> int:
        """Of rows, of a unit's results."""
        return ceil_div(self.rows, 2)

    @property
    def boxes(self) -> int:
        """Of a unit."""
        return self.pairs // self.box_pairs + 1

    @property
    def box_bytes(self) -> int:
        return self.box_pairs * 2 * self.row_pixels * PIXEL_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.slot_pairs * 2 * self.strips * STRIP * PIXEL_BYTES

    def stages(self, device: CudaDevice, turns: int) -> int:
        """As many as fit, or a block has boxes."""
        room = device.shared_bytes_per_multiprocessor // self.blocks - RESERVED_BYTES
        room = min(room, device.shared_bytes_per_block)
        room -= 2 * PATTERN_BYTES + self.slots * self.slot_bytes + 48 * BARRIER_BYTES
        return min(room // self.box_bytes, MOST_STAGES, turns * self.boxes)

    @property
    def least_stages(self) -> int:
        """Boxes that may have to be there before a slot of results is whole."""
        return min(self.boxes, ceil_div(self.slot_pairs, self.box_pairs) + 2)


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
        ("x_size", ctypes.c_int32 * 2),
        ("y_size", ctypes.c_int32 * 2),
        ("first", ctypes.c_int32 * 2),
        ("units", ctypes.c_int32),
        ("piece", ctypes.c_int32 * 2),
        ("pieces", ctypes.c_int32 * 2),
        *(
            (name, ctypes.c_int32)
            for name in (
                "row_pixels",
                "box_pairs",
                "stages",
                "stage_bytes",
                "slot_pairs",
                "slots",
                "slot_bytes",
                "box_bytes",
                "slots_at",
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
        if work.groups == 1 or channels[0] != channels[1] or channels[0] not in STRIPS:
            return f"{work.groups} groups of {channels[0]} and {channels[1]} channels"
        if work.kernel != (1, 3, 3) or work.output[0] != work.input[0]:
            return f"a kernel of {work.kernel}: rows are kept for 3 taps by 3"
        if (*work.stride, *work.dilation) != (1,) * 6:
            return f"a stride of {work.stride}, a dilation of {work.dilation}"
        if work.input[0] != 1:
            return f"{work.input[0]} planes"
        if not work.epilogue_free:
            return "sums that are not the results themselves: those go out by the copy engine"
        source, result = gather_sides(work)
        for side, operand in (("source", source), ("result", result)):
            reason = _why_not_operand(work, operand)
            if reason is not None:
                return f"the {side}'s {reason}"
        if max(work.w.strides[1:]) * max(channels) > MAX_INDEX:
            return "weights of a group that lie far apart"
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
        x_size, y_size = (work.input[1:], work.output[1:])[:: -1 if backward else 1]
        units = work.batch * cut.pieces[0] * cut.pieces[1]
        slices, workers = _grid(work, cut, device)
        stages = cut.stages(device, ceil_div(units, workers))
        args = HopperGroupedArgs()
        args.x_stride[:] = (source.strides[0], *source.strides[4:])
        args.w_group = work.w.strides[0]
        _, k, c, _, r, s = work.w.strides
        args.w_stride[:] = (k, c, r, s)
        args.w_pairs = c == 1 and not any(stride % 2 for stride in (work.w.strides[0], k, r, s))
        args.groups = work.groups
        args.x_size[:], args.y_size[:] = x_size, y_size
        args.first[:] = [_first(work, dim) for dim in (1, 2)]
        args.units = units
        args.piece[:] = (cut.rows, cut.strips * STRIP)
        args.pieces[:] = cut.pieces
        args.row_pixels, args.box_pairs, args.slot_pairs = (
            cut.row_pixels,
            cut.box_pairs,
            cut.slot_pairs,
        )
        args.stages, args.stage_bytes = stages, cut.box_bytes
        args.slots, args.slot_bytes = cut.slots, cut.slot_bytes
        args.box_bytes = cut.box_bytes
        args.zeroes = cut.shared
        args.slots_at = stages * cut.box_bytes + (PATTERN_BYTES if cut.shared else 0)
        args.barriers_at = args.slots_at + cut.slots * cut.slot_bytes
        total = args.barriers_at + (stages + 2 * cut.slots) * BARRIER_BYTES
        maps = {
            "x_map": (source, _map(work, source, x_size, cut.row_pixels, cut.box_pairs * 2)),
            "y_map": (result, _map(work, result, y_size, cut.strips * STRIP, cut.slot_pairs * 2)),
        }
        launch = Launch(
            _instance(work.dtype, work.in_channels, cut.strips, cut.blocks, backward=backward),
            (slices, workers, 1),
            ((9 if work.in_channels < 16 else 5) * 32, 1, 1),
            pack_maps(args, maps, x=source, w=work.w),
            total + PATTERN_BYTES,
        )
        return Fragment(f"{self.name}_{work.direction}", (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, channels, strips, BLOCKS[channels], backward=backward)
            for dtype in DTYPES
            for backward in (False, True)
            for channels, some in STRIPS.items()
            for strips in some
        ]


def cuts_of(work: ConvWork, device: CudaDevice) -> Iterator[Cut]:
    """Those that fit in shared memory. Every one gives the same bits."""
    backward = work.direction == "bwd_data"
    x_size, y_size = (work.input[1:], work.output[1:])[:: -1 if backward else 1]
    pairs = ceil_div(y_size[0], 2)
    for strips in STRIPS[work.in_channels]:
        if any(y_size[1] <= fewer * STRIP for fewer in STRIPS[work.in_channels] if fewer < strips):
            continue
        columns = ceil_div(y_size[1], strips * STRIP)
        first = _first(work, 2)
        last = first + y_size[1] + 1
        row = y_size[1] + (1 if first < 0 and last >= x_size[1] else 2)
        row = strips * STRIP + 2 if columns > 1 else row
        shared = columns == 1 and row < y_size[1] + 2 and row % STRIP == 0
        row = ceil_div(row, STRIP) * STRIP
        box = min(pairs, max(1, BOX_BYTES // (2 * row * PIXEL_BYTES)))
        # Rows of a unit are whole slots' ones, but for an image's last unit.
        for pieces in range(1, ceil_div(pairs, box) + 1):
            of_piece = ceil_div(ceil_div(pairs, pieces), box) * box
            if ceil_div(pairs, of_piece) != pieces:
                continue
            box_pairs = of_piece + 1 if of_piece <= box else box
            rows = y_size[0] if pieces == 1 else of_piece * 2
            cut = Cut(
                strips,
                rows,
                (pieces, columns),
                row,
                shared,
                box_pairs,
                min(box, of_piece),
                BLOCKS[work.in_channels],
            )
            if cut.stages(device, 2**16) >= cut.least_stages:
                yield cut


def _cost(work: ConvWork, cut: Cut, device: CudaDevice) -> int:
    """In pixels that one of the blocks at once reads, one after another."""
    slices, workers = _grid(work, cut, device)
    units = work.batch * cut.pieces[0] * cut.pieces[1]
    turns = ceil_div(units, workers) * ceil_div(slices * workers, _resident(cut, device))
    return turns * (cut.pairs + 1 + START_PAIRS) * cut.row_pixels


def _resident(cut: Cut, device: CudaDevice) -> int:
    return cut.blocks * device.multiprocessors


def _grid(work: ConvWork, cut: Cut, device: CudaDevice) -> tuple[int, int]:
    """Slices of channels, and blocks of each: as many as run at once."""
    slices = ceil_div(work.groups * work.in_channels, SLICE)
    units = work.batch * cut.pieces[0] * cut.pieces[1]
    workers = max(1, min(units, _resident(cut, device) // slices, MAX_GRID))
    return slices, ceil_div(units, ceil_div(units, workers))


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


def _map(
    work: ConvWork, operand: Operand, size: tuple[int, ...], columns: int, rows: int
) -> TileMap:
    n, _, _, _, h, w = operand.strides
    item = operand.dtype.itemsize
    return TileMap(
        dtype=operand.dtype,
        sizes=(work.groups * work.in_channels, size[1], size[0], work.batch),
        strides=tuple(max(stride * item, 16) for stride in (w, h, n)),
        swizzle=PIXEL_BYTES,
        box=(SLICE, columns, rows, 1),
    )


def _instance(
    dtype: DType, channels: int, strips: int, blocks: int, *, backward: bool
) -> Instance:
    defines = (
        ("ELEMENT", CUDA_TYPES[dtype]),
        ("ACROSS", str(int(backward))),
        ("CHANNELS", str(channels)),
        ("STRIPS", str(strips)),
        ("BLOCKS", str(blocks)),
    )
    return Instance("hopper_grouped.cu", "hopper_grouped", defines, HOPPER)
