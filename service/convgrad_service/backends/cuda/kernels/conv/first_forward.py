"""fprop of a first layer (few input channels) by mma.sync, or by FMA for float32's own products
(first_forward.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, pack
from convgrad_service.backends.cuda.kernels.conv.patch_products import MOST_CHANNELS
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    Requirements,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    in_whole_chunks,
    prepare_rows,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, CudaDevice, architectures_before
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["FirstForward"]

CHANNELS = 32
"""Output channels, and output positions, of a warp tile."""
MOST_CHANNELS_EXACT = 8
"""The most channels of the source by FMA: of more, tiles of the dense kernels are mostly full."""
MOST_WARP_CHANNELS = 4
MOST_TILES = 256
# By instance, the pairs of column tiles whose weights a warp keeps in registers.
REGISTER_WEIGHTS = (4, 11)
MOST_WARPS = 12
BLACKWELL = (10, 0)
BEFORE_BLACKWELL = architectures_before(BLACKWELL)
"""Architectures with enough registers for the largest instances."""
STAGES = 4
"""Pipeline stages: work units whose input rows are in shared memory or in flight."""
STATIC_BYTES = 4096
REGISTERS, REGISTERS_OF_THREAD = 65536, 168
MAX_INDEX = 2**31 - 1
# Fitted to an H200, in clocks of an SM: of a warp's products of a pair of column tiles, and of one
# by FMA; of a byte of a column tile of windows; of a word that is copied; of a warp's results,
# stored in chunks or one by one; of a unit; and of a byte of weights for each warp.
PAIR_CLOCKS, EXACT_CLOCKS, LAID_CLOCKS, COPIED_CLOCKS = 44, 109, 0.07, 0.35
STORED_CLOCKS, APART_CLOCKS, UNIT_CLOCKS, WEIGHT_CLOCKS = 70, 186, 2050, 7.8
START_S, CLOCKS_PER_S, BYTES_S = 7e-6, 1.7e9, 1.7e12


WindowArgs = structure("conv/first_windows.cuh", "WindowArgs")
FirstForwardArgs = structure("conv/first_forward.cu", "FirstForwardArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition: warps of a block along channels, and the rows and positions of a work unit."""

    warp_channels: int
    unit_rows: int
    segment: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.warp_channels * self.unit_rows * (self.segment // CHANNELS)


NEEDS = Requirements(dilated=False)


class FirstForward(Solver[ConvWork, Cut]):
    """fwd with few channels of the input. With products in float32 also bwd_data with stride 1 and
    few channels of grad_output, as fwd with the taps in reverse order."""

    name = "first_forward"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        most = MOST_CHANNELS_EXACT if _is_exact(work) else MOST_CHANNELS
        if work.channels[0] > most:
            return f"{work.channels[0]} channels of the source are more than {most}"
        if work.direction == "bwd_data":
            if not _is_exact(work) or max(work.stride) > 1:
                return "a gradient with strides, or of products that tensor cores compute"
            work = _reversed(work)
        tiles = _column_tiles(work)
        if tiles > MOST_WARPS or work.kernel[1] * tiles > MOST_TILES:
            return f"{work.kernel[1]} rows of {tiles} tiles of columns"
        row = prod(work.input[1:]) * work.in_channels
        if max(work.pixels, row) * 16 > MAX_INDEX:
            return "positions are more than 32 bits count"
        # Even small tensors may have huge padding and strides.
        reason = why_not_32bit_positions(work)
        if reason is not None:
            return reason
        cut = _cut(work, device)
        return cut or "windows of a row and the weights do not fit into shared memory"

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        name, first_tap = self.name, 0
        if work.direction == "bwd_data":
            name += "_bwd_data"
            taps = zip(work.kernel, work.w.strides[3:], strict=True)
            first_tap = sum((extent - 1) * stride for extent, stride in taps)
            work = _reversed(work)
        x = prepare_rows(work, device)
        args = FirstForwardArgs()
        args.x_stride[:], args.y_stride[:] = x.operand.strides, work.y.strides
        args.w_stride[:] = work.w.strides
        args.w = first_tap * work.dtype.itemsize
        args.windows = _window_args(work, x.operand, cut)
        args.alpha, args.beta = work.alpha, work.beta
        args.activation, args.plain = ACTIVATIONS[work.activation], _plain(work)
        args.y_channels, args.warp_channels = work.out_channels, cut.warp_channels
        args.channel_blocks = ceil_div(work.out_channels, CHANNELS * cut.warp_channels)
        resident = min(
            device.fitting_blocks(cut.shared_bytes),
            REGISTERS // (cut.threads * REGISTERS_OF_THREAD),
        )
        blocks = max(1, device.multiprocessors * max(resident, 1) // args.channel_blocks)
        args.ranges = min(args.windows.units, blocks)
        extents = (work.batch, 1, work.out_channels, *work.output)
        args.wide_stores = work.out_channels % 8 == 0 and in_whole_chunks(work.y, extents, 2)
        launch = Launch(
            _instance(work.dtype, _register_weights(work, device), exact=_is_exact(work)),
            (args.channel_blocks * args.ranges, 1, 1),
            (cut.threads, 1, 1),
            pack(args, x=x.operand, w=work.w, y=work.y, accumulate=work.accumulate, bias=work.bias),
            cut.shared_bytes - STATIC_BYTES,
        )
        expected_s = _expected_s(work, cut, args, device)
        return Fragment(name, (*x.steps, launch), x.workspace, expected_s=expected_s)

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, pairs, exact=exact)
            for dtype in DTYPES
            for pairs in ((*REGISTER_WEIGHTS, None) if dtype.itemsize == 2 else (None,))
            for exact in ((False, True) if dtype is DType.FLOAT32 else (False,))
        ]


