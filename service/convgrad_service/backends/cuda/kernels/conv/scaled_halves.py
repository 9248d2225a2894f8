"""float16 copies of two float32 tensors, with each channel scaled to the range of float16."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, Size3, contiguous_strides

__all__ = ["copied_bytes", "copies", "copies_of", "instances", "ranges_bytes"]

BLOCK, MOST_LANES, EACH, SAMPLED = 256, 32, 8, 4
# Few enough that some blocks of the next pass are resident, and already waiting, when one ends.
BLOCKS_PER_MULTIPROCESSOR = 2
# Per channel: a ChannelRange of scaled_halves.cuh, and an Unscaling. All ranges come first.
RANGE_BYTES = 16 + 16

# ScaledTensor of scaled_halves.cu.
TENSOR_FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_uint64) for name in ("from", "to", "ranges")),
    ("stride", ctypes.c_int64 * 4),
    ("by", ctypes.c_uint32 * 2 * 3),
    ("size", ctypes.c_int32 * 3),
    *(
        (name, ctypes.c_int32)
        for name in (
            "in_order",
            "pixels",
            "readable",
            "padded",
            "ranges_at",
            "all_ranges",
            "lanes",
            "rows",
            "chunks",
            "blocks",
            "sample_step",
        )
    ),
)


class ScaledHalvesArgs(ctypes.Structure):
    """See ``scaled_halves.cu``."""

    _fields_ = tuple((f"{name}_{field}", kind) for name in "xy" for field, kind in TENSOR_FIELDS)


def _padded(channels: int) -> int:
    return ceil_div(channels, 8) * 8


def copies(work: ConvWork) -> ConvWork:
    """Return the work on the float16 copies."""
    x, y = (
        _copy(operand, f"{work.prefix}{name}_halves", work.batch, channels, size)
        for operand, name, channels, size in (
            (work.x, "input", work.in_channels, work.input),
            (work.y, "grad_output", work.out_channels, work.output),
        )
    )
    return replace(work, dtype=DType.FLOAT16, x=x, y=y)


def _copy(operand: Operand, name: str, batch: int, channels: int, size: Size3) -> Operand:
    n, d, h, w, c = contiguous_strides((batch, *size, _padded(channels)))
    return replace(operand, buffer=name, dtype=DType.FLOAT16, strides=(n, 0, c, d, h, w))


def ranges_bytes(work: ConvWork) -> int:
    """Return the bytes of the ranges of the input's channels, then of grad_output's."""
    return RANGE_BYTES * (_padded(work.in_channels) + _padded(work.out_channels))


def copied_bytes(work: ConvWork) -> int:
    """Return the bytes moved: each tensor is read in float32 and written in float16."""
    x = prod(work.input) * _padded(work.in_channels)
    return 6 * work.batch * (x + prod(work.output) * _padded(work.out_channels))


def copies_of(
    x: Operand, y: Operand, work: ConvWork, ranges: str, device: CudaDevice
) -> tuple[list[Step], list[Workspace]]:
    """Return the launches that fill `copies` and ``ranges`` from channels-last operands, and their
    workspace."""
    halves = copies(work)
    workspace = [Workspace(ranges, ranges_bytes(work))]
    for half, channels, size in (
        (halves.x, work.in_channels, work.input),
        (halves.y, work.out_channels, work.output),
    ):
        workspace.append(Workspace(half.buffer, work.batch * prod(size) * _padded(channels) * 2))
    args, blocks = _arguments(x, y, work, BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors)
    packed = pack(
        args,
        x_from=x,
        x_to=halves.x,
        x_ranges=ranges,
        y_from=y,
        y_to=halves.y,
        y_ranges=ranges,
    )
    clears, copying, again = instances()
    clearing = ceil_div(ranges_bytes(work) // RANGE_BYTES, BLOCK)
    # Each kernel waits for the previous one itself (griddepcontrol.wait).
    steps: list[Step] = [
        Launch(clears, (clearing, 1, 1), (BLOCK, 1, 1), packed),
        Launch(copying, (blocks, 1, 1), (BLOCK, 1, 1), packed, overlaps=True),
        Launch(again, (blocks, 1, 1), (BLOCK, 1, 1), packed, overlaps=True),
    ]
    return steps, workspace


def _arguments(
    x: Operand, y: Operand, work: ConvWork, most_blocks: int
) -> tuple[ScaledHalvesArgs, int]:
    """Return the kernel parameters and the number of blocks, about ``most_blocks``."""
    args = ScaledHalvesArgs()
    operands = (
        ("x", x, work.in_channels, work.input),
        ("y", y, work.out_channels, work.output),
    )
    sizes = [prod(size) * _padded(channels) for *_, channels, size in operands]
    ranges_at, blocks = 0, 0
    for (name, operand, channels, size), elements in zip(operands, sizes, strict=True):
        padded = _padded(channels)
        lanes = min(MOST_LANES, padded // 4)
        rows, chunks = BLOCK // lanes, ceil_div(padded // 4, lanes)
        pixels = work.batch * prod(size)
        # Blocks in proportion to the elements to copy.
        wanted = max(1, round(most_blocks * elements / sum(sizes)) // chunks)
        strides = operand.strides[0], *operand.strides[3:]
        values = {
            "in_order": _in_order(strides, (work.batch, *size)),
            "pixels": pixels,
            "readable": ceil_div(channels, 4) * 4,
            "padded": padded,
            "ranges_at": ranges_at,
            "all_ranges": ranges_bytes(work) // RANGE_BYTES,
            "lanes": lanes,
            "rows": rows,
            "chunks": chunks,
            "blocks": min(ceil_div(pixels, rows * EACH), wanted) * chunks,
            # Odd, so that samples do not always fall on the same positions of a row.
            "sample_step": max(pixels // (rows * SAMPLED) - 1, 0) | 1,
        }
        for field, value in values.items():
            setattr(args, f"{name}_{field}", value)
        getattr(args, f"{name}_stride")[:] = strides
        getattr(args, f"{name}_size")[:] = size
        for dim in range(3):
            getattr(args, f"{name}_by")[dim][:] = divider(size[dim])
        blocks += values["blocks"]
        ranges_at += padded
    return args, blocks


def _in_order(strides: tuple[int, ...], extents: tuple[int, ...]) -> bool:
    """Return whether one stride, that of W, separates all pixels."""
    step = strides[3]
    for stride, extent in zip(reversed(strides), reversed(extents), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


def instances() -> Iterable[Instance]:
    """Return the passes: clear the ranges, copy, and recopy channels that were scaled wrongly."""
    return [Instance.of("conv/scaled_halves.cu", {"PASS": number}, HOPPER) for number in range(3)]
