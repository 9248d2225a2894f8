"""Copies at memory bandwidth: between different inner axes, to padded rows, and from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product, starmap
from math import gcd, prod
from typing import Any

from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import linear_grid
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.strided_copy import TYPES, joined
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import Copy, CopyAxis

__all__ = ["RowCopy", "RowPack", "Transpose"]

BLOCK, CHUNK_BYTES, SECTOR_BYTES = 256, 16, 32
# Extents of a tile; along x by the size of an element.
TILE_X, TILE_Y = {2: 128, 4: 64, 8: 64}, 64
# Blocks per multiprocessor, as registers allow, by the number of sides with unaligned rows.
BLOCKS = {2: (6, 5, 4), 4: (6, 4, 4), 8: (4, 2, 2)}
PLANES, RUNS = "transpose_planes", "transpose_runs"
# Bytes of a block of either; and the extent of the short axis from which on tiles are as fast.
PLANES_BYTES, WIDE_EXTENT = 16384, 64
OUTER, ROW_AXES = 4, 6
# Shorter axes would leave most of a tile empty.
LEAST_EXTENT = 8


TransposeArgs = structure("layout/transpose.cu", "TransposeArgs")


RowCopyArgs = structure("layout/row_copy.cu", "RowCopyArgs")
RowPackArgs = structure("layout/row_pack.cu", "RowPackArgs")


@dataclass(frozen=True, slots=True)
class _Box:
    """A copy without axes of extent 1 and with axes merged that are contiguous on both sides.

    ``limit`` is the number of elements of axis ``padded`` that the source has.
    """

    axes: tuple[CopyAxis, ...]
    padded: int | None
    limit: int

    def inner(self, source: bool) -> int | None:
        """Return the index of the contiguous axis of the source, or of the target."""
        steps = [axis.source if source else axis.target for axis in self.axes]
        return steps.index(1) if 1 in steps else None


def _box(work: Copy) -> _Box | str:
    """Return a copy from the start of its source, of which at most one axis is bounded, in a padded
    target; or why it is none."""
    if work.source_start:
        return "the source starts inside its buffer"
    padded, limit = None, 0
    for outer, inner, bound in work.bounds:
        if work.axes[outer].extent != 1 or padded is not None or not work.pads:
            return "its bounds are not the end of one axis"
        padded, limit = inner, bound
    if padded is None:
        return _Box(tuple(joined(work.axes)), None, 0)
    before, after = joined(work.axes[:padded]), joined(work.axes[padded + 1 :])
    return _Box((*before, work.axes[padded], *after), len(before), limit)


class Transpose(Solver[Copy, tuple[_Box, int, int]]):
    """Copies whose sides have different contiguous axes, as between channels first and last."""

    name = "transpose"

    def solve(self, work: Copy, device: CudaDevice) -> tuple[_Box, int, int] | str:
        box = _box(work)
        if isinstance(box, str):
            return box
        x, y = box.inner(source=True), box.inner(source=False)
        if x is None or y is None or x == y:
            return "source and target do not have different contiguous axes"
        if box.padded not in (None, y):
            return "the padded axis is not contiguous in the target"
        if len(box.axes) - 2 > OUTER:
            return f"{len(box.axes)} axes are more than {OUTER + 2}"
        outer = _outer_y(work, box, x, y)
        rows = box.axes[y].extent * (1 if outer is None else box.axes[outer].extent)
        extents = box.axes[x].extent, rows
        short = 0 if _kind(box, x, y) == self.name else 1
        if sorted(extents)[short] < LEAST_EXTENT:
            return f"inner axes of {extents[0]} and {extents[1]}; expected {LEAST_EXTENT} or more"
        return box, x, y

    def fragment(self, work: Copy, device: CudaDevice, config: tuple[_Box, int, int]) -> Fragment:
        box, x, y = config
        x_axis, y_axis = box.axes[x], box.axes[y]
        joined = _outer_y(work, box, x, y)
        outer = [axis for index, axis in enumerate(box.axes) if index not in (x, y)]
        args = TransposeArgs()
        args.x_extent, args.y_extent = x_axis.extent, y_axis.extent
        args.y_limit = y_axis.extent if box.padded is None else box.limit
        args.x_target, args.y_source = x_axis.target, y_axis.source
        itemsize = work.dtype.itemsize
        chunk = CHUNK_BYTES // itemsize
        last = [(axis.extent - 1) * axis.source for axis in (x_axis, *outer)]
        args.elements = 1 + sum(last) + (args.y_limit - 1) * y_axis.source
        sources = [axis.source for axis in outer]
        targets = [work.target_start, *(axis.target for axis in outer)]
        name = _kind(box, x, y)
        # A run of rows is aligned if its plane is.
        if name != PLANES:
            sources += [x_axis.extent, y_axis.source]
        if name != RUNS:
            targets += [y_axis.extent, x_axis.target]
        args.source_chunk, args.target_chunk = (
            0 if gcd(*each) % chunk else CHUNK_BYTES for each in (sources, targets)
        )
        if joined is not None:
            above = box.axes[joined]
            outer.remove(above)
            args.y_inner, args.y_outer = y_axis.extent, above.source
            args.by_inner = divider(y_axis.extent)
            args.y_extent = args.y_limit = y_axis.extent * above.extent
        _fill_axes(args, outer, OUTER)
        args.target = work.target_start * itemsize
        if name == self.name:
            aligned = bool(args.source_chunk), bool(args.target_chunk)
            instance = _tile_instance(itemsize, *aligned, 1 if joined is None else 2)
            ends = y_axis.extent, x_axis.target, *(axis.target for axis in outer), work.target_start
            lead = SECTOR_BYTES // itemsize if gcd(*ends) % chunk else 0
            across = ceil_div(x_axis.extent, TILE_X[itemsize])
            tiles = across * ceil_div(args.y_extent + lead, TILE_Y)
        else:
            instance = _instance(name, itemsize)
            short, long = (x_axis, y_axis) if name == PLANES else (y_axis, x_axis)
            args.rows = _rows(short, long.extent, itemsize)
            tiles = ceil_div(long.extent, args.rows)
        grid = tiles * prod(axis.extent for axis in outer), 1, 1
        return _fragment(work, args, instance, grid)

    def instances(self) -> Iterable[Instance]:
        return [
            *(_instance(name, size) for name in (PLANES, RUNS) for size in TYPES),
            *starmap(_tile_instance, product(TYPES, (True, False), (True, False))),
            *(_tile_instance(size, True, True, 2) for size in TYPES),
        ]


class RowCopy(Solver[Copy, tuple[_Box, CopyAxis]]):
    """Copies with the same contiguous axis on both sides, to rows of whole 16-byte chunks."""

    name = "row_copy"

    def solve(self, work: Copy, device: CudaDevice) -> tuple[_Box, CopyAxis] | str:
        box = _box(work)
        if isinstance(box, str):
            return box
        inner = box.inner(source=False)
        if inner is None or box.axes[inner].source not in (0, 1):
            return "source and target do not have the same contiguous axis"
        if box.padded not in (None, inner):
            return "the padded axis is not contiguous"
        if box.axes[inner].source == 0 and (box.padded is None or box.limit > 1):
            return "one element of the source is broadcast to a row"
        chunk = CHUNK_BYTES // work.dtype.itemsize
        row = box.axes[inner]
        targets = (axis.target for axis in box.axes if axis is not row)
        if any(value % chunk for value in (row.extent, work.target_start, *targets)):
            return f"the target's rows are not whole chunks of {CHUNK_BYTES} bytes"
        if len(box.axes) - 1 > ROW_AXES:
            return f"{len(box.axes)} axes are more than {ROW_AXES + 1}"
        return box, row

    def fragment(self, work: Copy, device: CudaDevice, config: tuple[_Box, CopyAxis]) -> Fragment:
        box, row = config
        args = RowCopyArgs()
        _fill_axes(args, [axis for axis in box.axes if axis is not row], ROW_AXES)
        args.chunks = row.extent * work.dtype.itemsize // CHUNK_BYTES
        args.all_chunks = args.chunks * prod(args.extent)
        args.elements = row.extent if box.padded is None else box.limit
        args.target = work.target_start * work.dtype.itemsize
        instance = _instance(self.name, work.dtype.itemsize)
        return _fragment(work, args, instance, linear_grid(args.all_chunks, BLOCK))

    def instances(self) -> Iterable[Instance]:
        return [_instance(self.name, itemsize) for itemsize in TYPES]


class RowPack(Solver[Copy, _Box]):
    """Copies of rows to rows without gaps, which need not be whole chunks."""

    name = "row_pack"

    def solve(self, work: Copy, device: CudaDevice) -> _Box | str:
        box = _box(work)
        if isinstance(box, str):
            return box
        if work.target_start or box.padded is not None or len(box.axes) != 2:
            return "more than one axis of rows, bounds, or a target inside its buffer"
        rows, row = box.axes
        if (row.source, row.target) != (1, 1) or rows.target != row.extent:
            return "the target has gaps between rows, or either side within them"
        return box

    def fragment(self, work: Copy, device: CudaDevice, box: _Box) -> Fragment:
        rows, row = box.axes
        args = RowPackArgs()
        args.elements, args.width, args.pitch = rows.extent * row.extent, row.extent, rows.source
        chunks = ceil_div(args.elements * work.dtype.itemsize, CHUNK_BYTES)
        instance = _instance(self.name, work.dtype.itemsize)
        return _fragment(work, args, instance, linear_grid(chunks, BLOCK))

    def instances(self) -> Iterable[Instance]:
        return [_instance(self.name, itemsize) for itemsize in TYPES]


def _fragment(work: Copy, args: Any, instance: Instance, grid: tuple[int, int, int]) -> Fragment:
    args.follows = work.follows
    arguments = pack(args, source=work.source, target=work.target)
    return Fragment(instance.entry, (Launch(instance, grid, (BLOCK, 1, 1), arguments),))


def _fill_axes(args: Any, axes: list[CopyAxis], count: int) -> None:
    padded = [*[CopyAxis(1, 0, 0)] * (count - len(axes)), *axes]
    args.extent[:] = [axis.extent for axis in padded]
    args.source_stride[:] = [axis.source for axis in padded]
    args.target_stride[:] = [axis.target for axis in padded]


def _kind(box: _Box, x: int, y: int) -> str:
    """Which kernel: by tiles, or by runs where one axis is short and its rows have no gaps."""
    x_axis, y_axis = box.axes[x], box.axes[y]
    if x_axis.extent < WIDE_EXTENT and y_axis.source == x_axis.extent:
        return PLANES
    whole = box.padded is None
    if y_axis.extent < WIDE_EXTENT and x_axis.target == y_axis.extent and whole:
        return RUNS
    return Transpose.name


def _outer_y(work: Copy, box: _Box, x: int, y: int) -> int | None:
    """Return the axis that continues a short y in the target, so that a tile can span both, if
    rows are aligned."""
    short = box.axes[y]
    if short.extent >= TILE_Y or box.padded is not None or _kind(box, x, y) != Transpose.name:
        return None
    chunk = CHUNK_BYTES // work.dtype.itemsize
    sides = (
        *(axis.source for index, axis in enumerate(box.axes) if index != x),
        *(axis.target for index, axis in enumerate(box.axes) if index != y),
    )
    if any(value % chunk for value in (*sides, box.axes[x].extent, work.target_start)):
        return None
    targets = [0 if index == x else axis.target for index, axis in enumerate(box.axes)]
    return targets.index(short.extent) if short.extent in targets else None


def _rows(short: CopyAxis, count: int, itemsize: int) -> int:
    """Return the rows of the short axis per block: ``count`` divided about evenly."""
    chunk = CHUNK_BYTES // itemsize
    most = PLANES_BYTES // itemsize // short.extent // chunk * chunk
    return ceil_div(ceil_div(count, ceil_div(count, most)), chunk) * chunk


def _tile_instance(itemsize: int, source: bool, target: bool, y_axes: int = 1) -> Instance:
    """Return an instance of transpose for rows that are aligned in the source and the target."""
    return Instance.of(
        "layout/transpose.cu",
        ELEMENT=TYPES[itemsize],
        SOURCE_ANY=not source,
        TARGET_ANY=not target,
        BLOCKS=BLOCKS[itemsize][2 - source - target],
        Y_AXES=y_axes if y_axes > 1 else None,
    )


def _instance(name: str, itemsize: int) -> Instance:
    return Instance.of(f"layout/{name}.cu", ELEMENT=TYPES[itemsize])
