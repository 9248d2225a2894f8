"""Configurations of depthwise_direct, and the time that each is expected to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    bytes_of,
    channel_strides_of,
    channels_of,
    lines_of,
    rows_adjacent,
    spread_of,
    turned,
    turns_of,
    vector_of,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["BLOCKS", "THREADS", "Direct", "DirectLayout", "best_layout", "expected_s", "formed"]
__all__ += ["instance_layouts", "layouts_of", "parts_of", "read_columns"]

THREADS, BLOCKS = 128, 4
MOST_COLUMNS = 7
"""The most columns of taps of an instance, but of kernels of one row."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The instances for a stride along W.

    Attributes
    ----------
    kernels, whole
        Columns of taps, and rows and columns of a thread's results, with the whole kernel.
    row_kernels, by_rows
        Columns of taps and of results where rows of taps are taken one by one.
    line_kernels, lines
        The most columns of taps, and columns of results, of kernels of one row.
    """

    kernels: tuple[int, ...] = ()
    whole: tuple[tuple[int, int], ...] = ()
    row_kernels: tuple[int, ...] = (MOST_COLUMNS,)
    by_rows: tuple[int, ...] = (4,)
    line_kernels: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()


KERNELS = 3, 5, MOST_COLUMNS
# A row of more than 16 taps goes in parts: on an H200, threads that read 38 columns at once took 5
# times as long as expected (144 channels, 400 positions, 31 taps, in both layouts).
# For longer strides: results that read columns of their own.
ANY_STRIDE = 0
OWN_COLUMNS = Shapes(row_kernels=(3,))
SHAPES = {
    1: Shapes(KERNELS, ((1, 7), (2, 7), (4, 4)), KERNELS, (7, 14), (8, 16), (7,)),
    2: Shapes(KERNELS, ((1, 4), (2, 4)), KERNELS, (4, 7), (8, 32), (7,)),
    3: Shapes(),
    4: Shapes(),
    ANY_STRIDE: OWN_COLUMNS,
}
# Of single channels of 16 bits, mostly in planes: with all shapes, 6 layers in planes were not
# faster on an H200.
SINGLE_SHAPES = {
    **SHAPES,
    1: replace(SHAPES[1], whole=((1, 7), (2, 7)), by_rows=(7,)),
    2: replace(SHAPES[2], whole=((2, 4),), by_rows=(7,)),
}
# Of vectors of channels in a tile.
MOST_VECTORS, FEWER_VECTORS = 32, 16
PLANES = (1, 2, 4, 8, 16)
"""Channels in a tile if they are in planes."""
# Instructions of a result in planes for each cache line that a warp writes, and of one that passes
# through shared memory; fitted to 108 configurations of 26 layers on an H200.
PLANE_RESULT, STAGED_RESULT = 6.5, 26


@dataclass(frozen=True, slots=True)
class Cost:
    """A launch, the instructions of a thread, and what they and memory take.

    A thread's instructions are those of itself, of an element of x that it reads, of a result, of a
    tap, and of a weight that it copies, besides one for each product. A scheduler issues
    ``clocks_s`` of them per second, if it has at least ``alone`` warps. ``apart`` is the part of
    the lesser of computation's and memory's time that is not hidden.
    """

    start_s: float
    thread: float
    read: float
    result: float
    tap: float
    weight: float
    clocks_s: float
    alone: float
    bytes_s: float
    apart: float


# Fitted on an H200 to 58 and 66 layers; fits to one half erred by 6 % on the other. Kernels of one
# row cost what whole kernels do.
WHOLE = Cost(4.78e-6, 84, 1.21, 1.54, 3.75, 2.85, 0.992e9, 1.35, 3.99e12, 0.154)
BY_ROWS = Cost(4.93e-6, 263, 7.0, 0.5, 3.53, 29.5, 1.34e9, 2.6, 4.6e12, 0.438)
# Each row of taps after the first ones, if nothing else takes longer.
STEP_S, EARLY_STEPS = 0.1e-6, 3


@dataclass(frozen=True, slots=True)
class DirectLayout:
    """A configuration.

    Attributes
    ----------
    kernel, stride
        Columns of taps of an instance, and the stride along W, or ``ANY_STRIDE``.
    line
        Whether the kernel has one row, of at most ``kernel`` columns.
    turned
        Whether H and W are exchanged.
    rows, columns
        A thread's results (in dgrad, times the stride); ``rows`` is 0 if they are of one row, and
        rows of taps are taken one at a time.
    vector, vectors
        Channels of a thread, and vectors of channels in a tile.
    """

    kernel: int
    stride: int
    rows: int
    columns: int
    vector: int
    vectors: int
    line: bool = False
    turned: bool = False

    @property
    def places(self) -> int:
        """Positions of a block."""
        return THREADS // self.vectors


def shapes_of(dtype: DType, vector: int) -> Mapping[int, Shapes]:
    """Return the instances for threads of ``vector`` channels, by the stride along W."""
    return SINGLE_SHAPES if dtype.itemsize * vector == 2 else SHAPES


def instance_layouts(dtype: DType, vector: int) -> Iterator[DirectLayout]:
    """Yield a layout of each instance for threads of ``vector`` channels."""
    for stride, shapes in shapes_of(dtype, vector).items():
        for kernel, (rows, columns) in product(shapes.kernels, shapes.whole):
            yield DirectLayout(kernel, stride, rows, columns, vector, 8)
        for kernel, columns in product(shapes.row_kernels, shapes.by_rows):
            yield DirectLayout(kernel, stride, 0, columns, vector, 8)
        for kernel, columns in product(shapes.line_kernels, shapes.lines):
            yield DirectLayout(kernel, stride, 1, columns, vector, 8, line=True)


def parts_of(work: ConvWork) -> tuple[int, int]:
    """Return the parts of a row of taps, and their columns."""
    stride = work.stride[2] if work.direction == "bwd_data" else 1
    columns = work.kernel[2]
    if instance_stride(work) == ANY_STRIDE:
        (part,) = OWN_COLUMNS.row_kernels
        return ceil_div(ceil_div(columns, stride), part), part
    if columns <= MOST_COLUMNS:
        return 1, columns
    part = ceil_div(ceil_div(columns, ceil_div(columns, MOST_COLUMNS // stride * stride)), stride)
    return ceil_div(columns, part * stride), part * stride


def read_columns(layout: DirectLayout, backward: bool) -> int:
    """Return the columns of x that a thread reads."""
    if layout.stride == ANY_STRIDE:
        return layout.columns * layout.kernel
    return _reads(layout.kernel, layout.stride, layout.columns, backward)


def instance_stride(work: ConvWork) -> int:
    """Return the stride of the instances for a work."""
    return work.stride[2] if work.stride[2] in SHAPES else ANY_STRIDE


class Direct:
    """A work, as it is launched (`formed`), with a configuration.

    Attributes
    ----------
    apart
        Columns between a thread's results.
    adjacent
        Whether adjacent threads have adjacent positions, as the result's channels are not
        contiguous.
    columns
        Columns of a thread's results.
    across, down
        Positions of threads in a row of the result, and rows of them in a plane.
    staged
        Whether results pass through shared memory, as a thread's are adjacent.
    grid
        Tiles of channels, and the blocks of each.
    """

    def __init__(self, work: ConvWork, layout: DirectLayout) -> None:
        self.work, self.layout, self.backward = work, layout, work.direction == "bwd_data"
        self.strided = self.backward and layout.stride > 1
        self.apart = 1 if layout.stride == ANY_STRIDE else spread_of(work)
        self.adjacent = channel_strides_of(work)[0 if self.backward else 1] != 1
        self.columns = layout.columns * (layout.stride if self.strided else 1)
        depth, height, width = work.sizes[1]
        across = self.apart * self._positions(2, layout.columns * self.apart)
        # Where taps are as far apart as the row is long, a thread has a single column.
        self.across = across if self.apart == 1 else min(across, width)
        self.down = self._positions(1, layout.rows) if layout.rows else height
        self.down_first = rows_adjacent(work)
        alone = self.adjacent and not self.down_first and self.apart == 1
        self.staged = alone and self.columns > 1
        self.image_positions = depth * self.down * self.across
        self.grid = (
            ceil_div(channels_of(work), layout.vectors * layout.vector),
            ceil_div(work.batch * self.image_positions, layout.places),
        )

    def _positions(self, axis: int, results: int) -> int:
        work = self.work
        extent, pad, stride = work.sizes[1][axis], work.pad[axis], work.stride[axis]
        if self.backward and self.layout.stride != ANY_STRIDE:
            extent = ceil_div(extent + pad, stride) - pad // stride
        return ceil_div(extent, results)

    @property
    def shared_bytes(self) -> int:
        """Bytes of weights, and of the results of a row of all threads if they are staged."""
        elements = self.layout.vectors * self.layout.vector * self.work.taps
        return (elements + THREADS * self.columns * self.staged) * self.work.dtype.itemsize

    def lines(self) -> float:
        """Return the cache lines of planes in which a warp's threads have a result."""
        layout, dtype = self.layout, self.work.dtype
        if self.down_first:
            scale = self.work.stride[1] if self.strided and layout.rows else 1
            return lines_of(dtype, max(1, layout.rows) * scale, self.down)
        return lines_of(dtype, self.columns if self.apart == 1 else 1, self.across)


