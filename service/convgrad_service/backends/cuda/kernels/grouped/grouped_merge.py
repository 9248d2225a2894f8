"""Merging of groups with few channels, so that they take whole 16-byte chunks of shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.limits import DTYPES, Requirements
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["DTYPES", "Merge", "is_exact", "merge_of", "odd_chunks", "piece_of", "slices_of"]
__all__ += ["why_not_grouped", "widest"]

MAX_CHANNELS, WIDE_CHANNELS = 64, 128
"""The most channels of a merge on either side; the latter in weight gradients of 16-bit types."""
LEAST_BYTES = 64
MAX_TAPS = 512
MAX_STRIDE_BYTES = 2**31 - 1
PACKED = 16
MAX_EXTENT = 2**24


@dataclass(frozen=True, slots=True)
class Merge:
    """``groups`` adjacent groups treated as one, with chunks of ``chunk`` channels.

    With ``padded``, zeros fill up its last chunk in shared memory. With ``own``, sums of two groups
    share a chunk, but products do not: see `_shares_sums`.
    """

    groups: int
    chunk: int
    in_chunks: int
    out_chunks: int
    count: int
    padded: bool = False
    own: bool = False

    @property
    def in_channels(self) -> int:
        return self.in_chunks * self.chunk

    @property
    def out_channels(self) -> int:
        return self.out_chunks * self.chunk


def merge_of(work: ConvWork) -> Merge:
    """Return the merge of the fewest groups whose channels are whole chunks on both sides, or of
    those that fit in a chunk, or of one group, with padding."""
    chunk = CHUNK_BYTES // work.dtype.itemsize
    own = _shares_sums(work)
    groups = 2 if own else chunk // gcd(chunk, work.in_channels, work.out_channels)
    padded = not _is_whole(work, groups, own)
    if padded:
        fitting = range(chunk // max(work.in_channels, work.out_channels), 1, -1)
        groups = next((n for n in fitting if _may_merge(work, n)), 1)
    in_chunks = ceil_div(groups * work.in_channels, chunk)
    out_chunks = ceil_div(groups * work.out_channels, chunk)
    count = work.groups // groups
    return Merge(groups, chunk, in_chunks, out_chunks, count, padded, own and not padded)


def _is_whole(work: ConvWork, groups: int, own: bool) -> bool:
    """Return whether merges are whole chunks in memory and may be multiplied together."""
    sides = (work.x, work.in_channels), (work.y, work.out_channels)
    return (
        all(piece_of(*side, groups) == CHUNK_BYTES for side in sides)
        and (own or _may_merge(work, groups))
        and groups * max(work.in_channels, work.out_channels) <= _most_channels(work)
    )


def _most_channels(work: ConvWork) -> int:
    wide = work.direction == "bwd_weight" and work.dtype.itemsize == 2
    return WIDE_CHANNELS if wide else MAX_CHANNELS


def _may_merge(work: ConvWork, groups: int) -> bool:
    """Return whether so many groups may be merged, by zero-padding their weights.

    Channels of other groups are then multiplied by zeros, so a NaN spreads to all groups of its
    merge. It may only reach groups that share an aligned block of 16 channels with its own. Two
    groups of fewer channels always share one, as no multiple of 16 is between them. In weight
    gradients, products of different groups are discarded.
    """
    sides = (work.x, work.in_channels), (work.y, work.out_channels)
    if groups == 1:
        return True
    if work.groups % groups or any(one.strides[1] != channels for one, channels in sides):
        return False
    return work.direction == "bwd_weight" or any(
        channels < PACKED and (groups == 2 or PACKED % (groups * channels) == 0)
        for _, channels in sides
    )


def piece_of(operand: Operand, channels: int, groups: int) -> int:
    """Return the bytes, at most 16, of the largest pieces of which merges of ``groups`` groups are
    whole numbers, each at a multiple of its size."""
    size = operand.dtype.itemsize
    apart = operand.strides[1] if groups == 1 else 0
    every = gcd(groups * channels, apart, *(operand.strides[axis] for axis in (0, 3, 4, 5)))
    return gcd(CHUNK_BYTES, every * size)


def is_exact(work: ConvWork) -> bool:
    """Return whether products are computed in exact float32."""
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def _shares_sums(work: ConvWork) -> bool:
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


def why_not_grouped(work: ConvWork, device: CudaDevice) -> str | None:
    """Return why the grouped tensor-core kernel does not apply; None if it may.

    Except for sizes that overflow, this depends on channels, kernel, stride and dilation only, so
    that every part of a split problem gets the same kernel.
    """
    if (reason := Requirements(grouped=True).why_not(work, device)) is not None:
        return reason
    merge = merge_of(work)
    most = _most_channels(work)
    if max(merge.in_channels, merge.out_channels) > most:
        return (
            f"{work.in_channels} and {work.out_channels} channels per group, {merge.groups} groups "
            f"merged, are more than {most}"
        )
    if merge.padded and merge.groups * min(work.channels) == 1:
        return "a chunk would have one channel"
    if work.taps > MAX_TAPS:
        return f"{work.taps} taps are more than {MAX_TAPS}"
    for side, operand, channels in (
        ("input", work.x, work.in_channels),
        ("output", work.y, work.out_channels),
    ):
        reason = _why_not_pixels(operand, channels)
        if reason is not None:
            return f"the {side}'s {reason}"
    if max(*work.input, *work.output, work.batch) > MAX_EXTENT:
        return f"an extent is more than {MAX_EXTENT}"
    return None


def _why_not_pixels(operand: Operand, channels: int) -> str | None:
    """Return why a position's channels cannot be copied; None if they can."""
    if operand.strides[2] != 1 and channels > 1:
        return "channels are not contiguous"
    if max(operand.strides[3:]) * operand.dtype.itemsize > MAX_STRIDE_BYTES:
        return f"planes are more than {MAX_STRIDE_BYTES} bytes apart"
    return None
