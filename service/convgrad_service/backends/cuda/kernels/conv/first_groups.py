"""dgrad of a first layer of common shape: the positions of a group, times the channels, are the
columns of one GEMM (first_groups.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.first_windows import (
    BEFORE_BLACKWELL,
    BLACKWELL,
    STAGES,
    fill_dgrad,
    why_not_first,
)
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    prepare_side,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides

__all__ = ["Cut", "FirstGroups", "FirstGroupsArgs", "groups_args", "why_not_groups"]

MOST_WARPS = 8
MAX_OFFSET = 2**31 - 1
# Cost model: m16n8 mma instructions per SM per clock, the fixed clocks per block and row of y, and
# the clocks to start a block.
PRODUCTS_PER_CLOCK, ROW_CLOCKS, START_CLOCKS = 0.55, 800, 8000
DTYPES = (DType.FLOAT16, DType.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Shape:
    """The capacity of an instance, whose warps keep their weights in registers.

    Attributes
    ----------
    slots
        Kernel rows with the same residue modulo the stride along H.
    taps
        Positions of y along W that a group reads.
    steps, tiles
        K-steps of 16 channels, and tiles of 8 columns.
    blocks
        Blocks per SM.
    """

    slots: int
    taps: int
    steps: int
    tiles: int
    blocks: int

    @property
    def products(self) -> int:
        """Number of mma instructions for 16 groups, one row of y and one residue."""
        return self.slots * self.taps * self.steps * self.tiles


SHAPES = (
    Shape(4, 4, 4, 1, 1),
    Shape(3, 4, 4, 1, 1),
    Shape(3, 4, 2, 1, 1),
    Shape(2, 2, 4, 1, 2),
    Shape(2, 2, 2, 1, 2),
    Shape(1, 1, 8, 2, 2),
)


@dataclass(frozen=True, slots=True)
class Grouping:
    """How positions of x along W form groups.

    Attributes
    ----------
    group, hop
        Positions of x in a group, and of y from one group to the next.
    first_tap, taps
        The first position of y that a group reads, relative to the group, and the number of them.
    shape
        The instance that takes them.
    """

    group: int
    hop: int
    first_tap: int
    taps: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition: warps of a block along W, rows of y per segment, and segments along H."""

    warp_groups: int
    segment_rows: int
    row_segments: int


FirstGroupsArgs = structure("conv/first_groups.cu", "FirstGroupsArgs")


class FirstGroups:
    """bwd_data of first layers in 16-bit types, where one of ``SHAPES`` fits."""

    name = "first_groups"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Splitting along N, D or H does not change the answer."""
        reason = why_not_groups(work, device)
        if reason is not None:
            return reason
        if work.stride[1] > MOST_WARPS:
            return f"a stride of {work.stride[1]} rows"
        grouping = _grouping(work, device)
        if grouping is None:
            return "the weights of no grouping of positions fit into registers"
        if _shared_bytes(work, grouping, 1) > device.shared_bytes_per_block:
            return "a row does not fit into shared memory"
        if _cut(work, grouping, device) is None:
            return "its blocks are more than one grid holds"
        return None

    def launches(self, work: ConvWork, device: CudaDevice, cut: Cut | None = None) -> Fragment:
        """See `Family.launches`. ``cut`` overrides the chosen partition."""
        grouping = _grouping(work, device)
        if grouping is None:
            raise ValueError("no grouping of positions fits")
        y = prepare_side(work, "source", device)
        cut = cut or _cut(work, grouping, device)
        if cut is None:
            raise ValueError("no cut fits")
        args = FirstGroupsArgs()
        groups_args(args, work, y.operand, grouping.group, cut)
        for name in ("hop", "first_tap", "taps"):
            setattr(args, name, getattr(grouping, name))
        args.flat_weights = _contiguous_krsc(work)
        args.positions = _positions(grouping, cut.warp_groups)
        args.segments = _segments(work, grouping, cut.warp_groups)
        launch = Launch(
            _instance(work.dtype, grouping.shape),
            (_blocks(work, grouping, cut), 1, 1),
            (32 * work.stride[1] * cut.warp_groups, 1, 1),
            pack(
                args,
                y=y.operand,
                w=work.w,
                x=work.x,
                accumulate=work.accumulate,
                bias=work.bias,
            ),
            _shared_bytes(work, grouping, cut.warp_groups),
        )
        return Fragment(self.name, (*y.steps, launch), y.workspace)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [_instance(dtype, shape) for dtype in DTYPES for shape in SHAPES]


def why_not_groups(
    work: ConvWork, device: CudaDevice, dtypes: tuple[DType, ...] = DTYPES
) -> str | None:
    """Return why no kernel computes this dgrad by groups of positions, or None if one may."""
    reason = why_not_first(work, device, exact=DType.FLOAT32 in dtypes)
    if reason is not None:
        return reason
    if work.dtype not in dtypes:
        return f"{work.dtype}"
    if work.kernel[0] != 1:
        return f"{work.kernel[0]} taps along D"
    row = work.input[2] * work.x.strides[5] + work.in_channels * work.x.strides[2]
    if max(row, work.output[2] * work.y.strides[5]) > MAX_OFFSET:
        return f"a row of the input reaches over {row} elements"
    return None


def groups_args(args: Any, work: ConvWork, y: Operand, group: int, cut: Cut) -> None:
    """Fill in the kernel parameters that depend on the work and its partition along H."""
    fill_dgrad(args, work, y, cut)
    args.plain = _plain(work, group)
    args.group, args.warp_groups = group, cut.warp_groups


def _grouping(work: ConvWork, device: CudaDevice) -> Grouping | None:
    """Return the grouping with the fewest mma instructions per position, or None."""
    stride, pad, taps = work.stride[2], work.pad[2], work.kernel[2]
    steps = ceil_div(work.out_channels, 16)
    slots = ceil_div(work.kernel[1], work.stride[1])
    found: list[Grouping] = []
    for hop in (1, 2, 4, 8):
        group = hop * stride
        first = ceil_div(pad - taps + 1, stride)
        count = (group - 1 + pad) // stride - first + 1
        found += [
            Grouping(group, hop, first, shape.taps, shape)
            for shape in SHAPES
            if group * work.in_channels <= 8 * shape.tiles
            and slots <= shape.slots
            and count <= shape.taps
            and steps <= shape.steps
            and (shape != SHAPES[0] or device.capability < BLACKWELL)
        ]
    return min(found, key=lambda one: one.shape.products / one.group, default=None)


def _plain(work: ConvWork, group: int) -> int:
    """Return the epilogue code.

    0 applies the epilogue. The others store the sums: 1 one by one, 2 where columns of a group are
    contiguous in x, 3 where pairs of columns also start at even offsets.
    """
    if not work.epilogue_free:
        return 0
    n, _, c, d, h, w = work.x.strides
    channels = work.in_channels
    adjacent = (channels == 1 or c == 1) and (work.input[2] == 1 or w == channels)
    extents = (work.batch, work.input[0], work.input[1])
    even = all(
        stride % 2 == 0 for stride, extent in zip((n, d, h), extents, strict=True) if extent > 1
    )
    whole = group * channels % 2 == 0 and work.input[2] * channels % 2 == 0
    if not adjacent:
        return 1
    return 3 if even and whole else 2


def _contiguous_krsc(work: ConvWork) -> bool:
    """Return whether the weight is contiguous as (K, R, S, C)."""
    _, k, c, _, r, s = work.w.strides
    shape = (work.out_channels, *work.kernel[1:], work.in_channels)
    strides = zip(shape, (k, r, s, c), contiguous_strides(shape), strict=True)
    return all(stride == wanted for extent, stride, wanted in strides if extent > 1)


def _positions(grouping: Grouping, warp_groups: int) -> int:
    """Return the number of positions of y that a block's groups read per row."""
    return (warp_groups * 32 - 1) * grouping.hop + grouping.taps


