"""Averages of 3x3 windows with stride 1, channels first, by chunks of results (window_chunks.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    SMALL,
    WindowForm,
    divider_of,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["WindowChunks"]

THREADS = 256
# Chunks of a thread, and blocks of a multiprocessor that registers suffice for.
EACH, BLOCKS = 4, 4
OVERLAPPED = 0
LEAST_LINES = 3
# The halo is at most this part of a tile.
MOST_HALO = 0.25

ChunkArgs = structure("pool/window_chunks.cu", "ChunkArgs")


class WindowChunks(Solver[WindowWork, WindowForm]):
    """Averages of 3x3 windows around every position, channels first."""

    name = "window_chunks"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "sums" or work.dtype not in SMALL:
            return f"{work.kind} in {work.dtype}"
        form = WindowForm.of(work)
        if form.last or form.dilated or not form.is_simple(form.windows, form.counted):
            return "not windows that slide by whole positions of planes"
        if not all(map(_around, form.windows[1:])):
            return "not windows of 3x3 around every position"
        if form.varying is not None and not all(map(_around, form.counted[1:])):
            return "sizes that differ from the windows'"
        chunk = _chunk(work.dtype)
        _, lines, columns = form.x_size
        if lines < LEAST_LINES or columns < chunk - 1:
            return f"planes of {lines} lines of {columns}"
        if 2 * _halo(columns, chunk) > MOST_HALO * _tile(chunk):
            return f"lines of {columns}"
        if chunk * lines * columns > LARGEST - _tile(chunk):
            return "planes of too many positions"
        return form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        # Several launches, of which each starts at a chunk, if 32-bit numbers do not hold all planes.
        chunk, plane = _chunk(work.dtype), prod(form.x_size)
        planes = (LARGEST - _tile(chunk)) // plane // chunk * chunk
        launches = (
            _launch(work, form, first, min(planes, form.batch - first))
            for first in range(0, form.batch, planes)
        )
        return Fragment(self.name, tuple(launches))

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, varying) for dtype in SMALL for varying in (None, "outputs", "inputs")
        ]


def _launch(work: WindowWork, form: WindowForm, first: int, planes: int) -> Launch:
    """Return the launch that computes a number of consecutive planes."""
    chunk, columns, plane = _chunk(work.dtype), form.x_size[2], prod(form.x_size)
    args = ChunkArgs()
    args.x = args.y = first * plane * work.dtype.itemsize
    args.elements, args.columns, args.plane = planes * plane, columns, plane
    args.halo = _halo(columns, chunk)
    args.divisor, args.reciprocal = form.divisor, 1.0 / form.divisor
    args.by_columns, args.by_plane = divider_of(columns), divider_of(plane)
    return Launch(
        _instance(work.dtype, form.varying),
        (ceil_div(args.elements, _tile(chunk)), 1, 1),
        (THREADS, 1, 1),
        pack(args, x=work.x, y=work.y),
        (_tile(chunk) + 2 * args.halo) * work.dtype.itemsize,
    )


def _around(axis: WindowAxis) -> bool:
    """Whether windows have three positions, around that of the result, if these exist."""
    whole = axis.input == axis.output == axis.high and axis.low == 0
    return whole and (axis.step, axis.first, axis.last, axis.unit) == (1, -1, 2, 1)


def _chunk(dtype: DType) -> int:
    return CHUNK_BYTES // dtype.itemsize


def _tile(chunk: int) -> int:
    """Return the elements of a block."""
    return THREADS * EACH * chunk


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
