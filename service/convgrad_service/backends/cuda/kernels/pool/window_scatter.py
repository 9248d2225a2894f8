"""The gradient of max pooling from indices, and max unpooling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    MIXED,
    MOVED,
    FromIndices,
    WindowForm,
    covered,
    most_positions,
    window_args,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.base import round_up
from convgrad_service.plans.cuda.device import RESERVED_BYTES, CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowScatter"]

# Threads of a block, bytes of its cells, and adjacent elements of `inner`: more if positions are in
# few windows.
LEAST_THREADS, MOST_THREADS, WARP = 128, 256, 32
CHANNELS, MORE_CHANNELS, FEW_WINDOWS = 16, 32, 3.0
MOST_BYTES = 48 * 1024
RANGE_BYTES, STEP_BYTES = 8, 16
# Adjacent elements of a thread: two in planes of one slice, where positions are in so many windows.
VECTORS, LEAST_OVERLAP, MOST_PHASES = (1, 2), 2.0, 16
# Channels last, positions in fewer windows are left to others, and so are signals.
LEAST_PHASES = 4
# Windows of a phase of a thread that are tried, and the most of all phases.
ROUNDS, MOST_STEPS = (1, 2, 4, 8), 32
# What a block and a cell cost, in windows, and threads that keep a multiprocessor busy. The chosen
# tile takes 1.03 of the time of the best measured one, on 65 layers.
A_BLOCK, CELLS_A_WINDOW, BUSY_THREADS = 256, 4, 1100
# Threads that a multiprocessor can have.
RESIDENT = 1280
# Groups of planes of a block, and what it does once, in windows of a thread.
MOST_REPEATS, PROLOGUE = 16, 7
# Parts of an axis that are tried: of the largest tiles, as many as are FITTING along the last axis.
PARTS = sorted({*range(1, 9), *(5 * 2**n // 4 for n in range(3, 31)), *(2**n for n in range(31))})
FITTING = 3
# Smaller tiles are tried only if no other fits.
FEW_THREADS = 64


ScatterArgs: Any = structure("pool/window_scatter.cu", "ScatterArgs", anonymous=("windows",))


class Side(NamedTuple):
    """Of a tile along an axis: positions of y, windows, threads, a thread's windows of a phase,
    and the tiles of a plane."""

    size: int
    box: int
    grid: int
    rounds: int
    tiles: int


@dataclass(frozen=True)
class Tile:
    """What a block computes, in ``planes`` planes and ``channels`` adjacent elements of ``inner``.

    ``phases`` are the most windows that contain a position, along each axis; a thread has
    ``vector`` of the elements, which are of type ``dtype``.
    """

    form: WindowForm
    dtype: DType
    phases: tuple[int, ...]
    sides: tuple[Side, Side, Side]
    planes: int
    channels: int
    vector: int

    @cached_property
    def threads(self) -> int:
        d, h, w = self.sides
        return self.planes * (self.channels // self.vector) * d.grid * h.grid * w.grid

    @cached_property
    def warp_threads(self) -> int:
        """Threads of whole warps."""
        return round_up(self.threads, WARP)

    @cached_property
    def steps(self) -> int:
        """A thread's windows."""
        d, h, w = self.sides
        return prod(self.phases) * d.rounds * h.rounds * w.rounds

    @property
    def chunks(self) -> int:
        return ceil_div(self.form.inner, self.channels)

    @property
    def groups(self) -> int:
        """Planes that follow one another, ``planes`` at once."""
        return ceil_div(self.form.batch, self.planes)

    @property
    def blocks(self) -> int:
        """Of a grid without repeats."""
        d, h, w = self.sides
        return self.groups * self.chunks * d.tiles * h.tiles * w.tiles

    def fit(self, device: CudaDevice) -> int:
        """Return the blocks that a multiprocessor can have."""
        fit = device.shared_bytes_per_multiprocessor // (self.places[-1] + RESERVED_BYTES)
        return max(1, min(fit, RESIDENT // max(LEAST_THREADS, self.warp_threads)))

    def repeats(self, device: CudaDevice) -> int:
        """Return how many groups a block computes: of the fastest, the fewest."""
        busy = self.fit(device) * device.multiprocessors

        def cost(repeats: int) -> int:
            blocks = self.blocks // self.groups * ceil_div(self.groups, repeats)
            return ceil_div(blocks, busy) * (repeats * self.steps + PROLOGUE)

        return min(range(1, min(self.groups, MOST_REPEATS) + 1), key=cost)

    @cached_property
    def places(self) -> tuple[int, int, int]:
        """The bytes of the cells and of their misalignment, where steps are, and all."""
        d, h, w = self.sides
        cell = max(4, self.dtype.itemsize)
        cells = self.planes * self.channels * d.size * h.size * w.size * cell
        ranges = round_up(cells, CHUNK_BYTES) + 8 * cell
        steps = ranges + round_up(RANGE_BYTES * (d.box + h.box + w.box), CHUNK_BYTES)
        return ranges, steps, steps + STEP_BYTES * self.steps

    def fits(self, most: int) -> bool:
        return self.threads <= MOST_THREADS and self.places[-1] <= most

    def cost(self, device: CudaDevice) -> float:
        """Return the windows of a multiprocessor, as if it were busy."""
        cells = self.places[0] // max(4, self.dtype.itemsize)
        resident = self.threads * self.fit(device)
        each = self.warp_threads * self.steps + A_BLOCK + cells // CELLS_A_WINDOW
        blocks = ceil_div(self.blocks, device.multiprocessors)
        return blocks * each * max(1.0, BUSY_THREADS / resident)


class WindowScatter(FromIndices[Tile]):
    """The gradient of max pooling from indices, through cells in shared memory."""

    name = "window_scatter"

    def solve(self, work: WindowWork, device: CudaDevice) -> Tile | str:
        if work.kind != "routes":
            return "no gradient of maxima"
        form, mixed = WindowForm.of(work), work.x_dtype not in (None, work.dtype)
        if mixed and (form.last or not _simple(form) or work.index_dtype is not DType.INT32):
            return "sums of another type, but not channels first with 32-bit indices"
        if form.dilated and (form.last or work.checked):
            return "dilated, and channels last or with indices to check"
        if prod(form.x_size) * form.inner >= LARGEST:
            return "an image of windows of more than 31 bits"
        if form.last and few_windows(form) and not self._moves:
            return (
                f"channels last, with positions in fewer than {LEAST_PHASES} windows, or a signal"
            )
        if (reason := form.why_not()) is not None:
            return reason
        vector = self._vector(work, form)
        for most in (MOST_BYTES, device.shared_bytes_per_block - RESERVED_BYTES):
            each = (_fitting(form, work.dtype, most, rounds, vector) for rounds in ROUNDS)
            tiles = chain.from_iterable(each)
            tile = min(tiles, key=lambda one: one.cost(device), default=None)
            if tile is not None:
                return tile
        return "windows of too many positions"

    def _vector(self, work: WindowWork, form: WindowForm) -> int:
        """Return the adjacent elements of a thread."""
        aligned = form.inner % 2 == 0 and work.dtype.itemsize <= 4
        several = aligned and _simple(form) and not self._moves and form.y_size[0] == 1
        windows = form.overlap >= LEAST_OVERLAP and prod(_phases(form)) <= MOST_PHASES
        return 2 if several and windows else 1

    def launch(self, work: WindowWork, device: CudaDevice, config: Tile, bad: str | None) -> Launch:
        tile, form, args = config, config.form, ScatterArgs()
        args.windows = window_args(form, 1, form.y_size)
        chunk = CHUNK_BYTES // work.dtype.itemsize
        args.vectors = form.inner % chunk == 0 and tile.channels % chunk == 0
        args.planes, args.channels, args.chunks = tile.planes, tile.channels, tile.chunks
        args.repeats = tile.repeats(device)
        args.phases[:], args.rounds = tile.phases, prod(side.rounds for side in tile.sides)
        for axis, (side, phases) in enumerate(zip(tile.sides, tile.phases, strict=True)):
            args.tile[axis], args.box[axis], args.grid[axis] = side.size, side.box, side.grid
            args.round[axis] = phases * side.grid if side.rounds > 1 else 0
            args.tiles[axis], args.by_tiles[axis] = side.tiles, divider(side.tiles)
            args.by_tile[axis], args.by_grid[axis] = divider(side.size), divider(side.grid)
            args.by_y_size[axis] = divider(form.y_size[axis])
        args.cells, args.steps_at, room = tile.places
        args.by_chunks = divider(tile.chunks)
        args.by_channels = divider(tile.channels // tile.vector)
        args.by_stores = divider(tile.channels // (chunk if args.vectors else 1))
        threads = max(LEAST_THREADS, tile.warp_threads)
        return Launch(
            _instance(
                (work.x_dtype or work.dtype, work.dtype),
                work.index_dtype,
                (form.y_size[0] > 1, _simple(form), self._moves),
                tile.vector,
            ),
            (tile.blocks // tile.groups * ceil_div(tile.groups, args.repeats), 1, 1),
            (threads, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
            room,
        )

    def instances(self) -> Iterable[Instance]:
        dtypes = MOVED.values() if self._moves else FLOATING
        found = [
            _instance((dtype, dtype), index, (sliced, simple, self._moves), vector)
            for dtype in dtypes
            for index in INDEX
            for sliced in (False, True)
            for simple in (False, True)
            for vector in VECTORS
            if vector == 1 or (simple and dtype.itemsize <= 4 and not sliced and not self._moves)
        ]
        if not self._moves:
            pairs = product(MIXED, (False, True))
            found += [_instance(pair, DType.INT32, (one, True, False), 1) for pair, one in pairs]
        return found


def few_windows(form: WindowForm) -> bool:
    """Whether another kernel is faster, channels last."""
    return form.one_line or prod(_phases(form)) < LEAST_PHASES


def _phases(form: WindowForm) -> tuple[int, ...]:
    return tuple(min(most_positions(axis), axis.input) for axis in form.windows)


def _fitting(form: WindowForm, dtype: DType, most: int, wanted: int, vector: int) -> Iterator[Tile]:
    """The tiles of at most ``most`` bytes: of whole planes, and of parts of one.

    A thread has ``wanted`` windows of a phase, if there are as many along an axis. With ``inner``
    of 1 parts are adjacent elements.
    """
    parts = ceil_div(form.inner, MORE_CHANNELS if form.overlap < FEW_WINDOWS else CHANNELS)
    channels = round_up(ceil_div(form.inner, parts), vector)
    if parts > 1:
        channels = round_up(channels, 8)
    phases = _phases(form)
    if wanted > 1 and wanted * prod(phases) > MOST_STEPS:
        return
    several = 1 if form.y_size[1] > 1 else 2
    sides: list[list[Side]] = []
    for index, axis in enumerate(form.windows):
        own = wanted if index == several else 1
        sides.append([])
        for size in dict.fromkeys(ceil_div(axis.output, n) for n in PARTS if n <= axis.output):
            box = covered(axis, size)
            grid = ceil_div(box, phases[index] * own)
            rounds = ceil_div(box, phases[index] * grid)
            sides[-1].append(Side(size, box, grid, rounds, ceil_div(axis.output, size)))
    whole, planes = (sides[0][0], sides[1][0], sides[2][0]), 1
    while planes <= form.batch:
        tile = Tile(form, dtype, phases, whole, planes, channels, vector)
        if not tile.fits(most):
            break
        yield tile
        planes += max(1, planes // 8)
    room = most // (channels * max(4, dtype.itemsize))  # cells of a channel
    fits = False
    for d in sides[0]:
        for h in sides[1]:
            # Adjacent elements are parts of a line, lines of a slice, or slices.
            if form.inner == 1 and d.size > 1 and h.tiles > 1:
                break
            if d.size * h.size > room:
                continue
            if fits and channels // vector * d.grid * h.grid * sides[2][0].grid < FEW_THREADS:
                break
            found = 0
            for w in sides[2]:
                if form.inner == 1 and d.size * h.size > 1 and w.tiles > 1:
                    break
                tile = Tile(form, dtype, phases, (d, h, w), 1, channels, vector)
                if not tile.fits(most):
                    continue
                yield tile
                fits = True
                found += 1
                if found == FITTING:
                    break


def _simple(form: WindowForm) -> bool:
    """Whether windows slide by whole positions."""
    return all(axis.unit == 1 and axis.step > 0 for axis in form.counted)


def _instance(
    dtypes: tuple[DType, DType], index: DType, kind: tuple[bool, bool, bool], vector: int
) -> Instance:
    sliced, simple, moves = kind
    source, element = (MOVED[one.itemsize] if moves else one for one in dtypes)
    return Instance.of(
        "pool/window_scatter.cu",
        SOURCE=source,
        ELEMENT=element,
        INDEX=index,
        SLICED=sliced,
        SIMPLE=simple,
        MOVE=moves,
        VECTOR=vector,
    )
