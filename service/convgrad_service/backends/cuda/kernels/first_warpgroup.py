"""The gradient of a first layer's input on Hopper: groups of positions, all kernel rows at once."""

from __future__ import annotations

from collections.abc import Iterable

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.channels_last import prepare_activation
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.first_groups import (
    Cut,
    FirstGroupsArgs,
    groups_args,
    why_not_groups,
)
from convgrad_service.backends.cuda.kernels.first_windows import STAGES
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["FirstWarpgroup"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
ROWS, COLUMNS, CHANNELS = 8, 8, 64
"""Of a kernel; of a group; of grad_output."""
MOST_STRIDE = 2
# With fewer kernel rows, or so few channels, smaller products are faster (measured on an H200).
LEAST_ROWS, LEAST_CHANNELS = 5, 32
GROUPS = 64
"""Of a warpgroup."""
MOST_WARPGROUPS = 2
# Of instances: steps along W. Steps of 16 channels.
TAPS, STEPS = (2, 3, 4), CHANNELS // 16
ROW_BYTES, ALIGNMENT = 128, 1024
# What the cuts are weighed with, clocks fitted to an H200: of a product; that a row of y takes of a
# multiprocessor besides; that a block alone waits in it; that a block takes to start.
PRODUCT_CLOCKS, ROW_CLOCKS, WAIT_CLOCKS, START_CLOCKS = 55, 200, 365, 26000


class FirstWarpgroup:
    """bwd_data of first layers in 16 bits, with large kernels and up to ``CHANNELS`` channels."""

    name = "first_warpgroup"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Judged by what a cut along N, D or H does not change."""
        if device.architecture not in HOPPER:
            return f"{device.name} has no products of warpgroups"
        reason = why_not_groups(work, device)
        if reason is not None:
            return reason
        if work.kernel[1] > ROWS or work.stride[1] > MOST_STRIDE:
            return f"{work.kernel[1]} kernel rows, a stride of {work.stride[1]}"
        if work.kernel[1] < LEAST_ROWS or work.out_channels <= LEAST_CHANNELS:
            return "a product's columns or depth would be mostly empty"
        if work.out_channels > CHANNELS or work.stride[2] * work.in_channels > COLUMNS:
            return f"{work.out_channels} channels, {work.stride[2]} x {work.in_channels} columns"
        if _taps(work)[1] > max(TAPS):
            return f"{_taps(work)[1]} steps along W"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`; ``cut`` where another than the chosen one is tried."""
        y = prepare_activation(
            work.y,
            work.batch,
            1,
            work.out_channels,
            work.output,
            f"{work.prefix}source_channels_last",
            device,
        )
        if cut is None:
            cut = _cut(work, device)
        args = FirstGroupsArgs()
        groups_args(args, work, y.operand, work.stride[2], cut)
        args.hop = 1
        args.first_tap, args.taps = _taps(work)
        args.positions = cut.warp_groups * GROUPS + args.taps - 1
        args.segments = _segments(work, cut.warp_groups)
        launch = Launch(
            _instance(work.dtype, args.taps),
            (_blocks(work, cut), 1, 1),
            (128 * cut.warp_groups, 1, 1),
            pack(
                args,
                y=y.operand,
                w=work.w,
                x=work.x,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            _shared_bytes(work, cut.warp_groups),
        )
        return Fragment(self.name, (*y.steps, launch), y.workspace)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype, taps) for dtype in DTYPES for taps in TAPS]


def _taps(work: ConvWork) -> tuple[int, int]:
    """The first step along W at which a group meets y, and an instance's number of them, or a
    larger one where that many are too few."""
    stride, pad = work.stride[2], work.pad[2]
    first = ceil_div(pad - work.kernel[2] + 1, stride)
    needed = (stride - 1 + pad) // stride - first + 1
    return first, min((taps for taps in TAPS if taps >= needed), default=needed)


def _segments(work: ConvWork, warpgroups: int) -> int:
    return ceil_div(work.input[2], work.stride[2] * warpgroups * GROUPS)


def _blocks(work: ConvWork, cut: Cut) -> int:
    return work.batch * work.input[0] * cut.row_segments * _segments(work, cut.warp_groups)


def _shared_bytes(work: ConvWork, warpgroups: int) -> int:
    """What aligns it, the ring, and the weights of each step."""
    taps = _taps(work)[1]
    stage = ceil_div((warpgroups * GROUPS + taps - 1) * ROW_BYTES, ALIGNMENT) * ALIGNMENT
    return ALIGNMENT + STAGES * stage + taps * ROWS * COLUMNS * ROW_BYTES


def _cut(work: ConvWork, device: CudaDevice) -> Cut:
    """The one that should take the least time."""
    stride, pad = work.stride[1], work.pad[1]
    rows = (work.input[1] - 1 + pad) // stride - pad // stride + 1
    products = _taps(work)[1] * STEPS * PRODUCT_CLOCKS
    best: tuple[float, Cut] | None = None
    for warpgroups in range(1, MOST_WARPGROUPS + 1):
        shared = _shared_bytes(work, warpgroups)
        if shared > device.shared_bytes_per_block:
            continue
        together = max(1, device.shared_bytes_per_multiprocessor // (shared + 1024))
        for parts in range(1, min(rows, 64) + 1):
            segment_rows = ceil_div(rows, parts)
            cut = Cut(warpgroups, segment_rows, ceil_div(rows, segment_rows))
            blocks = _blocks(work, cut)
            if blocks > MAX_BLOCKS:
                continue
            filled = min(together, ceil_div(blocks, device.multiprocessors))
            alone = warpgroups * products
            row = max(filled * (alone + ROW_CLOCKS), alone + WAIT_CLOCKS)
            # With rows that only lead to the first of a segment.
            walked = segment_rows + (work.kernel[1] - 1) // stride
            waves = ceil_div(blocks, device.multiprocessors * filled)
            clocks = waves * (walked * row + START_CLOCKS)
            if best is None or clocks < best[0]:
                best = clocks, cut
    if best is None:
        raise ValueError("no cut fits")
    return best[1]


def _instance(dtype: DType, taps: int) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "TAPS": taps,
        "STEPS": STEPS,
        "STAGES": STAGES,
    }
    return Instance.of(
        "first_warpgroup.cu",
        defines,
        HOPPER,
    )
