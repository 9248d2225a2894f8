"""fprop of a first layer (few input channels) by mma.sync (first_forward.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.first_windows import (
    BEFORE_BLACKWELL,
    BLACKWELL,
    MOST_WARPS,
    STAGES,
    STATIC_BYTES,
    blocks_per_sm,
    column_tiles,
    prepare_rows,
    why_not_first,
    window_args,
    window_bytes,
)
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, CUDA_TYPES
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FirstForward"]

CHANNELS = 32
"""Output channels, and output positions, of a warp tile."""
MOST_WARP_CHANNELS = 4
MOST_TILES = 256
# By instance, the pairs of column tiles whose weights a warp keeps in registers.
REGISTER_WEIGHTS = (4, 11)
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


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


class FirstForward:
    """fwd with at most ``MOST_CHANNELS`` channels of the input."""

    name = "first_forward"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_first(work, device)
        if reason is None and work.kernel[1] * column_tiles(work) > MOST_TILES:
            return f"{work.kernel[1]} rows of {column_tiles(work)} tiles of columns"
        if reason is None and _cut(work, device) is None:
            return "windows of a row and the weights do not fit into shared memory"
        return reason

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        cut = _cut(work, device)
        if cut is None:
            raise ValueError("windows of a row and the weights do not fit into shared memory")
        x = prepare_rows(work, device)
        args = FirstForwardArgs()
        args.x_stride[:], args.y_stride[:] = x.operand.strides, work.y.strides
        args.w_stride[:] = work.w.strides
        args.windows = window_args(work, x.operand, work.kernel[1], cut.unit_rows, cut.segment)
        args.alpha, args.beta = work.alpha, work.beta
        args.activation, args.plain = ACTIVATIONS[work.activation], _plain(work)
        args.y_channels, args.warp_channels = work.out_channels, cut.warp_channels
        args.channel_blocks = ceil_div(work.out_channels, CHANNELS * cut.warp_channels)
        resident = blocks_per_sm(device, cut.threads, cut.shared_bytes)
        blocks = max(1, device.multiprocessors * resident // args.channel_blocks)
        args.ranges = min(args.windows.units, blocks)
        extents = (work.batch, 1, work.out_channels, *work.output)
        args.wide_stores = work.out_channels % 8 == 0 and in_whole_chunks(work.y, extents, 2)
        launch = Launch(
            _instance(work.dtype, _register_weights(work, device)),
            (args.channel_blocks * args.ranges, 1, 1),
            (cut.threads, 1, 1),
            pack(
                args,
                x=x.operand,
                w=work.w,
                y=work.y,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            cut.shared_bytes - STATIC_BYTES,
        )
        return Fragment(self.name, (*x.steps, launch), x.workspace)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            _instance(dtype, pairs)
            for dtype in DTYPES
            for pairs in ((*REGISTER_WEIGHTS, None) if dtype.itemsize == 2 else (None,))
        ]


def _plain(work: ConvWork) -> bool:
    """Return whether the epilogue adds at most a bias."""
    return work.alpha == 1.0 and work.accumulate is None and work.activation == "none"


def _pairs(work: ConvWork) -> int:
    """Return the mma k-steps per tap along D: two column tiles each, or one in 32-bit types."""
    return ceil_div(work.kernel[1] * column_tiles(work), 2 if work.dtype.itemsize == 2 else 1)


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
    rows = work.kernel[1]
    for warp_channels in range(min(MOST_WARP_CHANNELS, ceil_div(work.out_channels, 32)), 0, -1):
        places = MOST_WARPS // warp_channels
        for parts in (2, 1):
            if parts > ceil_div(work.output[2], CHANNELS) or parts > places:
                continue
            segment = parts * CHANNELS
            for unit_rows in range(min(places // parts, work.output[1]), 0, -1):
                shared = window_bytes(work, rows, unit_rows, segment)
                shared += _weight_bytes(work, warp_channels)
                if shared <= device.shared_bytes_per_block:
                    return Cut(warp_channels, unit_rows, segment, shared)
    return None


def _instance(dtype: DType, pairs: int | None) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "RESIDENT": int(pairs is not None),
        "PAIRS": pairs or 1,
        "STAGES": STAGES,
    }
    return Instance.of(
        "conv/first_forward.cu",
        defines,
        BEFORE_BLACKWELL if pairs == REGISTER_WEIGHTS[-1] else ARCHITECTURES,
    )
