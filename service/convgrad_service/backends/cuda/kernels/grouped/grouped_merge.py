"""How groups of few channels are merged, so that they fill whole 16-byte chunks of channels."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = [
    "DTYPES",
    "MAX_CHANNELS",
    "Merge",
    "is_exact",
    "meets_own",
    "merge_of",
    "odd_chunks",
    "slices_of",
    "why_not_grouped",
    "why_not_packed",
    "widest",
]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
MAX_CHANNELS = 64
"""Of merged groups, on either side."""
LEAST_BYTES = 64
DENSE_CHANNELS = 56
MAX_TAPS = 512
MAX_STRIDE_BYTES = 2**31 - 1
PACKED = 16
MAX_EXTENT = 2**24


@dataclass(frozen=True, slots=True)
class Merge:
    """``groups`` neighbouring groups as one; how many chunks of ``chunk`` channels the input and
    the output have then, and how many merges there are."""

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
    """The fewest groups whose channels are whole chunks on both sides."""
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
    """Whether products are float32 ones."""
    return work.dtype is DType.FLOAT32 and work.precision != "high"


def meets_own(work: ConvWork) -> bool:
    """Where float32 is exact: whether two groups of four channels are taken together, each lane
    having sums of one of them and meeting its channels alone."""
    if not is_exact(work) or work.direction == "bwd_weight":
        return False
    read, written = work.in_channels, work.out_channels
    if work.direction == "bwd_data":
        read, written = written, read
    together = work.x.strides[1] == work.in_channels and work.y.strides[1] == work.out_channels
    return written == 4 and read % 4 == 0 and read <= 32 and work.groups % 2 == 0 and together


def widest(columns: int) -> int:
    """How many times 8 channels, up to four, a warp should take at once of so many: each turn reads
    the other operand again, which is worth about half of what one more 8 channels cost in vain."""
    return min((4, 3, 2, 1), key=lambda width: ceil_div(columns, width) * (width + 1.5))


def slices_of(merge: Merge, together: bool) -> list[int]:
    """How many merges a block may take, whose channels lie side by side if ``together``: at least
    two sectors of memory a pixel, which are brought to the chip as fast as whole lines."""
    if not together:
        return [1]
    chunks = min(merge.in_chunks, merge.out_chunks)
    few = [n for n in (1, 2, 4, 8, 16) if n < 2 * merge.count]
    return [n for n in few if n * chunks * CHUNK_BYTES >= LEAST_BYTES] or few[-1:]


def odd_chunks(chunks: int) -> int:
    """Bytes of a row of so many chunks, padded to an odd number: rows fall into other banks."""
    return (chunks | 1) * CHUNK_BYTES


def why_not_grouped(work: ConvWork, device: CudaDevice) -> str | None:
    """Why the grouped tensor-core kernels cannot take this work, as far as both judge alike.

    Judged by channels, kernel, stride and dilation, so that a problem in pieces chooses as the
    whole does; only sizes that cannot be counted are refused too.
    """
    if work.dtype not in DTYPES:
        return f"sums of {work.dtype} are wider than float32"
    if device.capability < (8, 0):
        return f"{device.name} is older than sm_80"
    if work.groups == 1:
        return "one group"
    merge = merge_of(work)
    if max(merge.in_channels, merge.out_channels) > MAX_CHANNELS:
        return (
            f"{work.in_channels} and {work.out_channels} channels a group, {merge.groups} groups "
            f"merged, are more than {MAX_CHANNELS}"
        )
    if not is_exact(work) and min(work.in_channels, work.out_channels) >= DENSE_CHANNELS:
        return f"{DENSE_CHANNELS} and more channels a group fill the dense kernels' tiles"
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
    """Why groups may not be merged where results are products with all channels of a merge.

    Other groups' channels meet zeros there, so a NaN spreads to all groups of its merge. It may
    reach those that share an aligned block of 16 channels with its own group, no others. Two groups
    of fewer channels always share one, for no multiple of 16 lies between them.
    """
    merge = merge_of(work)
    if merge.groups == 1 or meets_own(work):
        return None
    for channels in (work.in_channels, work.out_channels):
        if channels < PACKED and (merge.groups == 2 or PACKED % (merge.groups * channels) == 0):
            return None
    return (
        f"{merge.groups} groups of {work.in_channels} and {work.out_channels} channels merged are "
        f"no part of an aligned block of {PACKED} channels, within which a NaN may spread"
    )


def _why_not_chunks(operand: Operand, channels: int, work: ConvWork, merge: Merge) -> str | None:
    """Why channels are not side by side in whole chunks."""
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
        return f"planes lie more than {MAX_STRIDE_BYTES} bytes apart"
    return None
