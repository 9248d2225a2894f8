"""Gradients of poolings whose windows are adjacent, and max unpooling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    MOVED,
    SMALL,
    FromIndices,
    WindowForm,
    widths,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["WindowTiles"]

BLOCK = 128
# Positions along the last axis that a thread stores to, channels last.
PART = 16
CHANNELS, ROWS, PLANES = 0, 1, 2
# Positions of a row in a window for which windows are loaded as vectors.
EACH = (2, 4)
# Planes of a thread that computes rows; fewer where their stores would be too many streams.
TOGETHER = 4


TilesArgs: Any = structure("pool/window_tiles.cu", "TilesArgs")


@dataclass(frozen=True, slots=True)
class Tiles:
    """A form with adjacent windows of ``tile`` positions along each axis."""

    form: WindowForm
    tile: tuple[int, ...]

    @classmethod
    def of(cls, form: WindowForm) -> Tiles | None:
        """Return None if windows overlap, have gaps or differ in size."""
        sizes = [_tile_of(axis) for axis in form.windows]
        if form.dilated or form.varying is not None or any(size is None for size in sizes):
            return None
        return cls(form, tuple(size for size in sizes if size is not None))

    def each(self, width: int) -> int:
        """Return the positions of a row in each window if those of a vector are whole windows."""
        each = self.tile[2]
        fits = each in EACH and width % each == 0
        return each if fits and self.form.x_size[2] * each == self.form.y_size[2] else 0

    def shape(self, dtype: DType) -> tuple[int, int]:
        """Return the kind of kernel, and the elements of a vector."""
        form, most = self.form, CHUNK_BYTES // dtype.itemsize
        if form.last:
            return CHANNELS, form.width(dtype)
        extent = form.y_size[2]
        # Planes whose chunks would not start at whole vectors are too large anyway.
        whole = prod(form.x_size) == 1 and self.tile == form.y_size and form.y_size[:2] == (1, 1)
        if whole and most <= extent <= LARGEST // 32:
            return PLANES, most
        width = most
        while extent % width:
            width //= 2
        return ROWS, width


def _tile_of(axis: WindowAxis) -> int | None:
    if axis.is_broadcast:
        return axis.output
    tiled = axis.step == 1 and axis.first == 0 and axis.last == axis.unit
    return axis.unit if tiled else None


class WindowTiles(FromIndices[Tiles]):
    """Gradients of poolings whose windows are adjacent."""

    name = "window_tiles"

    def solve(self, work: WindowWork, device: CudaDevice) -> Tiles | str:
        if work.kind == "maxima" or (work.kind == "sums" and work.by != "inputs"):
            return "no gradient"
        form = WindowForm.of(work)
        found = Tiles.of(form)
        if found is None:
            return "windows that overlap, leave gaps or differ in size"
        kind, width = found.shape(work.dtype)
        if work.kind == "routes" and not self._moves:
            if kind == PLANES:
                return "one element of each plane"
            if kind == ROWS and prod(found.tile[:2]) == width == 1:
                return "windows of one line, which has no vectors"
        return form.why_not() or found

    def launch(
        self, work: WindowWork, device: CudaDevice, config: Tiles, bad: str | None
    ) -> Launch:
        found, form = config, config.form
        kind, width = found.shape(work.dtype)
        each = found.each(width) if kind == ROWS and work.dtype in SMALL else 0
        args = TilesArgs()
        args.tile[:], args.x_size[:], args.y_size[:] = found.tile, form.x_size, form.y_size
        items = [ceil_div(size, tile) for size, tile in zip(form.y_size, found.tile, strict=True)]
        vectors, parts = form.inner // width if kind == CHANNELS else 1, 1
        if kind == CHANNELS:
            args.part = min(PART, found.tile[2])
            parts = ceil_div(found.tile[2], args.part)
        else:
            items[2] = ceil_div(form.y_size[2], width)
        args.items[:] = items
        args.by_items[:] = [divider(count) for count in items]
        args.by_size[:] = [divider(size) for size in form.y_size]
        args.inner, args.batch = form.inner, form.batch
        args.by_vectors, args.by_tile = divider(vectors), divider(found.tile[2])
        threads = form.y_size[2] if kind == PLANES else vectors * prod(items)
        moves, lines = work.kind == "routes", prod(found.tile[:2])
        together = _together(work.dtype, moves, width, each, lines) if kind == ROWS else 1
        batch = ceil_div(form.batch, together)
        args.chunk = min(batch, (LARGEST - 2**16) // threads)
        if 16 <= args.chunk < batch:
            args.chunk -= args.chunk % 16  # chunks of planes start at whole vectors
        args.threads = args.chunk * threads
        if kind == PLANES:
            args.threads = ceil_div(args.threads, width)
        args.wide_indices = work.index_dtype is DType.INT64
        args.misplaced = 8 if self._moves else 0
        args.divisor, args.reciprocal = form.divisor, 1.0 / form.divisor
        grid = ceil_div(args.threads, BLOCK), ceil_div(batch, args.chunk), parts
        return Launch(
            _instance(work.dtype, (kind, width, each, together), moves),
            grid,
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad, misplaced=bad),
        )

    def instances(self) -> Iterable[Instance]:
        found = []
        moved = product(MOVED.values(), (True,))
        for dtype, moves in (*moved, *product(FLOATING, (False,))):
            wide = CHUNK_BYTES // dtype.itemsize
            powers = [2**log for log in range(wide.bit_length())]
            shapes = [*((CHANNELS, width, 0, 1) for width in widths(dtype)), (PLANES, wide, 0, 1)]
            known = (0, *EACH) if dtype in SMALL else (0,)
            sides = [(width, each) for width in powers for each in known if width >= each]
            rows = {
                (*side, _together(dtype, moves, *side, lines)) for side in sides for lines in (1, 2)
            }
            shapes += [(ROWS, *row) for row in sorted(rows)]
            found += [_instance(dtype, shape, moves) for shape in shapes]
        return found


def _together(dtype: DType, moves: bool, width: int, each: int, lines: int) -> int:
    """Return the planes of a thread that computes rows of windows of ``lines`` lines."""
    chunks = width * dtype.itemsize == CHUNK_BYTES
    streams = chunks and each > 0 and dtype.itemsize > 2
    if not moves:
        streams = chunks or (each > 0 and width * dtype.itemsize > 4)
    return 1 if streams and lines > 1 else TOGETHER


def _instance(dtype: DType, shape: tuple[int, ...], moves: bool) -> Instance:
    kind, width, each, together = shape
    return Instance.of(
        "pool/window_tiles.cu",
        ELEMENT=MOVED[dtype.itemsize] if moves else dtype,
        KIND=kind,
        WIDTH=width,
        MOVE=moves,
        EACH=each,
        TOGETHER=together,
    )
