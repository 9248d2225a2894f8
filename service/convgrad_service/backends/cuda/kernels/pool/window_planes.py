"""Averages and maxima, channels first: boxes of planes in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    Divider,
    WindowArgs,
    WindowForm,
    most_positions,
    window_args,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["WindowPlanes"]

BLOCK = 256
# Shared memory of a block: several fit on a multiprocessor.
MOST_BYTES = 36 * 1024
# Positions of y that keep a block's threads busy, and blocks that keep a multiprocessor busy.
ENOUGH_ITEMS, ENOUGH_BLOCKS = 1024, 8
# Windows with more positions than this along the first two axes share the sums of lines.
MOST_LINES_UNSHARED = 2
# Windows larger than this are maxima of `window_reduce` unless positions are in many windows.
LARGE_WINDOW, MUCH_OVERLAP = 24, 4


class PlanesArgs(ctypes.Structure):
    """Mirrors ``pool/window_planes.cu``."""

    _anonymous_ = ("windows",)
    _fields_ = (
        ("windows", WindowArgs),
        *((name, ctypes.c_int32 * 3) for name in ("tile", "tiles", "box")),
        ("planes", ctypes.c_int32),
        ("pitch", ctypes.c_int32 * 2),
        *((name, ctypes.c_int32) for name in ("whole", "by_rows", "sums_at", "weights_at")),
        ("by_tile", Divider * 3),
        ("by_lines", Divider),
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes: ``size`` positions of y in ``planes`` planes, over ``box`` of x.

    Its segments in shared memory are whole planes, lines of a slice, or with ``by_rows`` lines.
    """

    size: tuple[int, ...]
    box: tuple[int, ...]
    planes: int
    whole: bool
    by_rows: bool

    @classmethod
    def of(cls, form: WindowForm, dtype: DType, device: CudaDevice, *, sums: bool) -> Tile | None:
        """Return None if windows are too large for shared memory."""
        whole = cls(form.y_size, form.x_size, 1, whole=True, by_rows=False)
        each = whole.bytes(form, dtype, sums=sums)
        if each <= MOST_BYTES:
            enough = ceil_div(ENOUGH_ITEMS, prod(form.y_size))
            spread = ceil_div(form.batch, ENOUGH_BLOCKS * device.multiprocessors)
            planes = max(1, min(MOST_BYTES // each, max(enough, min(spread, 2 * enough))))
            return cls(form.y_size, form.x_size, planes, whole=True, by_rows=False)
        lines, columns = form.y_size[1], form.y_size[2]
        for by_rows in (False, True):
            while True:
                tile = cls._cut(form, (1, lines, columns), by_rows=by_rows)
                if tile.bytes(form, dtype, sums=sums) <= MOST_BYTES:
                    return tile
                if lines > (8 if by_rows else 1):
                    lines = ceil_div(lines, 2)
                elif by_rows and columns > 32:
                    columns = ceil_div(columns, 2)
                else:
                    break
            lines = form.y_size[1]
        return None

    @classmethod
    def _cut(cls, form: WindowForm, size: tuple[int, ...], *, by_rows: bool) -> Tile:
        box = [
            _covered(axis, positions) for axis, positions in zip(form.windows, size, strict=True)
        ]
        if not by_rows:
            box[2] = form.x_size[2]
        return cls(size, tuple(box), 1, whole=False, by_rows=by_rows)

    def pitch(self, form: WindowForm, dtype: DType) -> tuple[int, int]:
        """Return the elements between slices and lines, like those of x modulo a chunk."""
        chunk, line, slice = CHUNK_BYTES // dtype.itemsize, form.x_size[2], prod(form.x_size[1:])
        if self.whole:
            return slice, line
        if self.by_rows:
            line = ceil_div(self.box[2] + chunk, chunk) * chunk + line % chunk
        length = self.box[1] * line
        return ceil_div(length + chunk, chunk) * chunk + slice % chunk, line

    def sums_at(self, form: WindowForm, dtype: DType) -> int:
        """Return the offset of the lines' sums: the bytes of the box."""
        slices, chunk = self.planes * self.box[0], CHUNK_BYTES // dtype.itemsize
        elements = slices * self.pitch(form, dtype)[0] + 2 * chunk
        return ceil_div(elements * dtype.itemsize, CHUNK_BYTES) * CHUNK_BYTES

    def weights_at(self, form: WindowForm, dtype: DType, *, sums: bool) -> int:
        """Return the offset of the weights."""
        lines = self.planes * self.box[0] * self.box[1]
        size = lines * self.size[2] * _sum_bytes(dtype) if sums else 0
        return self.sums_at(form, dtype) + ceil_div(size, CHUNK_BYTES) * CHUNK_BYTES

    def bytes(self, form: WindowForm, dtype: DType, *, sums: bool) -> int:
        """Return the bytes of shared memory."""
        weights = sum(self.box) * _sum_bytes(dtype) if form.varying == "inputs" else 0
        return self.weights_at(form, dtype, sums=sums) + weights


class WindowPlanes:
    """Averages and maxima, channels first, of planes whose boxes fit into shared memory."""

    name = "window_planes"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if work.kind == "routes":
            return "a gradient of maxima"
        form = WindowForm.of(work)
        if form.last:
            return "channels last"
        large = form.most_window >= LARGE_WINDOW and form.overlap <= MUCH_OVERLAP
        if work.kind == "maxima" and large:
            return f"windows of {LARGE_WINDOW} positions or more with little overlap"
        tile = Tile.of(form, work.dtype, device, sums=_shares(work, form))
        if tile is None:
            return f"windows too large for {MOST_BYTES} bytes of shared memory"
        if _blocks(form, tile) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return form.why_not()

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        form = WindowForm.of(work)
        sums = _shares(work, form)
        tile = Tile.of(form, work.dtype, device, sums=sums)
        if tile is None:
            raise ValueError("windows that do not fit into shared memory")
        args = PlanesArgs()
        args.windows = window_args(form, 1, form.y_size)
        args.tile[:], args.box[:], args.tiles[:] = tile.size, tile.box, _tiles(form, tile)
        args.planes, args.whole, args.by_rows = tile.planes, tile.whole, tile.by_rows
        args.pitch[:] = tile.pitch(form, work.dtype)
        args.sums_at = tile.sums_at(form, work.dtype)
        args.weights_at = tile.weights_at(form, work.dtype, sums=sums)
        for i in range(3):
            args.by_tile[i] = Divider.of(tile.size[i])
        args.by_lines = Divider.of(tile.box[1])
        maxima, weighted = work.kind == "maxima", form.varying == "inputs"
        launch = Launch(
            _instance(work.dtype, work.index_dtype, sums=sums, weighted=weighted, maxima=maxima),
            (_blocks(form, tile), 1, 1),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices),
            tile.bytes(form, work.dtype, sums=sums),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        found = []
        for dtype in FLOATING:
            found += [
                _instance(dtype, DType.INT64, sums=sums, weighted=weighted, maxima=False)
                for sums in (False, True)
                for weighted in (False, True)
            ]
            found += [
                _instance(dtype, index, sums=False, weighted=False, maxima=True) for index in INDEX
            ]
        return found


def _shares(work: WindowWork, form: WindowForm) -> bool:
    """Whether windows share the sums of lines."""
    lines = prod(map(most_positions, form.windows[:2]))
    return work.kind == "sums" and lines > MOST_LINES_UNSHARED


def _covered(axis: WindowAxis, outputs: int) -> int:
    """Return an upper bound of the positions in all windows of adjacent outputs."""
    reach = (outputs - 1) * axis.step + axis.last - axis.first
    return min(axis.input, ceil_div(reach, axis.unit))


def _tiles(form: WindowForm, tile: Tile) -> list[int]:
    return [ceil_div(size, own) for size, own in zip(form.y_size, tile.size, strict=True)]


def _blocks(form: WindowForm, tile: Tile) -> int:
    return prod(_tiles(form, tile)) * ceil_div(form.batch, tile.planes)


def _sum_bytes(dtype: DType) -> int:
    return max(4, dtype.itemsize)


def _instance(dtype: DType, index: DType, *, sums: bool, weighted: bool, maxima: bool) -> Instance:
    return Instance.of(
        "pool/window_planes.cu",
        {
            "ELEMENT": CUDA_TYPES[dtype],
            "INDEX": CUDA_TYPES[index],
            "ROW_SUMS": int(sums),
            "WEIGHTED": int(weighted),
            "MAXIMA": int(maxima),
        },
    )
