"""Maxima of windows and their positions, a thread for each window."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import Any

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    SMALL,
    WindowForm,
    most_positions,
    widths,
    covered,
    divider_of,
    window_args,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork

__all__ = ["WindowMaxima"]

MaximaArgs: Any = structure("pool/window_maxima.cu", "MaximaArgs", anonymous=("windows",))

# Threads of a block, and bytes of x that its adjacent threads load.
MOST_THREADS, WARP, LINE_BYTES = 256, 32, 128
# The time of a thread, in that of a vector that a block loads.
A_THREAD = 2
# Positions of a window along its last two axes that are loaded at once; the first that fits.
LOADED = ((1, 4), (2, 2), (3, 3), (4, 4))
ANY = (0, 0)


class WindowMaxima(Solver[WindowWork, WindowForm]):
    """Maxima of windows of any kind."""

    name = "window_maxima"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "maxima":
            return "no maxima"
        form = WindowForm.of(work)
        return form.why_not(form.width(work.dtype)) or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        width = form.width(work.dtype)
        args, blocks, threads = _tiled(form, width, work.dtype)
        args.wide_indices = work.index_dtype is DType.INT64
        launch = Launch(
            _instance(work.dtype, width, _loaded(work.dtype, form)),
            (blocks, ceil_div(form.batch, args.chunk), 1),
            (threads, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, carried=work.carried),
        )
        return Fragment(self.name, (launch,))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, width, loaded)
            for dtype in FLOATING
            for loaded in ((*LOADED, ANY) if dtype in SMALL else (ANY,))
            for width in widths(dtype)
        ]


def _tiled(form: WindowForm, width: int, dtype: DType) -> tuple[Any, int, int]:
    """Return the arguments, the blocks of a chunk, and the threads of a block."""
    args, vectors = MaximaArgs(), form.inner // width
    args.windows = window_args(form, width, form.y_size)
    most = max(1, min(LINE_BYTES // (width * dtype.itemsize), vectors))
    lanes = ceil_div(vectors, ceil_div(vectors, most))
    lanes += lanes % 2 if vectors % 2 == 0 else 0  # pairs of threads exchange what they store
    axes, size = form.windows[1:], form.y_size[1:]

    def cost(tile: tuple[int, ...]) -> int:
        threads = ceil_div(lanes * prod(tile), WARP) * WARP
        box = prod(covered(axis, own) for axis, own in zip(axes, tile, strict=True))
        tiles = prod(map(ceil_div, size, tile))
        return tiles * (A_THREAD * threads + lanes * box)

    positions = MOST_THREADS // lanes
    parts = (range(ceil_div(own, min(own, positions)), own + 1) for own in size)
    sides = (dict.fromkeys(ceil_div(own, n) for n in some) for own, some in zip(size, parts))
    tile = min((tile for tile in product(*sides) if prod(tile) <= positions), key=cost)
    chunks, tiles = ceil_div(vectors, lanes), list(map(ceil_div, size, tile))
    args.lanes, args.chunks, args.tile[:], args.tiles[:] = lanes, chunks, tile, tiles
    args.by_lanes, args.by_columns = divider_of(lanes), divider_of(tile[1])
    args.by_chunks, args.by_slices = divider_of(chunks), divider_of(form.y_size[0])
    args.by_tiles[:] = [divider_of(each) for each in tiles]
    blocks = args.chunk * form.y_size[0] * prod(tiles) * chunks
    return args, blocks, ceil_div(lanes * prod(tile), WARP) * WARP


def _loaded(dtype: DType, form: WindowForm) -> tuple[int, int]:
    if form.dilated or not form.last or dtype not in SMALL:
        return ANY
    rows, columns = map(most_positions, form.windows[1:])
    fitting = (size for size in LOADED if rows <= size[0] and columns <= size[1])
    return next(fitting, ANY)


def _instance(dtype: DType, width: int, loaded: tuple[int, int]) -> Instance:
    rows, columns = loaded
    return Instance.of(
        "pool/window_maxima.cu", ELEMENT=dtype, WIDTH=width, ROWS=rows, COLUMNS=columns
    )