def _segments(work: ConvWork, grouping: Grouping, warp_groups: int) -> int:
    return ceil_div(work.input[2], grouping.group * warp_groups * 32)


def _shared_bytes(work: ConvWork, grouping: Grouping, warp_groups: int) -> int:
    """Return the bytes of shared memory: the pipeline and the weights."""
    shape = grouping.shape
    ring = STAGES * _positions(grouping, warp_groups) * (2 * shape.steps + 1) * CHUNK_BYTES
    weights = work.out_channels * work.taps * work.in_channels * work.dtype.itemsize
    return ring + ceil_div(weights, CHUNK_BYTES) * CHUNK_BYTES


def _blocks(work: ConvWork, grouping: Grouping, cut: Cut) -> int:
    return (
        work.batch * work.input[0] * cut.row_segments * _segments(work, grouping, cut.warp_groups)
    )


def _cut(work: ConvWork, grouping: Grouping, device: CudaDevice) -> Cut | None:
    """Return the partition with the least expected time, or None."""
    stride, pad = work.stride[1], work.pad[1]
    rows = (work.input[1] - 1 + pad) // stride - pad // stride + 1
    best: tuple[float, Cut] | None = None
    for warp_groups in range(1, MOST_WARPS // stride + 1):
        shared = _shared_bytes(work, grouping, warp_groups)
        if shared > device.shared_bytes_per_block:
            continue
        resident = max(
            1,
            min(
                grouping.shape.blocks * MOST_WARPS // (stride * warp_groups),
                device.fitting_blocks(shared),
            ),
        )
        products = stride * warp_groups * 2 * grouping.shape.products / PRODUCTS_PER_CLOCK
        for parts in range(1, min(rows, 64) + 1):
            segment_rows = ceil_div(rows, parts)
            cut = Cut(warp_groups, segment_rows, ceil_div(rows, segment_rows))
            blocks = _blocks(work, grouping, cut)
            if blocks > MAX_BLOCKS:
                continue
            filled = min(resident, ceil_div(blocks, device.multiprocessors))
            row = max(filled * products, products + ROW_CLOCKS)
            # Each segment also reads the rows before its first.
            rows_read = segment_rows + (work.kernel[1] - 1) // stride
            waves = ceil_div(blocks, device.multiprocessors * filled)
            clocks = waves * (rows_read * row + START_CLOCKS)
            if best is None or clocks < best[0]:
                best = clocks, cut
    return best[1] if best is not None else None


def _instance(dtype: DType, shape: Shape) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "SLOTS": shape.slots,
        "TAPS": shape.taps,
        "STEPS": shape.steps,
        "TILES": shape.tiles,
        "BLOCKS": shape.blocks,
        "STAGES": STAGES,
    }
    return Instance.of(
        "conv/first_groups.cu",
        defines,
        BEFORE_BLACKWELL if shape == SHAPES[0] else ARCHITECTURES,
    )
