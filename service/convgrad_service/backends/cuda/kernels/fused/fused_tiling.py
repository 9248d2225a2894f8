"""How the fused separable kernels lay a problem over blocks, and the time that it should take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convgrad_service.backends.cuda.kernels.fused.fused_shapes import CHUNK, ROW_BYTES, FusedShape
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, FusedWork

__all__ = [
    "SLIDING",
    "FusedTiling",
    "ahead_of",
    "expected_s",
    "room_for",
    "sliding_of",
    "strip_pixels",
    "tilings",
]

# Of taps: a bit each says whether it is inside.
MAX_ROWS = 32
# Places of fused_roles.cu's ring.
RING = 3
# Pixels of a row from which on tiles are rectangles.
WIDE = 48
SLIDING = {(3, 1): 3, (3, 2): 3, (5, 1): 0, (5, 2): 0, (7, 1): 0, (7, 2): 0}
"""Columns of the first kernel and their stride, where every input is read once for a row of taps;
the number of rows, where all of them are read at once."""


@dataclass(frozen=True, slots=True)
class FusedTiling:
    """How a problem is laid over blocks: see ``fused_args.cuh``."""

    shape: FusedShape
    passes: int
    splits: int
    stages: int
    resident: bool
    slots: int
    tile_width: int
    tiles: int
    shared_bytes: int


def sliding_of(first: ConvWork) -> tuple[int, int]:
    """The columns and the stride of an instance for them, or zeros."""
    depth, height, width = first.kernel
    given = width, first.stride[2]
    rows = SLIDING.get(given)
    if rows is None or first.dilation[2] != 1 or depth != 1 or height > MAX_ROWS:
        return 0, 0
    return given if rows in (0, height) else (0, 0)


def strip_pixels(sliding: tuple[int, int]) -> int:
    """Neighbouring pixels that a thread computes at once: as many as there are registers for."""
    return 2 if sliding == (7, 2) else 4


def ahead_of(shape: FusedShape, sliding: tuple[int, int]) -> int:
    """Rows of taps of the next strip that there are registers for while sums wait."""
    if sliding != (3, 1) or shape.single:
        return 0
    return 1 if shape.roles else 3


def room_for(tiling: FusedTiling, device: CudaDevice) -> int:
    """Blocks that run at once."""
    share = device.shared_bytes_per_multiprocessor // (tiling.shared_bytes + 1024)
    return device.multiprocessors * max(1, min(tiling.shape.blocks, share))


def tilings(
    work: FusedWork, device: CudaDevice, shapes: Iterable[FusedShape]
) -> Iterator[FusedTiling]:
    """Those that fit."""
    first, second = work.first, work.second
    chunks = ceil_div(first.groups, CHUNK)
    for shape in shapes:
        columns = ceil_div(second.out_channels, shape.outputs)
        for splits in range(1, columns + 1):
            passes = ceil_div(columns, splits)
            if splits > 1 and passes == ceil_div(columns, splits - 1):
                continue
            if shape.single and passes * chunks > 1:
                continue
            if shape.roles and passes > 1 and chunks < RING:
                continue
            ring = RING if shape.roles else 2
            slots = ring if passes == 1 else max(2, chunks)
            width, tiles = _tiles(first, shape.pixels)
            fixed = (
                1024
                + slots * shape.pixels * ROW_BYTES
                + first.taps * CHUNK * (2 * 4 + 3 * 2)
                + 4 * shape.pixels * (8 + 16 + (12 if sliding_of(first) == (0, 0) else 0))
                + 64
            )
            stage = shape.outputs * ROW_BYTES
            share = device.shared_bytes_per_multiprocessor // shape.blocks - 1024
            room = min(share, device.shared_bytes_per_block)
            stages = (room - fixed) // stage
            if stages < 2 and shape.blocks > 1:
                stages = (device.shared_bytes_per_block - fixed) // stage
            if stages < min(2, passes * chunks):
                continue
            resident = stages >= passes * chunks
            if shape.roles and not resident and stages < RING:
                continue
            stages = passes * chunks if resident else min(stages, 3)
            yield FusedTiling(
                shape,
                passes,
                splits,
                stages,
                resident,
                slots,
                width,
                tiles,
                fixed + stages * stage,
            )


def _tiles(first: ConvWork, pixels: int) -> tuple[int, int]:
    """The width of a tile's rows, 0 for a run of pixels, and the number of tiles."""
    depth, height, width = first.output
    planes = first.batch * depth
    if width >= WIDE and height > 1:
        # Rectangles, which share more inputs than runs do; with a stride, squarer ones.
        across = 8 if first.stride[2] > 1 else 16
        return across, planes * ceil_div(height, pixels // across) * ceil_div(width, across)
    return 0, ceil_div(first.pixels, pixels)


def expected_s(tiling: FusedTiling, work: FusedWork, device: CudaDevice) -> float:
    """A rough time, to choose by."""
    shape, first = tiling.shape, work.first
    chunks = ceil_div(first.groups, CHUNK)
    clock = 1.7e9
    product_s = shape.pixels * shape.outputs * CHUNK / 1600 / clock
    made_s = shape.pixels * CHUNK * (first.taps + 8) / 32 / 4 / 0.6 / clock
    step_s = max(product_s, made_s) + 1e-7
    tile_s = chunks * (step_s + (tiling.passes - 1) * (product_s + 1e-7)) + 3e-7
    room = room_for(tiling, device)
    waves = ceil_div(tiling.tiles * tiling.splits, room)
    return waves * tile_s * (room // device.multiprocessors) + 3e-6
