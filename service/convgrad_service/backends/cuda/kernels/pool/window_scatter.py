"""The gradient of max pooling from indices, and max unpooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    MOVED,
    FromIndices,
    WindowForm,
    covered,
    divider_of,
    most_positions,
    window_args,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowScatter"]

# Threads of a block, and adjacent elements of `inner`.
LEAST_THREADS, MOST_THREADS, WARP = 128, 256, 32
CHANNELS = 16
# Of the cells of a block.
MOST_BYTES = 32 * 1024
RANGE_BYTES, STEP_BYTES = 8, 16
# Channels last, positions in fewer windows are left to others.
LEAST_PHASES = 4
# What a block costs beside its windows, in windows.
A_BLOCK = 256
# Windows of a thread.
LEAST_WINDOWS = 16
# Parts of an axis that are tried.
PARTS = sorted({2**n for n in range(31)} | {3 * 2**n for n in range(29)} | {5, 7, 9, 10, 11, 13, 14, 15})


ScatterArgs: Any = structure("pool/window_scatter.cu", "ScatterArgs", anonymous=("windows",))


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes: ``size`` positions of y, in ``planes`` planes and ``channels``
    adjacent elements of ``inner``."""

    form: WindowForm
    size: tuple[int, ...]
    planes: int
    channels: int

    @property
    def phases(self) -> list[int]:
        """The most windows that contain a position, along each axis."""
        return _phases(self.form)

    @property
    def box(self) -> list[int]:
        """The most windows of the tile along each axis."""
        sides = zip(self.form.windows, self.size, strict=True)
        return [covered(axis, size) for axis, size in sides]

    @property
    def axis(self) -> int:
        """The axis along which a thread has several windows of a phase."""
        return 1 if self.form.y_size[1] > 1 else 2

    @property
    def grid(self) -> list[int]:
        """The threads along each axis."""
        found = list(map(ceil_div, self.box, self.phases))
        wanted = ceil_div(LEAST_WINDOWS, prod(self.phases))
        found[self.axis] = ceil_div(found[self.axis], wanted)
        return found

    @property
    def rounds(self) -> int:
        """A thread's windows of a phase."""
        return ceil_div(self.box[self.axis], self.phases[self.axis] * self.grid[self.axis])

    @property
    def threads(self) -> int:
        return self.planes * prod(self.grid) * self.channels

    @property
    def tiles(self) -> list[int]:
        """Tiles of a plane along each axis."""
        sides = zip(self.form.y_size, self.size, strict=True)
        return [ceil_div(size, own) for size, own in sides]

    @property
    def chunks(self) -> int:
        return ceil_div(self.form.inner, self.channels)

    @property
    def blocks(self) -> int:
        return ceil_div(self.form.batch, self.planes) * prod(self.tiles) * self.chunks

    def bytes(self, dtype: DType) -> tuple[int, int, int]:
        """Return those of the cells, with room for their misalignment, where steps are, and all."""
        cells = self.planes * prod(self.size) * self.channels
        cell = max(4, dtype.itemsize)
        ranges = ceil_div(cells * cell, CHUNK_BYTES) * CHUNK_BYTES + 8 * cell
        steps = ranges + ceil_div(RANGE_BYTES * sum(self.box), CHUNK_BYTES) * CHUNK_BYTES
        return ranges, steps, steps + STEP_BYTES * prod(self.phases) * self.rounds

    def cost(self, device: CudaDevice) -> int:
        """Return the windows of a multiprocessor."""
        threads = ceil_div(self.threads, WARP) * WARP
        each = threads * prod(self.phases) * self.rounds + A_BLOCK
        return ceil_div(self.blocks, device.multiprocessors) * each


