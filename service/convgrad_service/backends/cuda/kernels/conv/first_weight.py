"""wgrad of a first layer (few input channels) by mma.sync (first_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.first_windows import (
    MOST_WARPS,
    STAGES,
    STATIC_BYTES,
    blocks_per_sm,
    column_tiles,
    prepare_rows,
    why_not_first,
    window_args,
    window_bytes,
)
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES, MAX_BLOCKS
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    Prepared,
    in_whole_chunks,
    prepare_side,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.program import (
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FirstWeight", "first_sum", "first_sum_instances", "why_not_summed"]

WARP_TILES = 6
MOST_UNIT_ROWS = 4
SUM_WARPS = 8
SUM_RESULTS = 32
# The last block of first_sum may index past the last result.
MOST_RESULTS = 2**31 - SUM_RESULTS
# The most bytes of partial sums, unless the caller asks for more splits.
PARTIAL_BYTES = 256 * 2**20
# Positions of a work unit, in order of preference.
SEGMENTS = (64, 32)
# M of a block tile, in units of 16 output channels.
ROWS = (2, 4)
DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)


FirstWeightArgs = structure("conv/first_weight.cu", "FirstWeightArgs")


FirstSumArgs = structure("conv/first_sum.cu", "FirstSumArgs")


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition.

    Attributes
    ----------
    m16_tiles, rows
        Output channels of a block in units of 16, and its kernel rows.
    warp_columns
        Warps along the columns (taps x input channels).
    unit_rows, segment
        Rows and positions of a work unit.
    """

    m16_tiles: int
    rows: int
    warp_columns: int
    unit_rows: int
    segment: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return 32 * self.warp_columns * self.unit_rows


class FirstWeight:
    """bwd_weight with at most ``MOST_CHANNELS`` channels of the input."""

    name = "first_weight"

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_first(work, device) or why_not_summed(work)
        if reason is None and _cut(work, device) is None:
            return "windows of a row do not fit into shared memory"
        return reason

    def launches(self, work: ConvWork, device: CudaDevice, splits: int | None = None) -> Fragment:
        """See `Family.launches`. ``splits`` overrides the chosen number of splits."""
        cut = _cut(work, device)
        if cut is None:
            raise ValueError("windows of a row do not fit into shared memory")
        along_w = _along_w(work)
        y = Prepared(work.y) if along_w else prepare_side(work, "grad_output", device)
        x = prepare_rows(work, device)
        args = FirstWeightArgs()
        args.x_stride[:], args.y_stride[:] = x.operand.strides, y.operand.strides
        args.w_stride[:] = work.w.strides
        args.windows = window_args(work, x.operand, cut.rows, cut.unit_rows, cut.segment)
        args.alpha, args.beta = work.alpha, work.beta
        args.y_channels = work.out_channels
        args.wide_result = work.result_dtype is DType.FLOAT32
        args.row_groups = ceil_div(work.kernel[1], cut.rows)
        args.channel_blocks = ceil_div(work.out_channels, 16 * cut.m16_tiles)
        args.warp_columns = cut.warp_columns
        parts = args.row_groups * work.kernel[0] * args.channel_blocks
        units = args.windows.units
        args.splits = splits = splits or _splits(work, units, parts, cut, device)
        partials = f"{work.prefix}partials"
        launch = Launch(
            _instance(work.dtype, cut.m16_tiles, along_w),
            (parts * splits, 1, 1),
            (cut.threads, 1, 1),
            pack(
                args,
                x=x.operand,
                y=y.operand,
                w=work.w,
                accumulate=work.accumulate,
                partials=partials if splits > 1 else None,
            ),
            cut.shared_bytes - STATIC_BYTES,
        )
        steps: list[Step] = [*y.steps, *x.steps, launch]
        workspace = [*y.workspace, *x.workspace]
        if splits > 1:
            workspace.append(Workspace(partials, splits * _results(work) * 4))
            steps.append(first_sum(work, partials, splits, device))
        return Fragment(f"{self.name}/{splits}", tuple(steps), tuple(workspace))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [
            *(
                _instance(dtype, m16_tiles, along_w)
                for dtype in DTYPES
                for m16_tiles in ROWS
                for along_w in (False, True)
            ),
            *first_sum_instances(),
        ]