def _reads(taps: int, stride: int, results: int, backward: bool) -> int:
    return results + ceil_div(taps, stride) - 1 if backward else (results - 1) * stride + taps


def _is_plane(work: ConvWork) -> bool:
    """Whether a plane's results are of one plane and adjacent taps."""
    return (
        work.kernel[0] == work.stride[0] == 1
        and work.pad[0] == 0
        and work.input[0] == work.output[0]
        and not work.dilated
        and (work.stride[1] == work.stride[2] or work.input[1] == work.output[1] == 1)
    )


@lru_cache(maxsize=1024)
def formed(work: ConvWork, turn: bool) -> ConvWork:
    """Return a work as it is launched: `turned` or not; and a gradient that sums over the planes of
    several output channels as one that sums over as many slices of depth, by as many slices of
    taps: slice z has tap z."""
    if turn:
        work = turned(work)
    many, conv = work.out_channels, work.conv
    flat = work.kernel[0] == work.input[0] == work.output[0] == 1 and work.pad[0] == 0
    if many == 1 or work.direction != "bwd_data" or not flat:
        return work
    zero, y, w = (0, 0), work.y.strides, work.w.strides
    return replace(
        work,
        conv=replace(
            conv,
            out_channels=work.groups,
            input_size=work.input,
            output_size=(many, *work.output[1:]),
            kernel_size=(many, *work.kernel[1:]),
            stride=(1, *work.stride[1:]),
            padding=(zero, *([zero] * 3 + list(conv.padding))[-2:]),
            dilation=(-1, *work.dilation[1:]),
        ),
        w=replace(work.w, strides=(w[0], 0, w[2], w[1], *w[4:])),
        y=replace(work.y, strides=(y[0], y[1], 0, y[2], *y[4:])),
    )