class WindowScatter(FromIndices[Tile]):
    """The gradient of max pooling from indices, through cells in shared memory."""

    name = "window_scatter"

    def solve(self, work: WindowWork, device: CudaDevice) -> Tile | str:
        if work.kind != "routes":
            return "no gradient of maxima"
        if work.x_dtype not in (None, work.dtype):
            return "sums of another type"
        form = WindowForm.of(work)
        if form.dilated:
            return "dilated"
        if prod(form.x_size) * form.inner >= LARGEST:
            return "an image of windows of more than 31 bits"
        if form.last and not self._moves and prod(_phases(form)) < LEAST_PHASES:
            return f"channels last, with positions in fewer than {LEAST_PHASES} windows"
        small = [tile for tile in _tiles(form) if tile.threads <= MOST_THREADS]
        for most in (MOST_BYTES, device.shared_bytes_per_block - RESERVED_BYTES):
            fitting = [tile for tile in small if tile.bytes(work.dtype)[-1] <= most]
            if fitting:
                break
        else:
            return "windows of too many positions"
        tile = min(fitting, key=lambda tile: tile.cost(device))
        if tile.blocks > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return form.why_not() or tile

    def launch(
        self, work: WindowWork, device: CudaDevice, config: Tile, bad: str | None
    ) -> Launch:
        tile, form, args = config, config.form, ScatterArgs()
        args.windows = window_args(form, 1, form.y_size)
        chunk = CHUNK_BYTES // work.dtype.itemsize
        args.vectors = form.inner % chunk == 0 and tile.channels % chunk == 0
        args.tile[:], args.tiles[:], args.planes = tile.size, tile.tiles, tile.planes
        args.channels, args.chunks = tile.channels, tile.chunks
        args.phases[:], args.grid[:], args.rounds = tile.phases, tile.grid, tile.rounds
        args.round[tile.axis] = tile.phases[tile.axis] * tile.grid[tile.axis]
        args.box[:] = tile.box
        args.cells, args.steps_at, room = tile.bytes(work.dtype)
        args.by_chunks, args.by_channels = divider_of(tile.chunks), divider_of(tile.channels)
        args.by_stores = divider_of(tile.channels // (chunk if args.vectors else 1))
        sides = tile.tiles, tile.grid, tile.size, form.y_size
        targets = args.by_tiles, args.by_grid, args.by_tile, args.by_y_size
        for dividers, divisors in zip(targets, sides, strict=True):
            dividers[:] = [divider_of(divisor) for divisor in divisors]
        threads = max(LEAST_THREADS, ceil_div(tile.threads, WARP) * WARP)
        return Launch(
            _instance(work.dtype, work.index_dtype, form.y_size[0] > 1, self._moves),
            (tile.blocks, 1, 1),
            (threads, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
            room,
        )

    def instances(self) -> Iterable[Instance]:
        dtypes = MOVED.values() if self._moves else FLOATING
        return [
            _instance(dtype, index, sliced, self._moves)
            for dtype in dtypes
            for index in INDEX
            for sliced in (False, True)
        ]


def _phases(form: WindowForm) -> list[int]:
    return [min(most_positions(axis), axis.input) for axis in form.windows]


def _tiles(form: WindowForm) -> Iterator[Tile]:
    """Those of one plane; of several whole ones; with ``inner`` of 1 those of adjacent elements."""
    parts = ceil_div(form.inner, CHANNELS)
    channels = ceil_div(form.inner, parts)
    if parts > 1:
        channels = ceil_div(channels, 8) * 8
    whole = form.y_size
    planes = 1
    while planes <= form.batch:
        yield Tile(form, whole, planes, channels)
        planes += max(1, planes // 8)
    sizes = [list(dict.fromkeys(ceil_div(size, n) for n in PARTS if n <= size)) for size in whole]
    if form.inner > 1:
        for size in product(*sizes):
            yield Tile(form, size, 1, channels)
        return
    for axis in range(3):
        for size in sizes[axis]:
            yield Tile(form, (*(1,) * axis, size, *whole[axis + 1 :]), 1, 1)



def _instance(dtype: DType, index: DType, sliced: bool, moves: bool) -> Instance:
    element = MOVED[dtype.itemsize] if moves else dtype
    return Instance.of(
        "pool/window_scatter.cu", ELEMENT=element, INDEX=index, SLICED=sliced, MOVE=moves
    )
