"""wgrad of a first layer on Hopper by wgmma, with windows of input rows as the A operand in
registers (hopper_first_taps.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill
from convgrad_service.backends.cuda.kernels.conv.first_sum import (
    first_sum,
    first_sum_instances,
    results_of,
    why_not_first,
)
from convgrad_service.backends.cuda.kernels.core.limits import (
    IN_16_BITS,
    Requirements,
)
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap, pack_maps
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    padded_width,
    prepare_rows,
    prepare_side,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice
from convgrad_service.plans.cuda.families import COPY_BYTES_S, Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["HopperFirstTaps"]

EVEN = 2
"""Elements of a window per load; windows start at multiples of it."""
DEPTH, TILE = 16, 64
"""Positions of y (K) per wgmma, and window elements (M) of a warpgroup."""
WARPGROUPS = 3
"""The most consumer warpgroups."""
ROW_BYTES, ALIGNMENT, STATIC_BYTES = 128, 1024, 1024
PRODUCTS = (2, 3, 4, 5, 7, 8)
"""The numbers of wgmmas of a warpgroup per step, one per instance; one of 3,000 random layers would
have six."""
MOST_ODD_PRODUCTS = 7
"""The most where windows are an odd number of elements apart, limited by registers."""
FORMS = [
    (products, odd)
    for odd, most in ((False, PRODUCTS[-1]), (True, MOST_ODD_PRODUCTS))
    for products in PRODUCTS
    if products <= most
]
"""By instance, the number of wgmmas, and whether windows are an odd number of elements apart."""
ITEM, CHUNK = 2, 8
"""Bytes of an element, and elements per 16 bytes."""
CHANNELS = 64
"""Channels of y per block."""
PRODUCERS = 64
"""Threads besides the consumers."""
MOST_BOX, MOST_PART = 256, 256
MOST_STAGES = 16
# Pipeline depths, in order of preference.
AHEAD = (6, 5, 4, 3, 2)
MAX_GRID_Y = 65535
# Fitted to an H200: clocks of a step, and of its wgmmas; bytes that an SM copies per clock; bytes
# per second of all copies, and of partial sums; the start of both launches, and of a copy before.
LINE_CLOCKS, PRODUCT_CLOCKS, BYTES = 77, 84, 29
COPY_S = 3.2e-6
BYTES_S, SUM_BYTES_S, START_S, CLOCKS_PER_S = 5.7e12, 1.25e12, 9.5e-6, 1.7e9
# The most bytes of partial sums, unless the caller asks for more splits.
PARTIAL_BYTES = 256 * 2**20


HopperFirstTapsArgs = structure("conv/hopper_first_taps.cuh", "HopperFirstTapsArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition: windows into tiles, rows of y into segments (one per step), rows of x into parts
    (the unit of TMA coordinates), and the pipeline stages. ``row`` is the elements of a row of x;
    ``groups`` counts groups of tiles per tap along D."""

    row: int
    odd: int
    window: int
    tiles: int
    groups: int
    parts: int
    segment: int
    segments: int
    part: int
    reached: int
    added: int
    before: int
    y_stages: int
    x_stages: int

    @property
    def x_row(self) -> int:
        return self.part * self.reached * ITEM

    @property
    def x_stage(self) -> int:
        return ceil_div(self.added * self.x_row, 128) * 128

    @property
    def y_stage(self) -> int:
        return self.segment * CHANNELS * ITEM

    @property
    def products(self) -> int:
        return self.segment // (DEPTH * self.parts)

    @property
    def threads(self) -> int:
        return 128 * self.tiles * self.parts + PRODUCERS

    @property
    def raws_at(self) -> int:
        return self.y_stages * self.y_stage

    @property
    def shared_bytes(self) -> int:
        rings = self.raws_at + self.x_stages * self.x_stage
        return ALIGNMENT + max(rings, CHANNELS * (self.tiles * TILE + 4) * 4)


NEEDS = Requirements(dtypes=IN_16_BITS, hopper=True, dilated=False)


