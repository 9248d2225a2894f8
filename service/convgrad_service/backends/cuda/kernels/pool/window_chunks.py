"""3x3 windows with stride 1, channels first, by chunks of results: averages (window_chunks.cu) and
gradients of max pooling from indices (route_chunks.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    SMALL,
    FromIndices,
    WindowForm,
    divider_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["RouteChunks", "WindowChunks"]

THREADS = 256
# Chunks of a thread, and blocks of a multiprocessor that registers suffice for.
EACH, BLOCKS = 4, 4
OVERLAPPED = 0
ROUTE_EACH, ROUTE_BLOCKS = 2, 4
LEAST_LINES = 3
# The halo is at most this part of a tile.
MOST_HALO = 0.25

ChunkArgs = structure("pool/window_chunks.cuh", "ChunkArgs")


class WindowChunks(Solver[WindowWork, WindowForm]):
    """Averages of 3x3 windows around every position, channels first."""

    name = "window_chunks"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "sums" or work.dtype not in SMALL:
            return f"{work.kind} in {work.dtype}"
        form = WindowForm.of(work)
        return _why_not(work, form, EACH) or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        launches = (
            _launch(work, form, first, planes) for first, planes in _groups(work, form, EACH)
        )
        return Fragment(self.name, tuple(launches))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, varying) for dtype in SMALL for varying in (None, "outputs", "inputs")
        ]


class RouteChunks(FromIndices[WindowForm]):
    """Gradients of max pooling from indices, of 3x3 windows around every position, channels first."""

    name = "route_chunks"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if (
            work.kind != "routes"
            or work.dtype not in SMALL
            or work.dtype is not (work.x_dtype or work.dtype)
        ):
            return f"{work.kind} in {work.dtype}"
        form = WindowForm.of(work)
        if (reason := _why_not(work, form, ROUTE_EACH)) is not None:
            return reason
        if len(list(_groups(work, form, ROUTE_EACH))) > 1:
            return "more positions than 32-bit numbers hold"
        return form

    def launch(
        self, work: WindowWork, device: CudaDevice, config: WindowForm, bad: str | None
    ) -> Launch:
        chunk = _chunk(work.dtype)
        args = _arguments(work, config, config.batch)
        args.wide_indices = work.index_dtype is DType.INT64
        tile = _tile(chunk, ROUTE_EACH)
        return Launch(
            _route_instance(work.dtype),
            (ceil_div(args.elements, tile), 1, 1),
            (THREADS, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
            2 * (tile + 2 * args.halo) * work.dtype.itemsize,
        )

    def instances(self) -> Iterable[Instance]:
        return [_route_instance(dtype) for dtype in SMALL]


def _why_not(work: WindowWork, form: WindowForm, each: int) -> str | None:
    """Return why windows are not 3x3 around every position of planes that chunks suit."""
    if form.last or form.dilated or not form.is_simple(form.windows, form.counted):
        return "not windows that slide by whole positions of planes"
    sized = form.varying is not None or work.kind == "routes"
    if not all(map(_around, (*form.windows[1:], *(form.counted[1:] if sized else ())))):
        return "not windows of 3x3 around every position"
    chunk = _chunk(work.dtype)
    _, lines, columns = form.x_size
    if lines < LEAST_LINES or columns < chunk - 1:
        return f"planes of {lines} lines of {columns}"
    if 2 * _halo(columns, chunk) > MOST_HALO * _tile(chunk, each):
        return f"lines of {columns}"
    if chunk * lines * columns > LARGEST - _tile(chunk, each):
        return "planes of too many positions"
    return None


def _groups(work: WindowWork, form: WindowForm, each: int) -> Iterator[tuple[int, int]]:
    """Yield the first plane, and the number of planes, of each launch: if 32-bit numbers do not hold
    all planes, there are several, of which each starts at a chunk."""
    chunk, plane = _chunk(work.dtype), prod(form.x_size)
    planes = (LARGEST - _tile(chunk, each)) // plane // chunk * chunk
    for first in range(0, form.batch, planes):
        yield first, min(planes, form.batch - first)


def _arguments(work: WindowWork, form: WindowForm, planes: int) -> Any:
    """Return the arguments of a launch of a number of planes."""
    args = ChunkArgs()
    columns, plane = form.x_size[2], prod(form.x_size)
    args.elements, args.columns, args.plane = planes * plane, columns, plane
    args.halo = _halo(columns, _chunk(work.dtype))
    args.divisor, args.reciprocal = form.divisor, 1.0 / form.divisor
    args.by_columns, args.by_plane = divider_of(columns), divider_of(plane)
    return args


def _launch(work: WindowWork, form: WindowForm, first: int, planes: int) -> Launch:
    """Return the launch that averages a number of consecutive planes."""
    args = _arguments(work, form, planes)
    args.x = args.y = first * args.plane * work.dtype.itemsize
    tile = _tile(_chunk(work.dtype), EACH)
    return Launch(
        _instance(work.dtype, form.varying),
        (ceil_div(args.elements, tile), 1, 1),
        (THREADS, 1, 1),
        pack(args, x=work.x, y=work.y),
        (tile + 2 * args.halo) * work.dtype.itemsize,
    )


def _around(axis: WindowAxis) -> bool:
    """Whether windows have three positions, around that of the result, if these exist."""
    whole = axis.input == axis.output == axis.high and axis.low == 0
    return whole and (axis.step, axis.first, axis.last, axis.unit) == (1, -1, 2, 1)


def _chunk(dtype: DType) -> int:
    return CHUNK_BYTES // dtype.itemsize


def _tile(chunk: int, each: int) -> int:
    """Return the elements of a block whose threads have ``each`` chunks."""
    return THREADS * each * chunk


def _halo(columns: int, chunk: int) -> int:
    return ceil_div(columns + 1, chunk) * chunk


def _instance(dtype: DType, varying: str | None) -> Instance:
    return Instance.of(
        "pool/window_chunks.cu",
        ELEMENT=dtype,
        EACH=EACH,
        BLOCKS=BLOCKS,
        OVERLAPPED=OVERLAPPED,
        SIZED=varying == "outputs",
        WEIGHTED=varying == "inputs",
    )


def _route_instance(dtype: DType) -> Instance:
    return Instance.of("pool/route_chunks.cu", ELEMENT=dtype, EACH=ROUTE_EACH, BLOCKS=ROUTE_BLOCKS)
