"""Averages, maxima and their gradient, channels first: boxes of planes in shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from convgrad.dtypes import FLOATING, INDEX, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.max_pool import BAD_INDEX
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    Divider,
    WindowArgs,
    WindowForm,
    most_positions,
    window_args,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import (
    Check,
    Clear,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["WindowPlanes"]

BLOCK = 256
# Shared memory of a block: several fit on a multiprocessor.
MOST_BYTES = 36 * 1024
# Blocks that keep a multiprocessor busy, and threads with work that keep a block busy.
ENOUGH_BLOCKS, ENOUGH_ITEMS = 16, 512
# Positions of a thread along axis 1.
RUNS = (16, 8, 4, 2, 1)
# (LINES, TAPS) of windows whose lines are reduced once; the first that fits is used.
SHAPES = ((1, 4), (2, 2), (3, 3))
ROUTES_SHAPES = ((0, 2), (0, 3))
ANY = (0, 0)
# Windows larger than this are maxima of `window_reduce` unless positions are in many windows.
LARGE_WINDOW, MUCH_OVERLAP = 24, 4
KINDS = {"sums": 0, "maxima": 1, "routes": 2}
RANGE_BYTES = 8


class PlanesArgs(ctypes.Structure):
    """Mirrors ``pool/window_planes.cu``."""

    _anonymous_ = ("windows",)
    _fields_ = (
        ("windows", WindowArgs),
        *((name, ctypes.c_int32 * 3) for name in ("tile", "tiles", "box")),
        ("planes", ctypes.c_int32),
        ("run", ctypes.c_int32),
        ("pitch", ctypes.c_int32 * 2),
        *((name, ctypes.c_int32) for name in ("whole", "by_lines")),
        *((name, ctypes.c_int32) for name in ("indices_at", "ranges_at", "weights_at")),
        ("by_tile", Divider * 3),
        ("by_tiles", Divider * 3),
    )


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
        whole = cls(form.y_size, form.x_size, 1, whole=True, by_lines=False)
        each = whole.places(work, form).end
        if each <= MOST_BYTES:
            spread = ceil_div(form.batch, ENOUGH_BLOCKS * device.multiprocessors)
            return replace(whole, planes=min(MOST_BYTES // each, spread))
        for by_lines, least_lines, least_columns in ((False, 1, None), (True, 8, 32)):
            lines, columns = form.y_size[1:]
            while True:
                tile = cls._cut(form, (1, lines, columns), by_lines=by_lines)
                if tile.places(work, form).end <= MOST_BYTES:
                    return tile
                if lines > least_lines:
                    lines = ceil_div(lines, 2)
                elif least_columns is not None and columns > least_columns:
                    columns = ceil_div(columns, 2)
                else:
                    break
        return None

    @classmethod
    def _cut(cls, form: WindowForm, size: tuple[int, ...], *, by_lines: bool) -> Tile:
        sides = zip(form.windows, size, strict=True)
        box = [_covered(axis, positions) for axis, positions in sides]
        if not by_lines:
            box[2] = form.x_size[2]
        return cls(size, tuple(box), 1, whole=False, by_lines=by_lines)

    @property
    def run(self) -> int:
        """The positions of a thread along axis 1."""
        columns = self.planes * self.size[0] * self.size[2]
        fitting = (run for run in RUNS if columns * ceil_div(self.size[1], run) >= ENOUGH_ITEMS)
        return next(fitting, 1)

    def pitch(self, work: WindowWork, form: WindowForm) -> tuple[int, int]:
        """Return the elements between slices and between lines, like those of x modulo a chunk."""
        line, slice = form.x_size[2], prod(form.x_size[1:])
        if self.whole:
            return slice, line
        chunk = CHUNK_BYTES // min(work.dtype.itemsize, work.index_dtype.itemsize)
        if self.by_lines:
            line = ceil_div(self.box[2] + chunk, chunk) * chunk + line % chunk
        length = self.box[1] * line
        return ceil_div(length + chunk, chunk) * chunk + slice % chunk, line

    def places(self, work: WindowWork, form: WindowForm) -> Places:
        """Return where the parts of shared memory are."""
        elements = self.planes * self.box[0] * self.pitch(work, form)[0]

        def box_bytes(dtype: DType) -> int:
            return ceil_div(elements * dtype.itemsize, CHUNK_BYTES) * CHUNK_BYTES + 2 * CHUNK_BYTES

        indices = box_bytes(work.dtype)
        ranges = indices + (box_bytes(work.index_dtype) if work.kind == "routes" else 0)
        weights = ranges + RANGE_BYTES * self.size[1]
        weight_bytes = max(4, work.dtype.itemsize) if form.varying == "inputs" else 0
        return Places(indices, ranges, weights, weights + weight_bytes * sum(self.box))


class Places(NamedTuple):
    """Offsets in shared memory, in bytes: the parts that follow the box of x, and the end."""

    indices: int
    ranges: int
    weights: int
    end: int


class WindowPlanes:
    """Averages, maxima and gradients of maxima, channels first, of boxes in shared memory."""

    name = "window_planes"

    def why_not(self, work: WindowWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        form = WindowForm.of(work)
        if form.last:
            return "channels last"
        large = form.most_window >= LARGE_WINDOW and form.overlap <= MUCH_OVERLAP
        if work.kind == "maxima" and large:
            return f"windows of {LARGE_WINDOW} positions or more with little overlap"
        tile = Tile.of(work, form, device)
        if tile is None:
            return f"windows too large for {MOST_BYTES} bytes of shared memory"
        if _blocks(form, tile) > MAX_BLOCKS:
            return "more blocks than a grid can have"
        return form.why_not()

    def launches(self, work: WindowWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        form = WindowForm.of(work)
        tile = Tile.of(work, form, device)
        if tile is None:
            raise ValueError("windows that do not fit into shared memory")
        places = tile.places(work, form)
        args = PlanesArgs()
        args.windows = window_args(form, 1, form.y_size)
        args.tile[:], args.box[:], args.tiles[:] = tile.size, tile.box, _tiles(form, tile)
        args.planes, args.run = tile.planes, tile.run
        args.whole, args.by_lines = tile.whole, tile.by_lines
        args.pitch[:] = tile.pitch(work, form)
        args.indices_at, args.ranges_at, args.weights_at, _ = places
        divisors = tile.size[0], ceil_div(tile.size[1], tile.run), tile.size[2]
        for i, by in enumerate(divisors):
            args.by_tile[i], args.by_tiles[i] = Divider.of(by), Divider.of(args.tiles[i])
        bad = f"{work.prefix}bad_index" if work.checked else None
        launch = Launch(
            _instance(work.dtype, work.index_dtype, work.kind, *_variant(work, form)),
            (_blocks(form, tile), 1, 1),
            (BLOCK, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
            places.end,
        )
        if bad is None:
            return Fragment(self.name, (launch,))
        steps = (Clear(bad, 8), launch)
        return Fragment(self.name, steps, (Workspace(bad, 8),), (Check(bad, BAD_INDEX),))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        found = []
        for dtype in FLOATING:
            for simple in (True, False):
                found += [
                    _instance(dtype, DType.INT64, "sums", shape, simple, weighted)
                    for shape in (*SHAPES, ANY)
                    for weighted in (False, True)
                ]
                found += [
                    _instance(dtype, index, kind, shape, simple)
                    for index in INDEX
                    for kind, shapes in (("maxima", SHAPES), ("routes", ROUTES_SHAPES))
                    for shape in (*shapes, ANY)
                ]
        return found


def _variant(work: WindowWork, form: WindowForm) -> tuple[tuple[int, int], bool, bool]:
    """Return (LINES, TAPS), and whether the kernel is SIMPLE and WEIGHTED."""
    slices, lines, taps = map(most_positions, form.windows)
    simple = form.x_size[0] == form.y_size[0] == 1 and all(axis.unit == 1 for axis in form.windows)
    routes, weighted = work.kind == "routes", form.varying == "inputs"
    if work.kind == "maxima" and slices > 1:
        return ANY, simple, weighted
    fitting = (
        shape
        for shape in (ROUTES_SHAPES if routes else SHAPES)
        if (routes or lines <= shape[0]) and taps <= shape[1]
    )
    return next(fitting, ANY), simple, weighted


def _covered(axis: WindowAxis, outputs: int) -> int:
    """Return an upper bound of the positions in all windows of adjacent outputs."""
    reach = (outputs - 1) * axis.step + axis.last - axis.first
    return min(axis.input, ceil_div(reach, axis.unit))


def _tiles(form: WindowForm, tile: Tile) -> list[int]:
    return [ceil_div(size, own) for size, own in zip(form.y_size, tile.size, strict=True)]


def _blocks(form: WindowForm, tile: Tile) -> int:
    return prod(_tiles(form, tile)) * ceil_div(form.batch, tile.planes)


def _instance(
    dtype: DType,
    index: DType,
    kind: str,
    shape: tuple[int, int],
    simple: bool,
    weighted: bool = False,
) -> Instance:
    return Instance.of(
        "pool/window_planes.cu",
        {
            "ELEMENT": CUDA_TYPES[dtype],
            "INDEX": CUDA_TYPES[index],
            "KIND": KINDS[kind],
            "LINES": shape[0],
            "TAPS": shape[1],
            "SIMPLE": int(simple),
            "WEIGHTED": int(weighted),
        },
    )