class HopperFirstTaps(Solver[ConvWork, Cut]):
    """bwd_weight on sm_90a with at most 8 input channels.

    Copies grad_output unless it has channels last, and the input unless its rows (W, C) are
    contiguous; both in whole chunks of 16 bytes.
    """

    name = "hopper_first_taps"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`. Splitting along N or H does not change the answer."""
        if (reason := why_not_first(work, device, NEEDS)) is not None:
            return reason
        cut = _cut(work, device)
        if cut is None:
            return "rows do not fit into shared memory"
        x, y = prepare_rows(work, device, CHUNK), prepare_side(work, "grad_output", device)
        refused = (one.why_not() for one in _maps(work, cut, x.operand, y.operand))
        return next((reason for reason in refused if reason is not None), cut)

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        lines = work.batch * work.output[0] * cut.segments * work.output[1]
        blocks = cut.groups * work.kernel[0] * ceil_div(work.out_channels, CHANNELS)
        results = results_of(work)
        splits = _splits(work, lines, blocks, results, device)
        args = _args(work, cut)
        args.lines, args.more = divmod(lines, splits)
        x, y = prepare_rows(work, device, CHUNK), prepare_side(work, "grad_output", device)
        x_map, y_map = _maps(work, cut, x.operand, y.operand)
        partials = f"{work.prefix}partials"
        launch = Launch(
            _instance(cut.products, _windows_odd(work)),
            (blocks, splits, 1),
            (cut.threads, 1, 1),
            pack_maps(
                args, {"x_map": (x.operand, x_map), "y_map": (y.operand, y_map)}, partials=partials
            ),
            cut.shared_bytes,
        )
        copies, copied = (*y.steps, *x.steps), (*y.workspace, *x.workspace)
        copied_bytes = 2 * sum(one.size_bytes for one in copied)
        copies_s = COPY_S * len(copies) + copied_bytes / COPY_BYTES_S
        return Fragment(
            f"{self.name}/{splits}",
            (*copies, launch, first_sum(work, partials, splits, device)),
            (*copied, Workspace(partials, splits * results * 4)),
            expected_s=copies_s + _expected_s(work, cut, blocks, splits),
        )

    def instances(self) -> Iterable[Instance]:
        return [*(_instance(*form) for form in FORMS), *first_sum_instances()]


def _window(work: ConvWork) -> tuple[int, int]:
    """Return the elements of a row of a window in whole loads, and whether it starts within one."""
    odd = work.pad[2] * work.in_channels % EVEN
    return ceil_div(work.kernel[2] * work.in_channels + odd, EVEN) * EVEN, odd


def _windows_odd(work: ConvWork) -> bool:
    return work.stride[2] * work.in_channels % EVEN == 1


def _cut(work: ConvWork, device: CudaDevice) -> Cut | None:
    """Return the partition with the least padding along W whose pipelines fit, or None."""
    row = padded_width(work, CHUNK) * work.in_channels
    window, odd = _window(work)
    all_tiles = ceil_div(work.kernel[1] * window, TILE)
    groups = ceil_div(all_tiles, WARPGROUPS)
    tiles = ceil_div(all_tiles, groups)
    # Two warpgroups share a tile, if rows are long enough for the wgmmas of both.
    parts = 2 if tiles == 1 and work.output[2] > PRODUCTS[0] * DEPTH else 1
    added = min(work.kernel[1], work.stride[1])
    before = ceil_div(work.kernel[1] - added, added)
    columns = work.output[2]
    most = MOST_ODD_PRODUCTS if _windows_odd(work) else PRODUCTS[-1]
    segments = sorted(
        (
            products * parts * DEPTH
            for products in PRODUCTS
            if products <= most and products * parts <= PRODUCTS[-1]
        ),
        key=lambda one: (ceil_div(columns, one) * one, -one),
    )
    room = device.shared_bytes_per_block - STATIC_BYTES
    for segment in segments:
        count = ceil_div(columns, segment)
        part, reached = _part(work, row, segment, count, window, odd)
        for ahead in AHEAD:
            cut = Cut(
                row,
                odd,
                window,
                tiles,
                groups,
                parts,
                segment,
                count,
                part,
                reached,
                added,
                before,
                ahead,
                before + ahead,
            )
            fits = cut.shared_bytes <= room and cut.x_stages <= MOST_STAGES
            if fits and reached <= MOST_BOX and added <= MOST_BOX:
                return cut
    return None


def _part(
    work: ConvWork, row: int, segment: int, count: int, window: int, odd: int
) -> tuple[int, int]:
    """Return the elements of a part of a row of x, and the most parts that a segment's windows
    span."""
    step = work.stride[2] * work.in_channels

    def reached(part: int) -> int:
        # Start offsets within a part repeat after at most ``part`` segments.
        starts = (
            (one * segment * work.stride[2] - work.pad[2]) * work.in_channels - odd
            for one in range(min(count, part))
        )
        return max(ceil_div(start % part + (segment - 1) * step + window, part) for start in starts)

    sizes = [size for size in range(CHUNK, min(row, MOST_PART) + 1, CHUNK) if row % size == 0]
    # To TMA, each part costs about as much as 64 bytes.
    part = min(sizes, key=lambda size: reached(size) * (size * ITEM + 64))
    return part, reached(part)


def _splits(work: ConvWork, lines: int, blocks: int, results: int, device: CudaDevice) -> int:
    """Return the number of splits, of ``blocks`` blocks each, that fills the device once."""
    if work.split_k is not None:
        return max(1, min(work.split_k, lines, MAX_GRID_Y))
    room = max(1, PARTIAL_BYTES // (results * 4))
    return max(1, min(lines, room, MAX_GRID_Y, device.multiprocessors // blocks))


def _expected_s(work: ConvWork, cut: Cut, blocks: int, splits: int) -> float:
    """Return the seconds that both launches should take."""
    lines = work.batch * work.output[0] * cut.segments * work.output[1]
    copied = cut.y_stage + cut.added * cut.x_row
    line = LINE_CLOCKS + max(PRODUCT_CLOCKS * cut.products * cut.parts * cut.tiles, copied / BYTES)
    sums = splits * results_of(work) * 4 / SUM_BYTES_S
    moved = blocks * splits * ceil_div(lines, splits) * copied / BYTES_S
    return START_S + max(ceil_div(lines, splits) * line / CLOCKS_PER_S, moved) + sums


def _args(work: ConvWork, cut: Cut) -> Any:
    args = HopperFirstTapsArgs()
    args.channels, args.y_channels = work.in_channels, work.out_channels
    args.y_size[:] = work.output
    fill(args, work, "kernel", "stride", "pad")
    fill(args, cut, "odd", "window", "tiles", "groups", "parts", "segment", "segments", "added")
    fill(args, cut, "before", "y_stages", "x_stages", "part", "x_row", "x_stage", "y_stage")
    args.raws_at = cut.raws_at
    args.bfloat16 = work.dtype is DType.BFLOAT16
    return args


def _maps(work: ConvWork, cut: Cut, x: Operand, y: Operand) -> tuple[TiledMap, TiledMap]:
    """Return the tensor maps of the input (part of a row, parts, H, D, N) and of grad_output
    (C, W, H, D, N)."""
    n, _, _, d, h, _ = x.strides
    x_sizes = (cut.part, cut.row // cut.part, work.input[1], work.input[0], work.batch)
    y_sizes = (work.out_channels, *work.output[::-1], work.batch)
    y_outer = y.strides[5], y.strides[4], y.strides[3], y.strides[0]
    return (
        TiledMap(
            work.dtype,
            x_sizes,
            _bytes((cut.part, h, d, n), x_sizes),
            box=(cut.part, cut.reached, cut.added, 1, 1),
        ),
        TiledMap(
            work.dtype,
            y_sizes,
            _bytes(y_outer, y_sizes),
            swizzle=128,
            box=(ROW_BYTES // ITEM, cut.segment, 1, 1, 1),
        ),
    )


def _bytes(strides: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides in bytes, with a valid one for TMA in dimensions of extent 1."""
    pairs = zip(strides, sizes[1:], strict=True)
    return tuple(ITEM * stride if size > 1 else ROW_BYTES for stride, size in pairs)


def _instance(products: int, odd: bool) -> Instance:
    return Instance.of("conv/hopper_first_taps.cu", HOPPER, PRODUCTS=products, ODD=odd)
