"""Merging of groups with few channels into whole 16-byte chunks of channels."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES, Requirements
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["DTYPES", "Merge", "is_exact", "meets_own", "merge_of", "odd_chunks", "slices_of"]
__all__ += ["why_not_grouped", "why_not_packed", "widest"]

MAX_CHANNELS, WIDE_CHANNELS = 64, 128
"""The most channels of a merge on either side."""
LEAST_BYTES = 64
DENSE_CHANNELS = 56
MAX_TAPS = 512
MAX_STRIDE_BYTES = 2**31 - 1
PACKED = 16
MAX_EXTENT = 2**24


@dataclass(frozen=True, slots=True)
class Merge:
    """``groups`` adjacent groups treated as one, with chunks of ``chunk`` channels."""

    groups: int
    chunk: int
    in_channels: int
    out_channels: int
    count: int

    @property
    def in_chunks(self) -> int:
        return self.in_channels // self.chunk

    @property
    def out_chunks(self) -> int:
        return self.out_channels // self.chunk


def merge_of(work: ConvWork) -> Merge:
    """Return the merge of the fewest groups whose channels are whole chunks on both sides."""
    chunk = CHUNK_BYTES // work.dtype.itemsize
    groups = chunk // gcd(chunk, work.in_channels, work.out_channels)
    if meets_own(work):
        groups = 2
    return Merge(
        groups,
        chunk,
        groups * work.in_channels,
        groups * work.out_channels,
        ceil_div(work.groups, groups),
    )


def is_exact(work: ConvWork) -> bool:
    """Return whether products are computed in exact float32."""
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def meets_own(work: ConvWork) -> bool:
    """Return whether, in exact float32, two groups of four channels share a chunk of sums.

    Each lane then has the sums of one group, and multiplies only the channels of that group.
    """
    if not is_exact(work) or work.direction == "bwd_weight":
        return False
    read, written = work.channels
    together = work.x.strides[1] == work.in_channels and work.y.strides[1] == work.out_channels
    return written == 4 and read % 4 == 0 and read <= 32 and work.groups % 2 == 0 and together


def widest(columns: int) -> int:
    """Return the number of 8-channel columns, at most four, that a warp computes at once.

    Each pass reads the other operand again, which costs about as much as 1.5 unused columns.
    """
    return min((4, 3, 2, 1), key=lambda width: ceil_div(columns, width) * (width + 1.5))


def slices_of(merge: Merge, together: bool) -> list[int]:
    """Return candidate numbers of merges per block, which are contiguous if ``together``.

    They span at least two 32-byte sectors per pixel, which are as fast as whole cache lines.
    """
    if not together:
        return [1]
    chunks = min(merge.in_chunks, merge.out_chunks)
    few = [n for n in (1, 2, 4, 8, 16) if n < 2 * merge.count]
    return [n for n in few if n * chunks * CHUNK_BYTES >= LEAST_BYTES] or few[-1:]


def odd_chunks(chunks: int) -> int:
    """Return the bytes of a row of chunks, padded to an odd number to avoid bank conflicts."""
    return (chunks | 1) * CHUNK_BYTES


def why_not_grouped(work: ConvWork, device: CudaDevice, *, wide: bool = False) -> str | None:
    """Return why neither grouped tensor-core kernel applies; None if one may.

    With ``wide``, dense kernels are not preferred for groups that fill their tiles.

    Except for sizes that overflow, this depends on channels, kernel, stride and dilation only, so
    that every part of a split problem gets the same kernel.
    """
    if (reason := Requirements(grouped=True).why_not(work, device)) is not None:
        return reason
    merge = merge_of(work)
    most = WIDE_CHANNELS if wide else MAX_CHANNELS
    if max(merge.in_channels, merge.out_channels) > most:
        return (
            f"{work.in_channels} and {work.out_channels} channels per group, {merge.groups} groups "
            f"merged, are more than {most}"
        )
    least = min(work.in_channels, work.out_channels)
    if not wide and not is_exact(work) and least >= DENSE_CHANNELS:
        return f"{DENSE_CHANNELS} and more channels per group fill the dense kernels' tiles"
    if work.taps > MAX_TAPS:
        return f"{work.taps} taps are more than {MAX_TAPS}"
    for side, operand, channels in (
        ("input", work.x, work.in_channels),
        ("output", work.y, work.out_channels),
    ):
        reason = _why_not_chunks(operand, channels, work, merge)
        if reason is not None:
            return f"the {side}'s {reason}"
    if max(*work.input, *work.output, work.batch) > MAX_EXTENT:
        return f"an extent is more than {MAX_EXTENT}"
    return None


def why_not_packed(work: ConvWork) -> str | None:
    """Return why groups may not be merged by zero-padding their weights, or None.

    Channels of other groups are multiplied by zeros, so a NaN spreads to all groups of its merge.
    It may only reach groups that share an aligned block of 16 channels with its own. Two groups of
    fewer channels always share one, as no multiple of 16 is between them.
    """
    merge = merge_of(work)
    if merge.groups == 1 or meets_own(work):
        return None
    for channels in (work.in_channels, work.out_channels):
        if channels < PACKED and (merge.groups == 2 or PACKED % (merge.groups * channels) == 0):
            return None
    return (
        f"{merge.groups} groups of {work.in_channels} and {work.out_channels} channels merged are "
        f"not within an aligned block of {PACKED} channels, within which a NaN may spread"
    )


def _why_not_chunks(operand: Operand, channels: int, work: ConvWork, merge: Merge) -> str | None:
    """Return why channels are not contiguous whole chunks; None if they are."""
    if operand.strides[2] != 1 and channels > 1:
        return "channels are not contiguous"
    if merge.groups > 1 and operand.strides[1] != channels:
        return "groups are not contiguous"
    if merge.groups > 1 and work.groups * channels % merge.chunk:
        return f"{work.groups * channels} channels are not a multiple of {merge.chunk}"
    if any(operand.strides[axis] % merge.chunk for axis in (0, 3, 4, 5)) or (
        merge.groups == 1 and operand.strides[1] % merge.chunk
    ):
        return "pixels do not start at multiples of 16 bytes"
    if max(operand.strides[3:]) * operand.dtype.itemsize > MAX_STRIDE_BYTES:
        return f"planes are more than {MAX_STRIDE_BYTES} bytes apart"
    return None
