"""Copies at the memory's speed: between orders with different inner axes, and to padded rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import cast

from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.elements import MAX_BLOCKS, linear_grid
from convgrad_service.plans.cuda_device import CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import Copy, CopyAxis

__all__ = ["RowCopy", "Transpose"]

BLOCK, CHUNK_BYTES = 256, 16
# Of a tile, along x by the size of an element.
TILE_X, TILE_Y = {2: 128, 4: 64, 8: 64}, 64
PLANES = "transpose_planes"
# Of a block of transpose_planes; and the extent of x from which on tiles are filled as well.
PLANES_BYTES, WIDE_EXTENT = 16384, 64
# Bytes that a thread moves at once where rows start and end at whole ones.
SOURCE_CHUNKS, TARGET_CHUNKS = (16, 8), (16,)
OUTER, ROW_AXES = 4, 6
# Shorter axes would leave most of a tile.
LEAST_EXTENT = 8
# A copy needs to know an element's size alone.
_TYPES = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


class TransposeArgs(ctypes.Structure):
    """See ``transpose.cu``."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("extent", ctypes.c_uint32 * OUTER),
        *((name, ctypes.c_int64 * OUTER) for name in ("source_stride", "target_stride")),
        *(
            (name, ctypes.c_int64)
            for name in ("x_extent", "y_extent", "y_limit", "x_target", "y_source")
        ),
        ("source_chunk", ctypes.c_int32),
        ("target_chunk", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    )


class RowCopyArgs(ctypes.Structure):
    """See ``row_copy.cu``."""

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        *(
            (name, ctypes.c_int64 * ROW_AXES)
            for name in ("extent", "source_stride", "target_stride")
        ),
        *((name, ctypes.c_int64) for name in ("chunks", "all_chunks", "elements")),
    )


@dataclass(frozen=True, slots=True)
class _Box:
    """A copy without axes of extent 1, and those that lie alike on both sides made one.

    ``limit`` is how many elements of axis ``padded`` the source has.
    """

    axes: tuple[CopyAxis, ...]
    padded: int | None
    limit: int

    def inner(self, source: bool) -> int | None:
        """The axis that runs side by side in the source, or in the target."""
        for index, axis in enumerate(self.axes):
            if (axis.source if source else axis.target) == 1:
                return index
        return None


def _box(work: Copy) -> _Box | None:
    """None where a bound is more than the end of one axis, or the target keeps what is beyond."""
    padded, limit = None, 0
    for outer, inner, bound in work.bounds:
        if work.axes[outer].extent != 1 or padded is not None or not work.pads:
            return None
        padded, limit = inner, bound
    axes: list[CopyAxis] = []
    place = None
    for index, axis in enumerate(work.axes):
        if index == padded:
            place = len(axes)
            axes.append(axis)
        elif axis.extent > 1:
            last = axes[-1] if axes and place != len(axes) - 1 else None
            if last and (last.source, last.target) == (
                axis.extent * axis.source,
                axis.extent * axis.target,
            ):
                axes[-1] = replace(axis, extent=axis.extent * last.extent)
            else:
                axes.append(axis)
    return _Box(tuple(axes), place, limit)


