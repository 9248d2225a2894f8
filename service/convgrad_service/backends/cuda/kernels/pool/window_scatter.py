"""The gradient of max pooling from indices, and max unpooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

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
from convgrad_service.problems.windows import WindowAxis

__all__ = ["WindowScatter"]

# Threads of a block, and the most adjacent elements of `inner`.
WARP, CHANNELS = 32, 16
# Of a block: shared memory that is enough; of a window along an axis, and of one of a lane's in a
# row.
MOST_BYTES, RANGE_BYTES, STEP_BYTES = 16 * 1024, 8, 8
# Channels last, positions in fewer windows are left to others, and so are signals.
LEAST_WINDOWS = 4
# Windows of a class and a row of a lane that are tried.
ROUNDS = (1, 2, 4, 8)
# What a block, a window of each lane and a cell of each lane cost, in instructions, and blocks that
# keep a multiprocessor busy, of those that it can have.
A_BLOCK, A_WINDOW, A_CELL, BUSY, RESIDENT = 300, 40, 5, 20, 32
# Parts of an axis that are tried: of the largest tiles, as many as are FITTING along the last axis.
PARTS = sorted({*range(1, 9), *(5 * 2**n // 4 for n in range(3, 31)), *(2**n for n in range(31))})
FITTING = 3


ScatterArgs: Any = structure("pool/window_scatter.cu", "ScatterArgs", anonymous=("windows",))


class Side(NamedTuple):
    """Of a tile along an axis: positions of y, the most windows, and the tiles of a plane."""

    size: int
    box: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes, in ``planes`` planes and ``channels`` adjacent elements of ``inner``.

    Attributes
    ----------
    classes : int
        The most windows along the last axis that contain a position.
    lanes : int
        Along the last axis, for a channel of a plane.
    """

    form: WindowForm
    classes: int
    sides: tuple[Side, Side, Side]
    planes: int
    channels: int
    lanes: int

    @property
    def rounds(self) -> int:
        """Windows of a class and a row, of a lane."""
        across = self.sides[2]
        slack = self.classes - 1 if across.tiles > 1 else 0
        return ceil_div(across.box + slack, self.classes * self.lanes)

    @property
    def steps(self) -> int:
        """A lane's windows."""
        d, h, _ = self.sides
        return d.box * h.box * self.classes * self.rounds

    @property
    def chunks(self) -> int:
        return ceil_div(self.form.inner, self.channels)

    @property
    def blocks(self) -> int:
        d, h, w = self.sides
        planes = ceil_div(self.form.batch, self.planes)
        return planes * self.chunks * d.tiles * h.tiles * w.tiles

    def cells(self, dtype: DType) -> int:
        """Return the bytes of the cells and of their misalignment."""
        d, h, w = self.sides
        cell = max(4, dtype.itemsize)
        cells = self.planes * self.channels * d.size * h.size * w.size * cell
        return ceil_div(cells, CHUNK_BYTES) * CHUNK_BYTES + 8 * cell

    def steps_at(self, dtype: DType) -> int:
        """Return where the steps of a row are in shared memory."""
        d, h, w = self.sides
        return self.cells(dtype) + RANGE_BYTES * (d.box + h.box + w.box)

    def bytes(self, dtype: DType) -> int:
        """Return the shared memory of a block."""
        return self.steps_at(dtype) + STEP_BYTES * self.classes * self.rounds

    def cost(self, dtype: DType, device: CudaDevice) -> float:
        """Return the instructions of a multiprocessor, as if it were busy."""
        fit = device.shared_bytes_per_multiprocessor // (self.bytes(dtype) + RESERVED_BYTES)
        blocks = ceil_div(self.blocks, device.multiprocessors)
        resident = max(1, min(fit, RESIDENT, blocks))
        cells = self.cells(dtype) // max(4, dtype.itemsize) // WARP
        each = A_BLOCK + A_WINDOW * self.steps + A_CELL * cells
        return blocks * each * max(1.0, BUSY / resident)


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
        if form.last and few_windows(form) and not self._moves:
            return (
                f"channels last, with positions in fewer than {LEAST_WINDOWS} windows, or a signal"
            )
        for most in (MOST_BYTES, device.shared_bytes_per_block - RESERVED_BYTES):
            fitting = list(_fitting(form, work.dtype, most))
            costs = [tile.cost(work.dtype, device) for tile in fitting]
            tile = fitting[costs.index(min(costs))] if fitting else None
            if tile is not None:
                break
        else:
            return "windows of too many positions"
        if tile.blocks > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return form.why_not() or tile

    def launch(self, work: WindowWork, device: CudaDevice, config: Tile, bad: str | None) -> Launch:
        tile, form, args = config, config.form, ScatterArgs()
        args.windows = window_args(form, 1, form.y_size)
        chunk = CHUNK_BYTES // work.dtype.itemsize
        args.vectors = form.inner % chunk == 0 and tile.channels % chunk == 0
        args.planes, args.channels, args.chunks = tile.planes, tile.channels, tile.chunks
        args.classes, args.lanes, args.rounds = tile.classes, tile.lanes, tile.rounds
        for axis, side in enumerate(tile.sides):
            args.tile[axis], args.box[axis], args.tiles[axis] = side
            args.by_tiles[axis], args.by_tile[axis] = divider_of(side.tiles), divider_of(side.size)
            args.by_y_size[axis] = divider_of(form.y_size[axis])
        args.cells, args.steps_at = tile.cells(work.dtype), tile.steps_at(work.dtype)
        args.by_chunks, args.by_channels = divider_of(tile.chunks), divider_of(tile.channels)
        args.by_lanes = divider_of(tile.lanes)
        args.by_stores = divider_of(tile.channels // (chunk if args.vectors else 1))
        return Launch(
            _instance(work.dtype, work.index_dtype, form.y_size[0] > 1, self._moves),
            (tile.blocks, 1, 1),
            (WARP, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
            tile.bytes(work.dtype),
        )

    def instances(self) -> Iterable[Instance]:
        dtypes = MOVED.values() if self._moves else FLOATING
        return [
            _instance(dtype, index, sliced, self._moves)
            for dtype in dtypes
            for index in INDEX
            for sliced in (False, True)
        ]


def few_windows(form: WindowForm) -> bool:
    """Whether another kernel is faster, channels last."""
    return form.one_line or prod(map(_most_windows, form.windows)) < LEAST_WINDOWS


def _most_windows(axis: WindowAxis) -> int:
    """Return the most windows that contain a position, for windows of y's positions."""
    return min(most_positions(axis), axis.input)


def _fitting(form: WindowForm, dtype: DType, most: int) -> Iterator[Tile]:
    """The tiles of at most ``most`` bytes: of whole planes, and of parts of one.

    With ``inner`` of 1 parts are adjacent elements.
    """
    parts = ceil_div(form.inner, CHANNELS)
    channels = ceil_div(form.inner, parts)
    if parts > 1:
        channels = ceil_div(channels, 8) * 8
    classes = _most_windows(form.windows[2])
    sides: list[list[Side]] = []
    for axis in form.windows:
        sizes = dict.fromkeys(ceil_div(axis.output, n) for n in PARTS if n <= axis.output)
        sides.append(
            [Side(size, covered(axis, size), ceil_div(axis.output, size)) for size in sizes]
        )

    def tiles(chosen: tuple[Side, Side, Side], *, planes: bool) -> Iterator[Tile]:
        seen = set()
        for rounds in ROUNDS:
            lanes = max(1, min(WARP // channels, ceil_div(chosen[2].box, classes * rounds)))
            if lanes in seen:
                continue
            seen.add(lanes)
            several = min(form.batch, WARP // (channels * lanes)) if planes else 1
            for count in dict.fromkeys((max(1, several), max(1, several // 2))):
                tile = Tile(form, classes, chosen, count, channels, lanes)
                if tile.bytes(dtype) <= most:
                    yield tile

    yield from tiles((sides[0][0], sides[1][0], sides[2][0]), planes=True)
    room = most // (channels * max(4, dtype.itemsize))  # cells of a channel
    for d in sides[0]:
        for h in sides[1]:
            # Adjacent elements are parts of a line, lines of a slice, or slices.
            if form.inner == 1 and d.size > 1 and h.tiles > 1:
                break
            if d.size * h.size > room:
                continue
            found = 0
            for w in sides[2]:
                if form.inner == 1 and d.size * h.size > 1 and w.tiles > 1:
                    break
                some = list(tiles((d, h, w), planes=False))
                yield from some
                found += bool(some)
                if found == FITTING:
                    break


def _instance(dtype: DType, index: DType, sliced: bool, moves: bool) -> Instance:
    element = MOVED[dtype.itemsize] if moves else dtype
    return Instance.of(
        "pool/window_scatter.cu", ELEMENT=element, INDEX=index, SLICED=sliced, MOVE=moves
    )
