"""Grouped 3x3 fprop and dgrad on Hopper (hopper_grouped.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.limits import IN_16_BITS, Requirements
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import why_not_pixels
from convgrad_service.backends.cuda.kernels.layout.channels_last import Prepared, prepare_weight
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, MOST_BLOCKS_YZ, RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HopperGrouped", "cuts_of"]

SLICE = 64
"""Channels of a block, a 128-byte row in shared memory."""
TILES = {4: (1, 4), 8: (1, 2, 4), 16: (1, 2), 32: (1,)}
"""By channels per group, the numbers of 16-position tiles whose accumulators fit into registers."""
TILE, HALF = 16, 8
PIXEL_BYTES = 2 * SLICE
COPIED = 16
"""The fewest channels per group for which weights are staged in shared memory."""
BOX_BYTES = 16384
"""Approximate size of a box of the source, which amortises issuing the copy."""
PATTERN_BYTES = 1024
BARRIER_BYTES = 8
SLOTS = {1: 3, 2: 2}
"""Store buffers by number of teams, as measured."""
MOST_STAGES = 16
START_ROWS = 8
"""Fixed cost of a unit, in rows that an SM could read in that time."""
ROW_PIXELS = 32
"""Latency of the results of a row, in pixels that an SM could read in that time."""
MAX_EXTENT, MAX_INDEX = 2**24, 2**31 - 1
# Seconds of a launch, of a unit of `cost_of`, and of a byte, fitted on an H200.
START_S, COST_S, BYTE_S = 7.1e-6, 1.15e-9, 1.32e-13


HopperGroupedArgs = structure("grouped/hopper_grouped.cuh", "HopperGroupedArgs")


NEEDS = Requirements(IN_16_BITS, hopper=True, grouped=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition of images into units of tiles and rows.

    A unit has one image, or two that are half a tile wide. With ``shared``, the padding to the
    right of a row in a box is the first pixel of the next row.
    """

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
    slots: int

    @property
    def columns(self) -> int:
        return self.tiles * TILE // self.images

    @property
    def boxes(self) -> int:
        """The most boxes per unit."""
        return ceil_div(self.source_rows, self.box_rows)

    @property
    def box_bytes(self) -> int:
        return self.teams * self.images * self.box_rows * self.row_pixels * PIXEL_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.teams * self.slot_rows * self.tiles * TILE * PIXEL_BYTES

    def stages(self, device: CudaDevice, turns: int) -> int:
        """Return the number of stages that fit, at most the boxes of a block."""
        room = device.shared_bytes_per_multiprocessor // self.blocks - RESERVED_BYTES
        room = min(room, device.shared_bytes_per_block)
        room -= 2 * PATTERN_BYTES + self.slots * self.slot_bytes + self.weight_bytes
        room -= (MOST_STAGES + 2 * self.slots) * BARRIER_BYTES
        return min(room // self.box_bytes, MOST_STAGES, turns * self.boxes)

    @property
    def least_stages(self) -> int:
        """The most boxes that a slot of results reads."""
        return min(self.boxes, ceil_div(self.slot_rows + 2, self.box_rows) + 1)

    def units(self, batch: int) -> int:
        return ceil_div(batch, self.teams * self.images) * self.pieces[0] * self.pieces[1]


class HopperGrouped(Solver[ConvWork, Cut]):
    """fwd and bwd_data of 3x3 kernels with stride 1 in 16-bit types.

    Rows stream through shared memory.
    """

    name = "hopper_grouped"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Solver.solve`. Splitting along N or H does not change whether there is a cut."""
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        if work.result_dtype is not work.dtype:
            return f"a result in {work.result_dtype}"
        channels = work.in_channels, work.out_channels
        if channels[0] != channels[1] or channels[0] not in TILES:
            return f"{work.groups} groups of {channels[0]} and {channels[1]} channels"
        if work.kernel != (1, 3, 3) or work.output[0] != work.input[0]:
            return f"a kernel of {work.kernel}: rows are kept for 3 taps by 3"
        if (*work.stride, *work.dilation) != (1,) * 6:
            return f"a stride of {work.stride}, a dilation of {work.dilation}"
        if work.input[0] != 1:
            return f"{work.input[0]} planes"
        if not work.epilogue_free:
            return "an epilogue: the copy engine stores plain sums only"
        x_size, y_size = sizes_of(work)
        above = -first_of(work, 1)
        if max(above, y_size[0] + 2 - above - x_size[0]) > 2:
            return f"a padding of {work.pad}: some rows of the result depend on padding alone"
        source, result = work.sides
        for side, operand in (("source", source), ("result", result)):
            reason = why_not_pixels(work, side, operand, channels[0])
            if reason is not None:
                return reason
            if max(operand.strides) > MAX_INDEX:
                return f"a stride of the {side} exceeds {MAX_INDEX}"
        if max(work.w.strides[1:]) * max(channels) > MAX_INDEX:
            return f"the weights of a group span more than {MAX_INDEX} elements"
        if channels[0] >= COPIED and work.w.strides[2] == 1 and not _follow(work):
            return "the weights are not contiguous"
        if max(*work.input, *work.output, work.batch, *(abs(pad) for pad in work.pad)) > MAX_EXTENT:
            return f"an extent of more than {MAX_EXTENT}"
        if ceil_div(work.groups * channels[0], SLICE) > MAX_INDEX:
            return f"{work.groups} groups"
        return min(cuts_of(work, device), key=lambda cut: cost_of(work, cut, device))

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        backward = work.direction == "bwd_data"
        source, result = work.sides
        x_size, y_size = sizes_of(work)
        weight = prepare_weight(work, device) if cut.weight_bytes else Prepared(work.w)
        w = weight.operand
        slices, workers = grid_of(work, cut, device)
        args = HopperGroupedArgs()
        args.w_group = w.strides[0]
        _, k, c, _, r, s = w.strides
        args.w_stride[:] = (k, c, r, s)
        args.w_pairs = c == 1 and not any(stride % 2 for stride in (w.strides[0], k, r, s))
        args.groups = work.groups
        args.x_size[:], args.y_size[:] = x_size, y_size
        args.backward = backward
        args.first[:] = [first_of(work, dim) for dim in (1, 2)]
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
            _instance(work.dtype, work.in_channels, cut.tiles, cut.teams, cut.blocks),
            (slices, workers, 1),
            (((4 if cut.weight_bytes else 8) * cut.teams + 1) * 32, 1, 1),
            pack_maps(args, maps, w=w),
            total + PATTERN_BYTES,
        )
        moved = work.elements * work.dtype.itemsize
        return Fragment(
            f"{self.name}_{work.direction}",
            (*weight.steps, launch),
            weight.workspace,
            expected_s=START_S + cost_of(work, cut, device) * COST_S + moved * BYTE_S,
        )

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, channels, tiles, teams, blocks_of(channels, tiles, teams))
            for dtype in IN_16_BITS
            for channels, some in TILES.items()
            for tiles in some
            for teams in ((2, 1) if channels >= COPIED else (1,))
        ]


def cuts_of(work: ConvWork, device: CudaDevice) -> Iterator[Cut]:
    """Yield the partitions that fit into shared memory. Results do not depend on them."""
    x_size, y_size = sizes_of(work)
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
        first = first_of(work, 2)
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
                # Whole slots per unit, with about equal numbers of rows.
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
                    blocks_of(channels, tiles, teams),
                    SLOTS[teams],
                )
                if cut.stages(device, 2**16) >= cut.least_stages:
                    found = True
                    yield cut
                elif down == 1:
                    break
            if found:
                break


def cost_of(work: ConvWork, cut: Cut, device: CudaDevice) -> int:
    """Return the cost in units of the time in which an SM reads a pixel."""
    slices, workers = grid_of(work, cut, device)
    blocks = slices * workers
    turns = ceil_div(cut.units(work.batch), workers) * ceil_div(blocks, _resident(cut, device))
    together = min(cut.blocks, ceil_div(blocks, device.multiprocessors))
    pixels = cut.row_pixels * cut.images * cut.teams + ROW_PIXELS
    return turns * together * (cut.source_rows + START_ROWS) * pixels


def blocks_of(channels: int, tiles: int, teams: int) -> int:
    """Return the blocks per SM that registers allow."""
    return 1 if teams > 1 or (channels < COPIED and tiles > 2) else 2


def _resident(cut: Cut, device: CudaDevice) -> int:
    return cut.blocks * device.multiprocessors


def grid_of(work: ConvWork, cut: Cut, device: CudaDevice) -> tuple[int, int]:
    """Return the grid: slices of channels, and the blocks of each that are resident at once."""
    slices = ceil_div(work.groups * work.in_channels, SLICE)
    units = cut.units(work.batch)
    workers = max(1, min(units, _resident(cut, device) // slices, MOST_BLOCKS_YZ))
    return slices, ceil_div(units, ceil_div(units, workers))


def sizes_of(work: ConvWork) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return H and W of the source and of the result."""
    sizes = work.input[1:], work.output[1:]
    return (sizes[1], sizes[0]) if work.direction == "bwd_data" else sizes


def first_of(work: ConvWork, dim: int) -> int:
    """Return the source position of the first result's first tap."""
    pad = work.pad[dim]
    return pad - 2 if work.direction == "bwd_data" else -pad


def _follow(work: ConvWork) -> bool:
    """Return whether weights are contiguous as (G, K/G, R, S, C/G)."""
    channels = work.in_channels
    row = 9 * channels
    group, k, c, _, r, s = work.w.strides
    return (group, k, c, r, s) == (row * channels, row, 1, 3 * channels, channels)


def _map(
    work: ConvWork, operand: Operand, size: tuple[int, int], box: tuple[int, int, int]
) -> TiledMap:
    """Return the tensor map of an operand, whose box is columns, rows and images."""
    channels = work.groups * work.in_channels
    return TiledMap.of_images(
        operand, channels, size, work.batch, (SLICE, *box), swizzle=PIXEL_BYTES
    )


def _instance(dtype: DType, channels: int, tiles: int, teams: int, blocks: int) -> Instance:
    return Instance.of(
        "grouped/hopper_grouped.cu",
        HOPPER,
        ELEMENT=dtype,
        CHANNELS=channels,
        TILES=tiles,
        TEAMS=teams,
        BLOCKS=blocks,
    )
