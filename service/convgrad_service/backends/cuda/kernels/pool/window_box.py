"""Tiles of the planes that blocks compute, channels first, and their boxes in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    SMALL,
    WindowForm,
    covered,
    most_positions,
    window_args,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["ANY", "BOX_BLOCK", "SHAPES", "Tile", "from_lines", "shape_of", "tiled"]

BOX_BLOCK = 256
# Shared memory of a block: several fit on a multiprocessor.
MOST_BYTES = 72 * 1024
# Whole planes beyond those that a block needs are added up to here.
ENOUGH_BYTES = 40 * 1024
# Blocks that keep a multiprocessor busy, and threads' items that keep a block busy.
ENOUGH_BLOCKS = 8
ENOUGH_ITEMS = 128
# Positions of a thread along axis 1.
RUNS = (16, 8, 4, 2, 1)
# Of sums, if results are many.
FEWER_BYTES = 24 * 1024
# Results are many if there are so many for each position of x. Such maxima are staged in shared
# memory.
MANY_OUTPUTS = 0.5
RANGE_BYTES = 8
# Averages of so many positions, or whose lines are in so many windows, are from sums of lines.
MANY_POSITIONS, SHARED_LINES = 49, 2.5
# Lines of a thread that adds them up.
LINE_RUN = 4
# (LINES, TAPS) of windows; the first that fits is used.
SHAPES = ((1, 4), (2, 2), (3, 3))
ANY = (0, 0)


BoxArgs: Any = structure("pool/window_box.cuh", "BoxArgs", anonymous=("windows",))


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes: ``size`` positions of y in ``planes`` planes, over ``box`` of x.

    Its segments in shared memory are whole planes, lines of a slice, or with ``by_lines`` lines.
    """

    size: tuple[int, ...]
    box: tuple[int, ...]
    planes: int
    whole: bool
    by_lines: bool

    @classmethod
    def of(cls, work: WindowWork, form: WindowForm, device: CudaDevice) -> Tile | None:
        """Return None if windows are too large for shared memory."""
        return cls._within(MOST_BYTES, work, form, device) or cls._within(
            device.shared_bytes_per_block, work, form, device
        )

    @classmethod
    def _within(
        cls, most: int, work: WindowWork, form: WindowForm, device: CudaDevice
    ) -> Tile | None:
        together = _together(work, form)
        whole = cls(form.y_size, form.x_size, together, whole=True, by_lines=False)
        each = whole.places(work, form).end
        if each <= most:
            blocks = ENOUGH_BLOCKS * device.multiprocessors
            fewer = work.kind == "sums" and _many(form)
            enough = FEWER_BYTES if fewer else ENOUGH_BYTES
            groups = min(enough // each, ceil_div(form.batch, together * blocks))
            return replace(whole, planes=together * max(1, groups))
        for by_lines, least_lines, least_columns in ((False, 1, None), (True, 8, 32)):
            lines, columns = form.y_size[1:]
            while True:
                tile = cls._cut(form, (1, lines, columns), together, by_lines=by_lines)
                if tile.places(work, form).end <= most:
                    return tile
                if lines > least_lines:
                    lines = ceil_div(lines, 2)
                elif least_columns is not None and columns > least_columns:
                    columns = ceil_div(columns, 2)
                else:
                    break
        return None

    @classmethod
    def _cut(cls, form: WindowForm, size: tuple[int, ...], planes: int, *, by_lines: bool) -> Tile:
        sides = zip(form.windows, size, strict=True)
        box = [covered(axis, positions) for axis, positions in sides]
        if not by_lines:
            box[2] = form.x_size[2]
        return cls(size, tuple(box), planes, whole=False, by_lines=by_lines)

    def run(self, work: WindowWork, form: WindowForm) -> int:
        """Return the positions of a thread along axis 1."""
        columns = self.planes // _together(work, form) * self.size[0] * self.size[2]
        lines = self.size[1]
        fitting = (run for run in RUNS if columns * ceil_div(lines, run) >= ENOUGH_ITEMS)
        return ceil_div(lines, ceil_div(lines, next(fitting, 1)))

    def pitch(self, work: WindowWork, form: WindowForm) -> tuple[int, int, int]:
        """Return the elements between planes, slices and lines, like those of x modulo a chunk."""
        plane, slice, line = prod(form.x_size), prod(form.x_size[1:]), form.x_size[2]
        if self.whole:
            return plane, slice, line
        chunk = _chunk(work)
        if self.by_lines:
            line = _pitch(self.box[2], line, chunk)
        slice = _pitch(self.box[1] * line, slice, chunk)
        return _pitch(self.box[0] * slice, plane, chunk), slice, line

    def y_pitch(self, work: WindowWork, form: WindowForm) -> int:
        """Return the elements of y between lines."""
        line = form.y_size[2]
        return _pitch(self.size[2], line, _chunk(work)) if self.by_lines else line

    def places(self, work: WindowWork, form: WindowForm) -> Places:
        """Return where the parts of shared memory are."""

        def room(elements: int, itemsize: int) -> int:
            return ceil_div(elements * itemsize, CHUNK_BYTES) * CHUNK_BYTES + 3 * CHUNK_BYTES

        elements = self.planes * self.pitch(work, form)[0]
        outputs = self.planes * self.size[0] * self.size[1] * self.y_pitch(work, form)
        staged = self.staged(work, form)
        y = room(elements, work.dtype.itemsize)
        places = y + (room(outputs, work.dtype.itemsize) if staged else 0)
        if from_lines(work, form):
            sums = self.planes * self.box[0] * self.box[1] * self.size[2]
            places += room(sums, max(4, work.dtype.itemsize))
        ranges = places + (room(outputs, 4) if staged else 0)
        weights = ranges + RANGE_BYTES * self.size[1]
        weight_bytes = max(4, work.dtype.itemsize) if form.varying == "inputs" else 0
        end = weights + weight_bytes * sum(self.box)
        return Places(y, places, ranges, weights, end)

    def staged(self, work: WindowWork, form: WindowForm) -> bool:
        """Return whether results are stored in shared memory first: many maxima with indices."""
        return self.whole and work.kind == "maxima" and work.indices is not None and _many(form)

    def arguments(self, work: WindowWork, form: WindowForm) -> Any:
        """Return the arguments of a launch."""
        args = BoxArgs()
        args.windows = window_args(form, 1, form.y_size)
        args.tile[:], args.box[:], args.tiles[:] = self.size, self.box, self.tiles(form)
        args.planes, args.run = self.planes, self.run(work, form)
        args.whole, args.by_lines = self.whole, self.by_lines
        args.pitch[:], args.y_pitch = self.pitch(work, form), self.y_pitch(work, form)
        places = self.places(work, form)
        args.y_at, args.places_at, args.ranges_at, args.weights_at, _ = places
        args.staged = self.staged(work, form)
        runs = self.size[0], ceil_div(self.size[1], args.run), self.size[2]
        args.by_columns, args.by_slices = divider(self.size[2]), divider(self.box[0])
        args.by_line_runs = divider(ceil_div(self.box[1], LINE_RUN))
        args.by_tile[:] = [divider(count) for count in runs]
        args.by_tiles[:] = [divider(count) for count in args.tiles]
        return args

    def tiles(self, form: WindowForm) -> list[int]:
        """Return the tiles of a plane along each axis."""
        return [ceil_div(size, own) for size, own in zip(form.y_size, self.size, strict=True)]

    def blocks(self, form: WindowForm) -> int:
        """Return the blocks of the grid."""
        return prod(self.tiles(form)) * ceil_div(form.batch, self.planes)


def tiled(work: WindowWork, form: WindowForm, device: CudaDevice) -> Tile | str:
    """Return the tile of the planes that a block computes, or why there is none."""
    if form.last:
        return "channels last"
    if form.dilated:
        return "dilated"
    tile = Tile.of(work, form, device)
    if tile is None:
        return f"windows too large for {device.shared_bytes_per_block} bytes of shared memory"
    return form.why_not() or tile


class Places(NamedTuple):
    """Offsets in shared memory, in bytes: the parts that follow the box of x, and the end."""

    y: int
    places: int
    ranges: int
    weights: int
    end: int


def _many(form: WindowForm) -> bool:
    return prod(form.y_size) >= MANY_OUTPUTS * prod(form.x_size)


def shape_of(work: WindowWork, form: WindowForm) -> tuple[int, int]:
    """Return LINES and TAPS, see ``window_planes.cu``."""
    if work.carried is not None or work.dtype not in SMALL:
        return ANY
    _, lines, taps = map(most_positions, form.windows)
    shape = next((one for one in SHAPES if lines <= one[0] and taps <= one[1]), ANY)
    simple = form.is_simple(form.windows, form.counted) and form.varying != "inputs"
    # Lines without an instance of their own.
    return ANY if shape[0] == 1 and not simple else shape


def from_lines(work: WindowWork, form: WindowForm) -> bool:
    """Whether averages are computed from sums of lines, see ``window_lines.cuh``."""
    if work.kind != "sums" or shape_of(work, form) != ANY:
        return False
    shared = prod(axis.valid_taps / axis.input for axis in form.windows[:2])
    return form.most_window >= MANY_POSITIONS or shared >= SHARED_LINES


def _together(work: WindowWork, form: WindowForm) -> int:
    """Return a multiple of the planes of a thread, see ``window_planes.cu``."""
    _, lines, taps = map(most_positions, form.windows)
    three = max(lines, taps) == 3 and lines > 1 and work.carried is None
    return 2 if work.dtype.itemsize == 8 or (work.kind == "maxima" and three) else 4


def _pitch(length: int, like: int, chunk: int) -> int:
    """Return a pitch for segments of ``length`` that is equal to ``like`` modulo a chunk."""
    return ceil_div(length + chunk, chunk) * chunk + like % chunk


def _chunk(work: WindowWork) -> int:
    """Return the most elements of the tensors in a chunk."""
    return CHUNK_BYTES // min(work.dtype.itemsize, work.index_dtype.itemsize)
