"""Copies of two float32 tensors in float16, each channel scaled to fill its range."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.dense_axes import divider
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Clear, Instance, Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda_works import ConvWork, Operand, Size3, contiguous_strides

__all__ = ["copied_bytes", "copies", "copies_of", "instances", "peaks_bytes"]

BLOCK, MOST_LANES, EACH = 256, 64, 8
BLOCKS_PER_MULTIPROCESSOR = 3

# ScaledTensor of scaled_halves.cu.
TENSOR_FIELDS: tuple[tuple[str, Any], ...] = (
    *((name, ctypes.c_uint64) for name in ("from", "to", "peaks")),
    ("stride", ctypes.c_int64 * 4),
    ("by", ctypes.c_uint32 * 2 * 3),
    ("size", ctypes.c_int32 * 3),
    *(
        (name, ctypes.c_int32)
        for name in ("pixels", "readable", "padded", "peaks_at", "lanes", "rows")
    ),
    ("unused", ctypes.c_int32),
)


class ScaledHalvesArgs(ctypes.Structure):
    """See ``scaled_halves.cu``."""

    _fields_ = tuple((f"{name}_{field}", kind) for name in "xy" for field, kind in TENSOR_FIELDS)


def _padded(channels: int) -> int:
    return ceil_div(channels, 8) * 8


def copies(work: ConvWork) -> ConvWork:
    """The same work on the copies."""
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


def peaks_bytes(work: ConvWork) -> int:
    """Peaks and counts of the input's channels, then of grad_output's."""
    return 8 * (_padded(work.in_channels) + _padded(work.out_channels))


def copied_bytes(work: ConvWork) -> int:
    """Read twice, and written at half the width."""
    x = prod(work.input) * _padded(work.in_channels)
    return 10 * work.batch * (x + prod(work.output) * _padded(work.out_channels))


def copies_of(
    x: Operand, y: Operand, work: ConvWork, peaks: str, device: CudaDevice
) -> tuple[list[Step], list[Workspace]]:
    """What fills `copies` and ``peaks`` from operands whose channels lie side by side."""
    halves = copies(work)
    args = ScaledHalvesArgs()
    peaks_at, most_chunks, most_blocks = 0, 1, 1
    workspace = [Workspace(peaks, peaks_bytes(work))]
    for name, operand, half, channels, size in (
        ("x", x, halves.x, work.in_channels, work.input),
        ("y", y, halves.y, work.out_channels, work.output),
    ):
        padded = _padded(channels)
        lanes = min(MOST_LANES, padded // 4)
        values = {
            "pixels": work.batch * prod(size),
            "readable": ceil_div(channels, 4) * 4,
            "padded": padded,
            "peaks_at": peaks_at,
            "lanes": lanes,
            "rows": BLOCK // lanes,
        }
        for field, value in values.items():
            setattr(args, f"{name}_{field}", value)
        getattr(args, f"{name}_stride")[:] = operand.strides[0], *operand.strides[3:]
        getattr(args, f"{name}_size")[:] = size
        for dim in range(3):
            getattr(args, f"{name}_by")[dim][:] = divider(size[dim])
        chunks = ceil_div(padded // 4, lanes)
        wanted = ceil_div(BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors, chunks)
        blocks = min(ceil_div(values["pixels"], values["rows"] * EACH), wanted)
        most_chunks, most_blocks = max(most_chunks, chunks), max(most_blocks, blocks)
        peaks_at += 2 * padded
        workspace.append(Workspace(half.buffer, values["pixels"] * padded * 2))
    packed = pack(
        args,
        x_from=x,
        x_to=halves.x,
        x_peaks=peaks,
        y_from=y,
        y_to=halves.y,
        y_peaks=peaks,
    )
    grid = most_blocks, most_chunks, 2
    # What copies waits itself for the peaks.
    launches = [
        Launch(one, grid, (BLOCK, 1, 1), packed, overlaps=number > 0)
        for number, one in enumerate(instances())
    ]
    return [Clear(peaks, peaks_bytes(work)), *launches], workspace


def instances() -> Iterable[Instance]:
    """What finds the peaks, then what copies."""
    return [Instance.of("scaled_halves.cu", {"COPIES": copies}, HOPPER) for copies in (0, 1)]