def _expected_s(work: ConvWork, cut: Cut, args: Any, device: CudaDevice) -> float:
    """Return the seconds that the launch should take; ``args`` are its parameters."""
    warps, item, units = cut.threads // 32, work.dtype.itemsize, args.windows.units
    rate = EXACT_CLOCKS if _is_exact(work) else PAIR_CLOCKS
    rows = work.stride[1] * cut.unit_rows
    # With several taps along D, steps do not reuse windows.
    busy: float = _pairs(work) * rate * warps
    busy += rows * cut.segment * _column_tiles(work) * LAID_CLOCKS * item
    busy += rows * args.windows.row_words * COPIED_CLOCKS
    busy *= work.kernel[0]
    busy += warps * (STORED_CLOCKS if args.wide_stores else APART_CLOCKS)
    alone: float = ceil_div(units, args.ranges) * (UNIT_CLOCKS * work.kernel[0] + busy)
    # Each block lays out weights first.
    alone += _weight_bytes(work, cut.warp_channels) / warps * WEIGHT_CLOCKS
    clocks: float = max(alone, units * args.channel_blocks / device.multiprocessors * busy)
    moved = work.elements * item / BYTES_S
    return START_S + max(clocks / CLOCKS_PER_S, moved)


def _is_exact(work: ConvWork) -> bool:
    """Return whether products are float32's own."""
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def _reversed(work: ConvWork) -> ConvWork:
    """Return bwd_data with stride 1 as fwd from grad_output. Its weight starts at the last tap."""
    conv = work.conv
    g, k, c, *taps = work.w.strides
    t, r, s = (-stride for stride in taps)
    return replace(
        work,
        direction="fwd",
        conv=replace(
            conv,
            in_channels=conv.out_channels,
            out_channels=conv.in_channels,
            input_size=conv.output_size,
            output_size=conv.input_size,
            padding=tuple(
                (extent - 1 - before, extent - 1 - after)
                for extent, (before, after) in zip(conv.kernel_size, conv.padding, strict=True)
            ),
        ),
        x=work.y,
        y=work.x,
        w=replace(work.w, strides=(g, c, k, t, r, s)),
    )


def _column_tiles(work: ConvWork) -> int:
    """Return the number of 8-column tiles (taps x channels) in a kernel row."""
    return ceil_div(work.kernel[2] * work.in_channels, 8)


