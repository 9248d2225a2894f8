"""Averages of 3x3 windows that slide by one, channels first in 16-bit types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_box import Tile
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    WindowForm,
    divider_of,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowPairs"]

# Of windows along either axis; planes and columns of a thread.
SIZE, TOGETHER, COLUMNS = 3, 2, 2
ITEMSIZE = 2
MOST_THREADS, WARP = 256, 32
# Of a block: shared memory that is tried first.
MOST_BYTES = 48 * 1024
# Instructions of a block's warp: of a tile, and of each item, line and line of results in it;
# registers of a thread, and warps that keep a multiprocessor busy.
A_TILE, AN_ITEM, A_LINE, RESULTS = 150, 120, 44, 36
REGISTERS, BUSY_WARPS = 64, 24
REGISTER_FILE, RESIDENT_THREADS, RESIDENT_BLOCKS = 65536, 2048, 32
# What is tried: pairs of planes, parts of a plane's lines or columns, and runs of a tile's lines.
GROUPS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)
PARTS = (*range(1, 9), *(5 * 2**n for n in range(1, 9)), *(2**n for n in range(4, 12)))
RUNS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A tile, of which a thread has ``run`` lines."""

    work: WindowWork
    form: WindowForm
    tile: Tile
    run: int

    @property
    def columns(self) -> int:
        """Pairs of columns."""
        return ceil_div(self.tile.size[2], COLUMNS)

    @property
    def items(self) -> int:
        groups = ceil_div(self.tile.planes, TOGETHER)
        return groups * ceil_div(self.tile.size[1], self.run) * self.columns

    @property
    def rounds(self) -> int:
        """Items of a thread."""
        return ceil_div(self.items, MOST_THREADS)

    @property
    def threads(self) -> int:
        return ceil_div(ceil_div(self.items, self.rounds), WARP) * WARP

    @property
    def tiles(self) -> int:
        return self.tile.blocks(self.form)

    def places(self) -> tuple[int, int, int, int]:
        """Return where in shared memory the second box, results and weights are, and the end."""

        def room(elements: int) -> int:
            return ceil_div(elements * ITEMSIZE, CHUNK_BYTES) * CHUNK_BYTES + 2 * CHUNK_BYTES

        box = room(self.tile.planes * self.tile.pitch(self.work, self.form)[0])
        y = room(self.tile.planes * self.tile.y_pitch(self.work, self.form)[0])
        weights = 4 * sum(self.tile.box[1:]) if self.form.varying == "inputs" else 0
        return box, 2 * box, 2 * box + y, 2 * box + y + weights

    def blocks(self, device: CudaDevice) -> int:
        """Return the blocks of the grid: as many as fit."""
        fit = min(
            device.fitting_blocks(self.places()[-1]),
            REGISTER_FILE // (REGISTERS * self.threads),
            RESIDENT_THREADS // self.threads,
            RESIDENT_BLOCKS,
        )
        return min(self.tiles, max(1, fit) * device.multiprocessors)

    def cost(self, device: CudaDevice) -> float:
        """Return the instructions of a multiprocessor, as if it were busy."""
        blocks = self.blocks(device)
        resident = ceil_div(blocks, device.multiprocessors)
        lines = (self.run + SIZE - 1) * A_LINE + self.run * RESULTS
        warps = self.threads // WARP
        each = warps * (A_TILE + self.rounds * (AN_ITEM + lines))
        return (
            ceil_div(self.tiles, blocks)
            * resident
            * each
            * max(1.0, BUSY_WARPS / (warps * resident))
        )


class WindowPairs(Solver[WindowWork, Pairs]):
    """Averages of 3x3 windows that slide by one, from boxes of the planes in shared memory."""

    name = "window_pairs"

    def solve(self, work: WindowWork, device: CudaDevice) -> Pairs | str:
        if work.kind != "sums" or work.dtype.itemsize != ITEMSIZE:
            return "no average in a 16-bit type"
        form = WindowForm.of(work)
        if form.last:
            return "channels last"
        slides = all(axis.step == 1 and axis.last - axis.first == SIZE for axis in form.windows[1:])
        if not slides or not form.is_simple(form.windows, form.counted):
            return f"windows that are not {SIZE} x {SIZE}, one apart"
        for most in (MOST_BYTES, device.shared_bytes_per_block):
            fitting = _candidates(work, form, most)
            if fitting:
                break
        else:
            return "lines that are too long for shared memory"
        found = min(fitting, key=lambda pairs: pairs.cost(device))
        if found.tile.planes * prod(form.y_size) > LARGEST or found.tiles > LARGEST // 2:
            return "planes of too many positions"
        return form.why_not() or found

    def fragment(self, work: WindowWork, device: CudaDevice, config: Pairs) -> Fragment:
        form, tile = config.form, config.tile
        args = tile.arguments(work, form)
        args.run, runs = config.run, ceil_div(tile.size[1], config.run)
        args.by_tile[1], args.by_tile[2] = divider_of(runs), divider_of(config.columns)
        args.next_at, args.y_at, args.weights_at, end = config.places()
        args.all = config.tiles
        launch = Launch(
            _instance(work.dtype, form.varying == "inputs"),
            (config.blocks(device), 1, 1),
            (config.threads, 1, 1),
            pack(args, x=work.x, y=work.y),
            end,
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, weighted)
            for dtype in FLOATING
            if dtype.itemsize == ITEMSIZE
            for weighted in (False, True)
        ]


def _candidates(work: WindowWork, form: WindowForm, most: int) -> list[Pairs]:
    """Tiles of whole planes and of parts of two, of at most ``most`` bytes of shared memory."""
    _, lines, columns = form.y_size
    whole = Tile(form.y_size, form.x_size, TOGETHER, whole=True, by_lines=False)
    tiles = [
        replace(whole, planes=groups * TOGETHER)
        for groups in GROUPS
        if (groups - 1) * TOGETHER < form.batch
    ]
    parts = [(1, ceil_div(lines, n), columns) for n in PARTS if n <= lines]
    tiles += [Tile.cut(form, part, TOGETHER, by_lines=False) for part in parts]
    found = list(_fitting(work, form, tiles, most))
    if found:
        return found
    parts = [(1, ceil_div(lines, n), ceil_div(columns, m)) for m in PARTS for n in PARTS]
    tiles = [Tile.cut(form, part, TOGETHER, by_lines=True) for part in parts]
    return list(_fitting(work, form, tiles, most))


def _fitting(
    work: WindowWork, form: WindowForm, tiles: Iterable[Tile], most: int
) -> Iterator[Pairs]:
    for tile in tiles:
        some = [
            Pairs(work, form, tile, ceil_div(tile.size[1], runs))
            for runs in RUNS
            if runs <= tile.size[1]
        ]
        if some[0].places()[-1] <= most:
            yield from some


def _instance(dtype: DType, weighted: bool) -> Instance:
    return Instance.of("pool/window_pairs.cu", ELEMENT=dtype, WEIGHTED=weighted)
