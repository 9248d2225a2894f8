"""What the fused kernels' host sides share: shapes of blocks, and what they ask of operands."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.layout.channels_last import in_whole_chunks
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, Size3

__all__ = [
    "CHUNK",
    "DTYPES",
    "MAX_PIXELS",
    "OTHERS",
    "ROW_BYTES",
    "Divider",
    "FusedShape",
    "flat_pixels",
    "is_pointwise",
    "lies_well",
    "wide_stores",
]

CHUNK = 64
"""Channels of a step, and their bytes."""
ROW_BYTES = 128
# A tile may count past the last pixel.
MAX_PIXELS = 2**31 - 1024
DTYPES = (DType.FLOAT16, DType.BFLOAT16)

OTHERS = tuple(one for one in ARCHITECTURES if one not in HOPPER)
"""The architectures whose products are those of mma.sync."""


@dataclass(frozen=True, slots=True)
class FusedShape:
    """Of a block: groups of four warps, 64-channel parts of each group, pixels of a tile; blocks
    that share a multiprocessor's registers; whether for a single chunk and pass alone;
    whether as many threads again compute while these multiply (Hopper)."""

    groups: int
    parts: int
    pixels: int
    blocks: int
    single: bool = False
    roles: bool = False

    @property
    def outputs(self) -> int:
        return self.groups * self.parts * 64

    @property
    def threads(self) -> int:
        return self.groups * 128 * (2 if self.roles else 1)

    @property
    def registers(self) -> tuple[tuple[str, str], ...]:
        """Of a thread of either role: what the sums and their addresses take, and what is left."""
        share = 65536 // (self.blocks * self.threads)
        sums = self.parts * self.pixels // 2
        multipliers = max((sums + 39) // 8 * 8, share)
        return ("MULTIPLIERS", str(multipliers)), ("COMPUTERS", str(2 * share - multipliers))

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """What the CUDA sources expect."""
        return (
            ("GROUPS", str(self.groups)),
            ("PARTS", str(self.parts)),
            ("PIXELS", str(self.pixels)),
            ("BLOCKS", str(self.blocks)),
        )


class Divider(ctypes.Structure):
    """See ``core/divider.cuh``."""

    _fields_ = (("factor", ctypes.c_uint32), ("shift", ctypes.c_int32))

    @classmethod
    def of(cls, by: int) -> Divider:
        """With 2**l >= by, factor = ceil(2**(31 + l) / by) errs by less than 2**l / 2**(31 + l) of
        what is divided."""
        if by == 1:
            return cls(0, 0)
        log = (by - 1).bit_length()
        return cls(ceil_div(2 ** (31 + log), by), log - 1)


def is_pointwise(work: ConvWork) -> bool:
    """Whether each output pixel comes from the input's own, in one group."""
    return (
        work.groups == 1
        and work.taps == 1
        and work.stride == (1, 1, 1)
        and not any(work.pad)
        and work.input == work.output
    )


def lies_well(first: ConvWork, second: ConvWork) -> bool:
    """Whether channels lie side by side, the read ones in whole chunks, the taps of one channel
    too."""
    x_extents = (first.batch, first.groups, 1, *first.input)
    w1_extents = (1, second.out_channels, second.in_channels, 1, 1, 1)
    taps = (prod(first.kernel), 0, 0, first.kernel[1] * first.kernel[2], first.kernel[2], 1)
    extents = (first.groups, 1, 1, *first.kernel)
    return (
        in_whole_chunks(first.x, x_extents, 1)
        and in_whole_chunks(second.w, w1_extents, 2)
        and second.y.strides[2] == 1
        and all(
            given == wanted
            for given, wanted, extent in zip(first.w.strides, taps, extents, strict=True)
            if extent > 1
        )
    )


def flat_pixels(operand: Operand, batch: int, size: Size3) -> bool:
    """Whether an activation's pixels are the same distance apart, all through the batch."""
    expected = operand.strides[5]
    for axis, extent in ((5, size[2]), (4, size[1]), (3, size[0]), (0, batch)):
        if extent > 1 and operand.strides[axis] != expected:
            return False
        expected *= extent
    return True


def wide_stores(second: ConvWork, shape: FusedShape) -> bool:
    """Whether the neighbouring outputs that a thread ends with can be stored as one."""
    neighbours = 2 * shape.parts
    strides = (second.y.strides[0], *second.y.strides[3:])
    extents = (second.batch, *second.output)
    return second.out_channels % neighbours == 0 and all(
        stride % neighbours == 0
        for stride, extent in zip(strides, extents, strict=True)
        if extent > 1
    )