def layouts_of(work: ConvWork) -> Iterator[DirectLayout]:
    """Yield the configurations that may be the fastest."""
    for turn in turns_of(work):
        for layout in _layouts(formed(work, turn)):
            yield replace(layout, turned=turn)


def _layouts(work: ConvWork) -> Iterator[DirectLayout]:
    vector, stride = vector_of(work), instance_stride(work)
    all_vectors = ceil_div(channels_of(work), vector)
    sizes = set()
    for most in (FEWER_VECTORS, MOST_VECTORS):
        tiles = ceil_div(all_vectors, most)
        sizes.add(ceil_div(ceil_div(all_vectors, tiles), 8) * 8)
    if channel_strides_of(work)[0 if work.direction == "bwd_data" else 1] != 1:
        sizes = {size for size in PLANES if size == 1 or size <= all_vectors}
    columns, line = work.kernel[2], False
    known = shapes_of(work.dtype, vector)[stride]
    whole = known.whole and _is_plane(work)
    if whole and work.kernel[1] == columns and columns in known.kernels:
        # An instance has the whole kernel, which is faster.
        kernel, shapes = columns, known.whole
    elif whole and work.kernel[1] == 1 and work.pad[1] == 0 and columns <= known.line_kernels[-1]:
        kernel, line = next(one for one in known.line_kernels if one >= columns), True
        shapes = tuple((1, one) for one in known.lines)
    else:
        kernel = next(one for one in known.row_kernels if one >= parts_of(work)[1])
        shapes = tuple((0, one) for one in known.by_rows)
    for rows, across in shapes:
        for vectors in sorted(sizes):
            yield DirectLayout(kernel, stride, rows, across, vector, vectors, line)


@lru_cache(maxsize=1024)
def best_layout(work: ConvWork, device: CudaDevice) -> DirectLayout:
    """Return the configuration with the least predicted time."""
    return min(layouts_of(work), key=lambda one: expected_s(work, device, one))


def expected_s(work: ConvWork, device: CudaDevice, layout: DirectLayout) -> float:
    """Return the predicted time of a configuration."""
    direct = Direct(formed(work, layout.turned), layout)
    work, backward = direct.work, direct.backward
    cost = WHOLE if layout.rows else BY_ROWS
    read = read_columns(layout, backward)
    scale = max(1, layout.stride) if backward else 1
    results, products = layout.columns * scale, layout.columns * layout.kernel * layout.vector
    taps, steps, most_steps = layout.kernel, 1.0, 1
    if layout.line:
        taps, products = work.kernel[2] * layout.vector, products * work.kernel[2] // layout.kernel
    elif layout.rows:
        read *= _reads(layout.kernel, layout.stride, layout.rows, backward)
        results *= layout.rows * scale
        products *= layout.rows * layout.kernel
        taps *= layout.kernel
    else:
        taps *= layout.vector * (layout.columns if layout.stride == ANY_STRIDE else 1)
        steps = most_steps = parts_of(work)[0]
        for rows, stride in zip(work.kernel[:2], work.stride[:2], strict=True):
            steps *= rows / stride if backward else rows
            most_steps *= ceil_div(rows, stride) if backward else rows
    of_result = cost.result
    if direct.staged:
        of_result += STAGED_RESULT
    elif direct.adjacent:
        of_result += PLANE_RESULT * direct.lines()
    step = read * (cost.read + layout.vector) + products + taps * cost.tap
    thread = cost.thread + results * of_result + steps * step
    thread += layout.vectors * work.taps / THREADS * cost.weight
    # A block has a warp for each of an SM's four schedulers, which a single one does not keep busy.
    rounds = max(cost.alone, ceil_div(prod(direct.grid), device.multiprocessors))
    busy_s = rounds * thread / cost.clocks_s
    waits_s = max(bytes_of(work) / cost.bytes_s, STEP_S * max(0, most_steps - EARLY_STEPS))
    return cost.start_s + max(busy_s, waits_s) + cost.apart * min(busy_s, waits_s)
