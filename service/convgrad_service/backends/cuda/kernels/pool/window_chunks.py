"""3x3 windows with stride 1, channels first, by chunks of results: averages (window_chunks.cu) and
gradients of max pooling from indices (route_chunks.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.kernels.pool.window_form import (
    LARGEST,
    SMALL,
    FromIndices,
    WindowForm,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import WindowWork
from convgrad_service.problems.windows import WindowAxis

__all__ = ["RouteChunks", "WindowChunks"]

THREADS = 256
# Blocks of a multiprocessor that registers suffice for, by the side whose window sizes divide.
BLOCKS = {None: 4, "outputs": 5, "inputs": 5}
ROUTE_BLOCKS = 4
# Chunks of a thread: fewer if otherwise multiprocessors would lack blocks.
EACH, FEWER_EACH = 4, 2
LEAST_LINES = 3
# The chunks of a block's halo.
MOST_HALO = THREADS
ROUTED = (DType.FLOAT16, DType.BFLOAT16)
"""Types in which `WindowScatter` is slower: in float32, gradients take 0.91 to 1.13 of its time."""

ChunkArgs = structure("pool/window_chunks.cuh", "ChunkArgs")


class WindowChunks(Solver[WindowWork, WindowForm]):
    """Averages of 3x3 windows around every position, channels first."""

    name = "window_chunks"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        if work.kind != "sums" or work.dtype not in SMALL:
            return f"{work.kind} in {work.dtype}"
        form = WindowForm.of(work)
        return _why_not(work, form) or form

    def fragment(self, work: WindowWork, device: CudaDevice, form: WindowForm) -> Fragment:
        # Several launches, each from a chunk on, if 32-bit numbers do not hold all planes.
        planes = _most_planes(work, form)
        launches = (
            self._launch(work, device, form, first, min(planes, form.batch - first))
            for first in range(0, form.batch, planes)
        )
        return Fragment(self.name, tuple(launches))

    def _launch(
        self, work: WindowWork, device: CudaDevice, form: WindowForm, first: int, planes: int
    ) -> Launch:
        """Return the launch that averages a number of consecutive planes."""
        blocks = BLOCKS[form.varying] * device.multiprocessors
        few = planes * prod(form.x_size) < blocks * _tile(work, EACH)
        args = _arguments(work, form, planes, FEWER_EACH if few else EACH)
        args.x = args.y = first * args.plane * work.dtype.itemsize
        return Launch(
            _instance(work.dtype, form.varying),
            (ceil_div(args.elements, args.tile), 1, 1),
            (THREADS, 1, 1),
            pack(args, x=work.x, y=work.y),
            (args.tile + 2 * args.halo) * work.dtype.itemsize,
        )

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, varying) for dtype in SMALL for varying in (None, "outputs", "inputs")
        ]


class RouteChunks(FromIndices[WindowForm]):
    """Gradients of max pooling from indices, of 3x3 windows around every position, channels first,
    in 16-bit types."""

    name = "route_chunks"

    def solve(self, work: WindowWork, device: CudaDevice) -> WindowForm | str:
        dtypes = work.dtype, work.x_dtype or work.dtype
        if work.kind != "routes" or dtypes[0] not in ROUTED or dtypes[0] is not dtypes[1]:
            return f"{work.kind} in {work.dtype}"
        form = WindowForm.of(work)
        if (reason := _why_not(work, form)) is not None:
            return reason
        if form.batch > _most_planes(work, form):
            return "more positions than 32-bit numbers hold"
        return form

    def launch(
        self, work: WindowWork, device: CudaDevice, config: WindowForm, bad: str | None
    ) -> Launch:
        args = _arguments(work, config, config.batch, FEWER_EACH)
        args.wide_indices = work.index_dtype is DType.INT64
        return Launch(
            _route_instance(work.dtype),
            (ceil_div(args.elements, args.tile), 1, 1),
            (THREADS, 1, 1),
            pack(args, x=work.x, y=work.y, indices=work.indices, bad=bad),
            2 * (args.tile + 2 * args.halo) * work.dtype.itemsize,
        )

    def instances(self) -> Iterable[Instance]:
        return [_route_instance(dtype) for dtype in ROUTED]


def _why_not(work: WindowWork, form: WindowForm) -> str | None:
    """Return why windows are not 3x3 around every position of planes that chunks suit."""
    if form.last or form.dilated or not form.is_simple(form.windows, form.counted):
        return "not windows that slide by whole positions of planes"
    sized = form.varying is not None or work.kind == "routes"
    if not all(map(_around, (*form.windows[1:], *(form.counted[1:] if sized else ())))):
        return "not windows of 3x3 around every position"
    _, lines, columns = form.x_size
    if lines < LEAST_LINES or columns < _chunk(work) - 1:
        return f"planes of {lines} lines of {columns}"
    if 2 * _halo(work, form) > MOST_HALO * _chunk(work):
        return f"lines of {columns}"
    return None if _most_planes(work, form) > 0 else "planes of too many positions"


def _most_planes(work: WindowWork, form: WindowForm) -> int:
    """Return the planes of a launch, whose elements are whole chunks; 0 if one is too large."""
    chunk = _chunk(work)
    return (LARGEST - _tile(work, EACH)) // prod(form.x_size) // chunk * chunk


def _arguments(work: WindowWork, form: WindowForm, planes: int, each: int) -> Any:
    """Return the arguments of a launch of a number of planes whose threads have ``each`` chunks."""
    args = ChunkArgs()
    columns, plane = form.x_size[2], prod(form.x_size)
    args.elements, args.columns, args.plane = planes * plane, columns, plane
    args.tile, args.halo = _tile(work, each), _halo(work, form)
    args.divisor, args.reciprocal = form.divisor, 1.0 / form.divisor
    args.by_columns, args.by_plane = divider(columns), divider(plane)
    return args


def _around(axis: WindowAxis) -> bool:
    """Whether windows have three positions, around that of the result, if these exist."""
    whole = axis.input == axis.output == axis.high and axis.low == 0
    return whole and (axis.step, axis.first, axis.last, axis.unit) == (1, -1, 2, 1)


def _chunk(work: WindowWork) -> int:
    """Return the elements of a chunk."""
    return CHUNK_BYTES // work.dtype.itemsize


def _tile(work: WindowWork, each: int) -> int:
    """Return the elements of a block whose threads have ``each`` chunks."""
    return THREADS * each * _chunk(work)


def _halo(work: WindowWork, form: WindowForm) -> int:
    """Return the elements of the halo on a side: whole chunks, more than a line."""
    return ceil_div(form.x_size[2] + 1, _chunk(work)) * _chunk(work)


def _instance(dtype: DType, varying: str | None) -> Instance:
    return Instance.of(
        "pool/window_chunks.cu",
        ELEMENT=dtype,
        BLOCKS=BLOCKS[varying],
        SIZED=varying == "outputs",
        WEIGHTED=varying == "inputs",
    )


def _route_instance(dtype: DType) -> Instance:
    return Instance.of("pool/route_chunks.cu", ELEMENT=dtype, BLOCKS=ROUTE_BLOCKS)