class Transpose:
    """Copies whose sides have different inner axes, as between channels first and last."""

    name = "transpose"

    def why_not(self, work: Copy, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        box = _box(work)
        if box is None:
            return "its bounds are more than the end of one axis"
        x, y = box.inner(source=True), box.inner(source=False)
        if x is None or y is None or x == y:
            return "the sides do not have different axes side by side"
        if box.padded not in (None, y):
            return "an axis is padded that does not run side by side in the target"
        if len(box.axes) - 2 > OUTER:
            return f"{len(box.axes)} axes are more than {OUTER + 2}"
        if min(box.axes[x].extent, box.axes[y].extent) < LEAST_EXTENT:
            return f"one of the inner axes is shorter than {LEAST_EXTENT}"
        if _tiles(box, x, y, work.dtype.itemsize) > MAX_BLOCKS:
            return "its tiles are more than one grid holds"
        return None

    def launches(self, work: Copy, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        box = cast(_Box, _box(work))
        x, y = (cast(int, box.inner(source)) for source in (True, False))
        x_axis, y_axis = box.axes[x], box.axes[y]
        outer = [axis for index, axis in enumerate(box.axes) if index not in (x, y)]
        args = TransposeArgs()
        _fill_axes(args, outer, OUTER)
        args.x_extent, args.y_extent = x_axis.extent, y_axis.extent
        args.y_limit = y_axis.extent if box.padded is None else box.limit
        args.x_target, args.y_source = x_axis.target, y_axis.source
        itemsize = work.dtype.itemsize
        sources = (x_axis.extent, y_axis.source, *(axis.source for axis in outer))
        targets = (y_axis.extent, x_axis.target, *(axis.target for axis in outer))
        args.source_chunk = _chunk_bytes(itemsize, sources, SOURCE_CHUNKS)
        args.target_chunk = _chunk_bytes(itemsize, targets, TARGET_CHUNKS)
        name = self.name
        if _rows(x_axis, y_axis, itemsize):
            name = PLANES
            # A run of rows starts at a whole chunk if its plane does.
            starts = [axis.source for axis in outer]
            args.source_chunk = _chunk_bytes(itemsize, starts, TARGET_CHUNKS)
            args.rows = _rows(x_axis, y_axis, itemsize)
        launch = Launch(
            _instance(name, itemsize),
            (_tiles(box, x, y, itemsize), 1, 1),
            (BLOCK, 1, 1),
            pack(args, source=work.source, target=work.target),
        )
        return Fragment(name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(name, size) for name in (self.name, PLANES) for size in _TYPES]


class RowCopy:
    """Copies with the same inner axis on both sides, to rows of whole 16-byte chunks."""

    name = "row_copy"

    def why_not(self, work: Copy, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        box = _box(work)
        if box is None:
            return "its bounds are more than the end of one axis"
        inner = box.inner(source=False)
        if inner is None or box.axes[inner].source not in (0, 1):
            return "the sides do not have the same axis side by side"
        if box.padded not in (None, inner):
            return "an axis is padded that does not run side by side"
        chunk = CHUNK_BYTES // work.dtype.itemsize
        row = box.axes[inner]
        targets = (axis.target for axis in box.axes if axis is not row)
        if any(value % chunk for value in (row.extent, *targets)):
            return f"the target's rows are not whole chunks of {CHUNK_BYTES} bytes"
        if len(box.axes) - 1 > ROW_AXES:
            return f"{len(box.axes)} axes are more than {ROW_AXES + 1}"
        blocks = linear_grid(prod(axis.extent for axis in box.axes) // chunk, BLOCK)[0]
        if blocks > MAX_BLOCKS:
            return f"{blocks} blocks are more than one grid holds"
        return None

    def launches(self, work: Copy, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        box = cast(_Box, _box(work))
        row = box.axes[cast(int, box.inner(source=False))]
        args = RowCopyArgs()
        _fill_axes(args, [axis for axis in box.axes if axis is not row], ROW_AXES)
        args.chunks = row.extent * work.dtype.itemsize // CHUNK_BYTES
        args.all_chunks = args.chunks * prod(args.extent)
        args.elements = row.extent if box.padded is None else box.limit
        launch = Launch(
            _instance(self.name, work.dtype.itemsize),
            linear_grid(args.all_chunks, BLOCK),
            (BLOCK, 1, 1),
            pack(args, source=work.source, target=work.target),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(self.name, itemsize) for itemsize in _TYPES]


def _fill_axes(args: TransposeArgs | RowCopyArgs, axes: list[CopyAxis], count: int) -> None:
    padded = [*[CopyAxis(1, 0, 0)] * (count - len(axes)), *axes]
    args.extent[:] = [axis.extent for axis in padded]
    args.source_stride[:] = [axis.source for axis in padded]
    args.target_stride[:] = [axis.target for axis in padded]


def _chunk_bytes(itemsize: int, elements: Iterable[int], chunks: Iterable[int]) -> int:
    """The largest chunk of which all these numbers of elements are multiples; 0 where none is."""
    factor = gcd(*elements) * itemsize
    return next((chunk for chunk in chunks if factor % chunk == 0), 0)


def _rows(x_axis: CopyAxis, y_axis: CopyAxis, itemsize: int) -> int:
    """Rows of x that a block of transpose_planes moves; 0 where rows are long or have gaps."""
    if x_axis.extent >= WIDE_EXTENT or y_axis.source != x_axis.extent:
        return 0
    chunk = CHUNK_BYTES // itemsize
    return PLANES_BYTES // itemsize // x_axis.extent // chunk * chunk


def _tiles(box: _Box, x: int, y: int, itemsize: int) -> int:
    x_axis, y_axis = box.axes[x], box.axes[y]
    if rows := _rows(x_axis, y_axis, itemsize):
        inner = ceil_div(y_axis.extent, rows)
    else:
        inner = ceil_div(x_axis.extent, TILE_X[itemsize]) * ceil_div(y_axis.extent, TILE_Y)
    return inner * prod(axis.extent for i, axis in enumerate(box.axes) if i not in (x, y))


def _instance(name: str, itemsize: int) -> Instance:
    return Instance(f"{name}.cu", name, (("ELEMENT", _TYPES[itemsize]),))