def _along_w(work: ConvWork) -> bool:
    """Return whether grad_output is read in place: channels first, rows of whole chunks."""
    extents = (work.batch, 1, work.out_channels, *work.output)
    return work.y.strides[2] != 1 and in_whole_chunks(work.y, extents, 5)


def _results(work: ConvWork) -> int:
    return work.out_channels * work.in_channels * work.taps


def _cut(work: ConvWork, device: CudaDevice) -> Cut | None:
    """Return the partition with the largest units that fits, or None."""
    tiles = column_tiles(work)
    rows = min(work.kernel[1], MOST_WARPS * WARP_TILES // tiles)
    # Distribute the kernel rows evenly over the groups.
    rows = ceil_div(work.kernel[1], ceil_div(work.kernel[1], rows))
    m16_tiles = ROWS[0] if work.out_channels <= 16 * ROWS[0] else ROWS[1]
    warp_columns = ceil_div(rows * tiles, WARP_TILES)
    most = min(MOST_UNIT_ROWS, MOST_WARPS // warp_columns, work.output[1])
    sums = 16 * m16_tiles * (rows * tiles * 8 + 4) * 4 + STATIC_BYTES
    for segment in SEGMENTS:
        if segment >= work.output[2] + 32:
            continue
        for unit_rows in range(most, 0, -1):
            shared = _y_bytes(work, m16_tiles, unit_rows, segment)
            shared += window_bytes(work, rows, unit_rows, segment)
            shared = max(shared, sums)
            if shared <= device.shared_bytes_per_block:
                return Cut(m16_tiles, rows, warp_columns, unit_rows, segment, shared)
    return None


def _y_bytes(work: ConvWork, m16_tiles: int, unit_rows: int, segment: int) -> int:
    size, channels = work.dtype.itemsize, 16 * m16_tiles
    row = segment * (channels * size + (32 if size == 4 else 16))
    if _along_w(work):
        row = channels * (SEGMENTS[0] * size + 16)
    return STAGES * unit_rows * row


def _splits(work: ConvWork, units: int, parts: int, cut: Cut, device: CudaDevice) -> int:
    """Return the number of splits, of ``parts`` blocks each, that fills the device once.

    It depends on the problem and the device model only, so equal requests give equal bits.
    """
    if work.split_k is not None:
        return min(work.split_k, units, MAX_BLOCKS // parts)
    resident = blocks_per_sm(device, cut.threads, cut.shared_bytes)
    room = max(1, PARTIAL_BYTES // (_results(work) * 4))
    return max(1, min(units, room, device.multiprocessors * resident // parts))


def why_not_summed(work: ConvWork) -> str | None:
    """Return why `first_sum` cannot reduce the partial sums, or None."""
    if _results(work) > MOST_RESULTS:
        return f"{_results(work)} results are more than {MOST_RESULTS}"
    return None


def first_sum(work: ConvWork, partials: str, splits: int, device: CudaDevice) -> Launch:
    """Return the launch that reduces the partial sums and applies the epilogue."""
    _, k, c, *kernel = work.w.strides
    args = FirstSumArgs()
    args.extent[:] = (work.out_channels, *work.kernel, work.in_channels)
    args.stride[:] = (k, *kernel, c)
    args.results, args.splits = _results(work), splits
    args.alpha, args.beta = work.alpha, work.beta
    return Launch(
        _sum_instance(work.result_dtype),
        (ceil_div(args.results, SUM_RESULTS), 1, 1),
        (32 * SUM_WARPS, 1, 1),
        pack(args, partials=partials, result=work.w, accumulate=work.accumulate),
        overlaps=device.capability >= OVERLAPPING,
    )


def first_sum_instances() -> Iterable[Instance]:
    """Return one instance per result type."""
    return map(_sum_instance, DTYPES)


def _sum_instance(dtype: DType) -> Instance:
    defines = ("RESULT", CUDA_TYPES[dtype]), ("WARPS", str(SUM_WARPS))
    return Instance("conv/first_sum.cu", "first_sum", defines)


def _instance(dtype: DType, m16_tiles: int, along_w: bool) -> Instance:
    defines = (
        ("ELEMENT", CUDA_TYPES[dtype]),
        ("ROWS", str(m16_tiles)),
        ("STAGES", str(STAGES)),
        ("ALONG_W", str(int(along_w))),
    )
    return Instance("conv/first_weight.cu", "first_weight", defines)
