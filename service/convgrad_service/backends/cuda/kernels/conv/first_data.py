"""dgrad of a first layer (few input channels, any kernel width) by mma.sync (first_data.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.first_windows import (
    MOST_WARPS,
    STAGES,
    blocks_per_sm,
    column_tiles,
    fill_dgrad,
    why_not_first,
)
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    prepare_side,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FirstData"]

STEP_BYTES = 32
# The most accumulators in a row: 16-bit offsets address them.
MAX_ACCUMULATORS = 2**16
MAX_OFFSET = 2**31 - 1
# The most kernel rows of an instance, and the k-step counts for which a warp keeps the weights in
# registers.
REGISTER_WEIGHTS = {1: (), 3: (2, 4, 8), 5: (4,), 7: (2, 4)}
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
# Cost model: m16n8 mma instructions per SM per clock, and the fixed clocks per block and row of y.
PRODUCTS_PER_CLOCK, ROW_CLOCKS = 0.7, 500


FirstDataArgs = structure("conv/first_data.cu", "FirstDataArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition of x among thread blocks.

    Attributes
    ----------
    warp_rows
        Warps of a block along W; each takes 32 positions of y.
    segment, segments
        Positions of x along W per block, and the number of such segments.
    segment_rows, row_segments
        Rows of y that a block completes, and the number of such segments along H.
    """

    warp_rows: int
    segment: int
    segments: int
    segment_rows: int
    row_segments: int


class FirstData:
    """bwd_data with at most ``MOST_CHANNELS`` channels of the input."""

    name = "first_data"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Splitting along N, D or H does not change the answer."""
        reason = why_not_first(work, device)
        if reason is not None:
            return reason
        if work.kernel[0] == work.kernel[1] == 1:
            return "a kernel of one row, which leaves nothing to walk over"
        if work.kernel[1] > max(REGISTER_WEIGHTS):
            return f"{work.kernel[1]} rows of a kernel are more than {max(REGISTER_WEIGHTS)}"
        row = sum(
            extent * stride
            for extent, stride in (
                (work.input[2], work.x.strides[5]),
                (work.in_channels, work.x.strides[2]),
            )
        )
        if row > MAX_OFFSET:
            return f"a row of the input reaches over {row} elements"
        if not _cuts(work, device):
            return "a row does not fit into shared memory"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`. ``cut`` overrides the chosen partition."""
        y = prepare_side(work, "source", device)
        rows, depth = _rows(work), _register_weights(work)
        if cut is None:
            cut = min(_cuts(work, device), key=lambda cut: _expected_clocks(work, cut, device))
        args = FirstDataArgs()
        fill_dgrad(args, work, y.operand, cut)
        args.plain = work.epilogue_free
        args.column_tiles, args.steps = column_tiles(work), _steps(work)
        args.positions = cut.warp_rows * 32
        args.segments, args.segment = cut.segments, cut.segment
        args.channels_last = work.x.channels_last
        launch = Launch(
            _instance(work.dtype, rows, depth),
            (_blocks(work, cut), 1, 1),
            (32 * args.column_tiles * cut.warp_rows, 1, 1),
            pack(
                args,
                y=y.operand,
                w=work.w,
                x=work.x,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            _shared_bytes(work, cut.warp_rows, cut.segment),
        )
        return Fragment(self.name, (*y.steps, launch), y.workspace)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, rows, depth)
            for rows, depths in REGISTER_WEIGHTS.items()
            for dtype in DTYPES
            for depth in ((*depths, None) if dtype.itemsize == 2 else (None,))
        ]


def _rows(work: ConvWork) -> int:
    return min(rows for rows in REGISTER_WEIGHTS if rows >= work.kernel[1])


def _register_weights(work: ConvWork) -> int | None:
    """Return the number of k-steps whose weights stay in registers, or None if they do not."""
    needed = ceil_div(work.out_channels * work.dtype.itemsize, STEP_BYTES)
    fitting = [depth for depth in REGISTER_WEIGHTS[_rows(work)] if depth >= needed]
    if work.dtype.itemsize > 2 or work.kernel[0] > 1 or not fitting:
        return None
    return min(fitting)


def _steps(work: ConvWork) -> int:
    return _register_weights(work) or ceil_div(work.out_channels * work.dtype.itemsize, STEP_BYTES)


def _shared_bytes(work: ConvWork, warp_rows: int, segment: int) -> int:
    """Return the bytes of shared memory: the pipeline, the weights, two sets of finished rows and a
    table entry per element of a row of x."""
    tiles, steps, positions = column_tiles(work), _steps(work), warp_rows * 32
    ring = STAGES * positions * (2 * steps + 1) * CHUNK_BYTES
    weights = steps * STEP_BYTES * ((work.kernel[0] * _rows(work) * tiles) | 1) * 8
    finished = 2 * work.stride[1] * positions * (tiles | 1) * 8 * 4
    return ring + weights + finished + segment * work.in_channels * 8


def _cuts(work: ConvWork, device: CudaDevice) -> list[Cut]:
    """Return every partition that fits into shared memory and the grid."""
    tiles, stride, pad = column_tiles(work), work.stride, work.pad
    rows = (work.input[1] - 1 + pad[1]) // stride[1] - pad[1] // stride[1] + 1
    found = []
    for warp_rows in range(1, MOST_WARPS // tiles + 1):
        positions = 32 * warp_rows
        # The most positions of x to which only this many positions of y contribute.
        longest = positions * stride[2] - work.kernel[2] + 1
        if work.output[2] <= positions:
            longest = work.input[2]
        if longest < 1 or positions * (tiles | 1) * 8 > MAX_ACCUMULATORS:
            continue
        segments = ceil_div(work.input[2], longest)
        segment = ceil_div(work.input[2], segments)
        if _shared_bytes(work, warp_rows, segment) > device.shared_bytes_per_block:
            continue
        for parts in range(1, min(rows, 64) + 1):
            segment_rows = ceil_div(rows, parts)
            cut = Cut(warp_rows, segment, segments, segment_rows, ceil_div(rows, segment_rows))
            if _blocks(work, cut) <= MAX_BLOCKS:
                found.append(cut)
    return found


def _blocks(work: ConvWork, cut: Cut) -> int:
    return work.batch * work.input[0] * cut.row_segments * cut.segments


def _expected_clocks(work: ConvWork, cut: Cut, device: CudaDevice) -> float:
    """Return the expected clocks over all waves of blocks."""
    tiles, blocks = column_tiles(work), _blocks(work, cut)
    threads = 32 * tiles * cut.warp_rows
    shared = _shared_bytes(work, cut.warp_rows, cut.segment)
    filled = ceil_div(blocks, device.multiprocessors)
    resident = min(filled, blocks_per_sm(device, threads, shared))
    taps = ceil_div(work.kernel[0], work.stride[0])
    products = cut.warp_rows * 2 * tiles * _rows(work) * _steps(work) * taps
    row = max(resident * products / PRODUCTS_PER_CLOCK, products / PRODUCTS_PER_CLOCK + ROW_CLOCKS)
    # Each segment also reads the rows before its first, and fills the pipeline.
    rows_read = cut.segment_rows + (work.kernel[1] - 1) // work.stride[1] + 3
    return ceil_div(blocks, device.multiprocessors * resident) * rows_read * row


def _instance(dtype: DType, rows: int, depth: int | None) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "ROWS": rows,
        "RESIDENT": int(depth is not None),
        "DEPTH": depth or 1,
        "STAGES": STAGES,
    }
    return Instance.of("conv/first_data.cu", defines)
