"""Partitions of hopper_grouped: images are divided into units, over which blocks iterate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from convgrad_service.plans.cuda.device import RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["BARRIER_BYTES", "COPIED", "HALF", "PATTERN_BYTES", "PIXEL_BYTES", "SLICE", "TILES"]
__all__ += ["Cut", "blocks_of", "cost_of", "cuts_of", "first_of", "grid_of", "sizes_of"]

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
MAX_GRID = 65535


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
    workers = max(1, min(units, _resident(cut, device) // slices, MAX_GRID))
    return slices, ceil_div(units, ceil_div(units, workers))


def sizes_of(work: ConvWork) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return H and W of the source and of the result."""
    sizes = work.input[1:], work.output[1:]
    return (sizes[1], sizes[0]) if work.direction == "bwd_data" else sizes


def first_of(work: ConvWork, dim: int) -> int:
    """Return the source position of the first result's first tap."""
    pad = work.pad[dim]
    return pad - 2 if work.direction == "bwd_data" else -pad