def _window_args(work: ConvWork, x: Operand, cut: Cut) -> Any:
    """Return the kernel parameters that describe windows of ``x``, as `prepare_rows` returns it."""
    args = WindowArgs()
    sizes = (work.batch, 1, work.in_channels, *work.input)
    args.x_end = 1 + sum((size - 1) * stride for size, stride in zip(sizes, x.strides, strict=True))
    args.channels = work.in_channels
    args.x_size[:], args.y_size[:] = work.input, work.output
    fill(args, work, "kernel", "stride", "pad")
    args.column_tiles = _column_tiles(work)
    args.unit_rows, args.segment = cut.unit_rows, cut.segment
    args.segments = ceil_div(work.output[2], cut.segment)
    args.row_units = ceil_div(work.output[1], cut.unit_rows)
    args.units = work.batch * work.output[0] * args.row_units * args.segments
    args.row_words = _row_words(work, cut.segment)
    return args


def _window_bytes(work: ConvWork, unit_rows: int, segment: int) -> int:
    """Return the bytes of shared memory: the windows, the pipeline of input rows, static arrays."""
    size, stride = work.dtype.itemsize, work.stride[1]
    input_rows = stride * (unit_rows - 1) + work.kernel[1]
    windows = (input_rows + stride * unit_rows) * segment * (_column_tiles(work) | 1) * 8 * size
    return windows + STAGES * input_rows * _row_words(work, segment) * 4 + STATIC_BYTES


def _row_words(work: ConvWork, segment: int) -> int:
    """Return the 32-bit words that a work unit loads of a row of x, in whole chunks."""
    size = work.dtype.itemsize
    elements = (segment - 1) * work.stride[2] * work.in_channels + _column_tiles(work) * 8
    return ceil_div(elements * size + 2 * CHUNK_BYTES + 4, CHUNK_BYTES) * (CHUNK_BYTES // 4)


def _plain(work: ConvWork) -> bool:
    """Return whether the epilogue adds at most a bias."""
    return work.alpha == 1.0 and work.accumulate is None and work.activation == "none"


def _pairs(work: ConvWork) -> int:
    """Return the mma k-steps per tap along D: two column tiles each, or one in 32-bit types."""
    return ceil_div(work.kernel[1] * _column_tiles(work), 2 if work.dtype.itemsize == 2 else 1)


def _register_weights(work: ConvWork, device: CudaDevice) -> int | None:
    fitting = [
        pairs
        for pairs in REGISTER_WEIGHTS
        if pairs >= _pairs(work) and (pairs == REGISTER_WEIGHTS[0] or device.capability < BLACKWELL)
    ]
    if work.dtype.itemsize > 2 or work.kernel[0] > 1 or not fitting:
        return None
    return min(fitting)


def _weight_bytes(work: ConvWork, warp_channels: int) -> int:
    """Return the bytes of the weights in shared memory; rows are padded against bank conflicts."""
    columns = work.kernel[0] * _pairs(work)
    row = columns * 32 + 16 if work.dtype.itemsize == 4 else (columns * 2 | 1) * 16
    return warp_channels * CHANNELS * row


def _cut(work: ConvWork, device: CudaDevice) -> Cut | None:
    """Return the partition with the largest units that fits, or None."""
    for warp_channels in range(min(MOST_WARP_CHANNELS, ceil_div(work.out_channels, 32)), 0, -1):
        places = MOST_WARPS // warp_channels
        for parts in (2, 1):
            if parts > ceil_div(work.output[2], CHANNELS) or parts > places:
                continue
            segment = parts * CHANNELS
            for unit_rows in range(min(places // parts, work.output[1]), 0, -1):
                shared = _window_bytes(work, unit_rows, segment)
                shared += _weight_bytes(work, warp_channels)
                if shared <= device.shared_bytes_per_block:
                    return Cut(warp_channels, unit_rows, segment, shared)
    return None


def _instance(dtype: DType, pairs: int | None, *, exact: bool) -> Instance:
    return Instance.of(
        "conv/first_forward.cu",
        BEFORE_BLACKWELL if pairs == REGISTER_WEIGHTS[-1] else ARCHITECTURES,
        ELEMENT=dtype,
        RESIDENT=pairs is not None,
        PAIRS=pairs or 1,
        STAGES=STAGES,
        EXACT=exact,
    )
