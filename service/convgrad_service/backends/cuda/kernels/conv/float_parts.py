"""Operands of float32 as sums of bfloat16 parts (float_parts.cu), for products of parts.

With parts x[0], x[1], ... of decreasing magnitude, x * y is the sum of x[i] * y[j]. Of two parts
each, three products (`PRODUCTS`) are exact to 3 * 2**-16 of abs(x * y); of three parts, six are
exact to 2**-23.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import in_order
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import Instance, Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides
from convgrad_service.problems.sizes import Size3

__all__ = [
    "PARTS",
    "PRODUCTS",
    "FloatParts",
    "FloatTensor",
    "float_parts",
    "of_pixels_read",
]
__all__ += ["parts_instances", "why_not_parts"]

PARTS = {"high": 2, "highest": 3}
"""The parts of each operand, by ``precision``."""
PRODUCTS = {
    1: ((0, 0),),
    2: ((0, 0), (0, 1), (1, 0)),
    3: ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)),
}
"""The parts of the first and of the second operand to multiply, by their number."""

CHUNK = 8
# float_parts.cu: threads of a block, its blocks on a multiprocessor, chunks of a thread, a tile and
# how often its channels may be halved.
BLOCK, BLOCKS_EACH, EACH, TILE = 256, 3, 2, 64
MOST_NARROW = 2
# Blocks of the launch that checks the range, and splits again if it must.
BLOCKS_AGAIN = 32
VECTOR = 4
MAX_JOBS = 2**31 - 1
# On an H200, beside the product that follows: the launches by the number of parts, and bytes read
# and written per second where channels are contiguous and where they are not.
LAUNCHES_S, BYTES_PER_S, TRANSPOSED_BYTES_PER_S = {2: 2.5e-6, 3: 4.5e-6}, 3.5e12, 2.9e12
FloatPartsArgs = structure("conv/float_parts.cu", "FloatPartsArgs")


@dataclass(frozen=True, slots=True)
class FloatTensor:
    """A float32 operand to split: any strides; several groups are one after another.

    Attributes
    ----------
    source : Operand
        Strides in elements of (N, any, C, D, H, W).
    batch, channels, size
        Its extents. Reads are coalesced if channels are contiguous, or pixels in this order.
    parts : str
        Name of the buffer of its parts.
    """

    source: Operand
    batch: int
    channels: int
    size: Size3
    parts: str

    @property
    def pixels(self) -> int:
        return self.batch * prod(self.size)

    @property
    def padded(self) -> int:
        """Channels of a pixel of the parts."""
        return ceil_div(self.channels, CHUNK) * CHUNK

    @property
    def elements(self) -> int:
        """Elements of a part."""
        return self.pixels * self.padded

    def part_of(self, channels: int) -> Operand:
        """Return the first part, in groups of so many ``channels``, as an operand of bfloat16;
        others follow, ``elements`` apart."""
        n, d, h, w, c = contiguous_strides((self.batch, *self.size, self.padded))
        return Operand(self.parts, DType.BFLOAT16, (n, channels * c, c, d, h, w))

    @property
    def jobs(self) -> int:
        if self.source.channels_last:
            return self.pixels * (self.padded // CHUNK)
        return ceil_div(self.pixels, TILE << self.narrow) * ceil_div(self.padded, self.across)

    @property
    def narrow(self) -> int:
        """How often the channels of a tile are halved, and its pixels doubled."""
        return next(n for n in range(MOST_NARROW, -1, -1) if n == 0 or self.padded <= TILE >> n)

    @property
    def across(self) -> int:
        """Channels of a chunk, or of a tile."""
        return CHUNK if self.source.channels_last else TILE >> self.narrow

    def expected_s(self, parts: int) -> float:
        """Return the expected seconds in which a launch splits it."""
        moved = 4 * self.pixels * self.channels + 2 * parts * self.elements
        return moved / (BYTES_PER_S if self.source.channels_last else TRANSPOSED_BYTES_PER_S)

    @property
    def blocks(self) -> int:
        """The most blocks that have work."""
        return ceil_div(self.jobs, BLOCK * EACH) if self.source.channels_last else self.jobs


@dataclass(frozen=True, slots=True)
class FloatParts:
    """How two tensors are split.

    Attributes
    ----------
    unscale : str or None
        A buffer with one float32, by which every sum of products is to be multiplied; None for 1.
    expected_s : float
        Predicted seconds of the steps.
    """

    steps: tuple[Step, ...]
    workspace: tuple[Workspace, ...]
    unscale: str | None
    expected_s: float


def why_not_parts(tensors: Sequence[FloatTensor]) -> str | None:
    """Return why float_parts.cu cannot split these tensors, or None."""
    for tensor in tensors:
        if max(tensor.jobs, tensor.pixels) > MAX_JOBS:
            return f"{tensor.pixels} pixels of {tensor.channels} channels; expected fewer than 2^31"
    return None


def float_parts(
    first: FloatTensor,
    second: FloatTensor,
    parts: int,
    prefix: str,
    device: CudaDevice,
    lift: tuple[int, int] = (16, 16),
) -> FloatParts:
    """Return the launches that split both operands of a product.

    Parameters
    ----------
    parts
        2 or 3.
    prefix
        Start of the names of other workspace buffers.
    lift
        Exponents of the powers of two by which three parts' elements are multiplied, unless their
        range demands others. 16 suits every element below 2**112, less only those of at least
        2**(-110 - lift); products keep their bits if others have the same sum.
    """
    tensors = first, second
    blocks = _blocks(tensors, BLOCKS_EACH * device.multiprocessors)
    steps = [_launch(tensors, parts, prefix, blocks, lift)]
    workspace = [Workspace(one.parts, parts * one.elements * 2) for one in tensors]
    expected_s = LAUNCHES_S[parts] + sum(one.expected_s(parts) for one in tensors)
    scales = parts > 2
    if scales:
        few = _blocks(tensors, BLOCKS_AGAIN)
        steps.append(_launch(tensors, parts, prefix, few, lift, found=blocks))
        workspace.append(Workspace(_ranges(prefix), 8 * sum(blocks)))
        workspace.append(Workspace(_unscale(prefix), 4))
    return FloatParts(
        tuple(steps), tuple(workspace), _unscale(prefix) if scales else None, expected_s
    )


def of_pixels_read(work: ConvWork) -> ConvWork:
    """Return the work on only those pixels of the input that it reads, along dimensions of one tap
    and a stride."""
    conv, x = work.conv, work.x
    ndim = conv.ndim
    skips = [
        conv.kernel_size[dim] == 1
        and conv.stride[dim] > 1
        and conv.padding[dim][0] == 0
        and (conv.output_size[dim] - 1) * conv.stride[dim] < conv.input_size[dim]
        for dim in range(ndim)
    ]
    if not any(skips):
        return work
    strides = list(x.strides)
    for dim, skip in enumerate(skips):
        strides[6 - ndim + dim] *= conv.stride[dim] if skip else 1

    def read(kept: tuple[Any, ...], instead: Iterable[Any]) -> tuple[Any, ...]:
        each = zip(skips, kept, instead, strict=True)
        return tuple(other if skip else one for skip, one, other in each)

    n, g, c, d, h, w = strides
    conv = replace(
        conv,
        input_size=read(conv.input_size, conv.output_size),
        stride=read(conv.stride, (1,) * ndim),
        padding=read(conv.padding, ((0, 0),) * ndim),
    )
    return replace(work, conv=conv, x=replace(x, strides=(n, g, c, d, h, w)))


def parts_instances() -> Iterable[Instance]:
    """Return the instances of float_parts.cu."""
    return [_instance(parts) for parts in PARTS.values()]


def _instance(parts: int) -> Instance:
    return Instance.of("conv/float_parts.cu", HOPPER, PARTS=parts)


def _ranges(prefix: str) -> str:
    return f"{prefix}ranges"


def _unscale(prefix: str) -> str:
    return f"{prefix}unscale"


def _blocks(tensors: tuple[FloatTensor, FloatTensor], room: int) -> tuple[int, int]:
    """Return the blocks of each tensor, by bytes: ``room`` of them are resident at once."""
    first, second = (one.blocks for one in tensors)
    if first + second <= room:
        return first, second
    of_first = room * tensors[0].elements // (tensors[0].elements + tensors[1].elements)
    least = max(1, room - second)
    of_first = min(max(of_first, least), first, room - 1)
    return of_first, room - of_first


def _launch(
    tensors: tuple[FloatTensor, FloatTensor],
    parts: int,
    prefix: str,
    blocks: tuple[int, int],
    lift: tuple[int, int],
    *,
    found: tuple[int, int] | None = None,
) -> Launch:
    """Return the first launch, or the second of one whose blocks ``found`` extremes."""
    args = FloatPartsArgs()
    args.blocks[:], args.found[:], args.lift[:] = blocks, found or blocks, lift
    args.again = found is not None
    for of, tensor in zip(args.of, tensors, strict=True):
        source = tensor.source
        strides, size = _merged(source.strides, tensor.size)
        of.stride[:], of.channel_stride = strides, source.strides[2]
        of.part, of.pixels, of.channels = tensor.elements, tensor.pixels, tensor.channels
        of.padded, of.jobs = tensor.padded, tensor.jobs
        of.transposes = not source.channels_last
        extents = tensor.batch, *size
        outer = (stride for stride, extent in zip(strides, extents, strict=True) if extent > 1)
        of.vectors = all(value % VECTOR == 0 for value in (tensor.channels, *outer))
        of.in_order = in_order(strides, extents)
        of.size[:] = size
        for dim, extent in enumerate(size):
            of.by[dim] = divider(extent)
        of.narrow, of.by_across = tensor.narrow, divider(ceil_div(tensor.padded, tensor.across))
    scales = parts > 2
    arguments = pack(
        args,
        source0=tensors[0].source,
        source1=tensors[1].source,
        target0=tensors[0].parts,
        target1=tensors[1].parts,
        ranges=_ranges(prefix) if scales else None,
        unscale=_unscale(prefix) if scales else None,
    )
    return Launch(
        _instance(parts), (sum(blocks), 1, 1), (BLOCK, 1, 1), arguments, overlaps=bool(args.again)
    )


def _merged(strides: tuple[int, ...], size: Size3) -> tuple[tuple[int, ...], Size3]:
    """Return the strides of N D H W and the sizes, of which outer ones become 1 where one stride
    separates the pixels of several."""
    d, h, w = size
    n_stride, _, _, d_stride, h_stride, w_stride = strides
    if w == 1 or h == 1 or h_stride == w * w_stride:
        h, w, w_stride = 1, h * w, h_stride if w == 1 else w_stride
        if d == 1 or w == 1 or d_stride == w * w_stride:
            d, w, w_stride = 1, d * w, d_stride if w == 1 else w_stride
    return (n_stride, d_stride, h_stride, w_stride), (d, h, w)
