"""wgrad of a first layer by mma.sync, on tensors in place (first_weight.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import fill, pack
from convgrad_service.backends.cuda.kernels.conv.dense_tiles import why_not_few_terms
from convgrad_service.backends.cuda.kernels.conv.first_sum import (
    first_sum,
    first_sum_instances,
    results_of,
    why_not_first,
)
from convgrad_service.backends.cuda.kernels.conv.first_weight_cuts import (
    CHUNK_BYTES,
    COLUMNS,
    TILES,
    Cut,
    Tile,
    channel_groups,
    cuts_of,
    expected_s,
    is_split,
    layout_of,
    splits_of,
    units_of,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    Requirements,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["FirstWeight"]

FirstWeightArgs = structure("conv/first_weight.cuh", "FirstWeightArgs")


NEEDS = Requirements(dilated=False)


class FirstWeight(Solver[ConvWork, Cut]):
    """bwd_weight with at most 8 input channels, without copies."""

    name = "first_weight"

    def solve(self, work: ConvWork, device: CudaDevice) -> Cut | str:
        """See `Family.why_not`. Splitting along N or H changes the answer where float32 sums become
        short."""
        reason = why_not_first(work, device, NEEDS) or why_not_few_terms(work)
        if reason is not None:
            return reason
        layout = layout_of(work)
        if layout is None:
            return "neither columns nor channels are contiguous"
        cuts = list(cuts_of(work, device, layout))
        if not cuts:
            return "rows do not fit into shared memory"
        return min(cuts, key=lambda cut: expected_s(work, device, cut))

    def fragment(self, work: ConvWork, device: CudaDevice, cut: Cut) -> Fragment:
        results = results_of(work)
        units, blocks = units_of(work, cut), cut.tap_groups * channel_groups(work, cut)
        splits = splits_of(work, device, cut)
        args = FirstWeightArgs()
        x, y = work.x.strides, work.y.strides
        args.x_stride[:] = (x[0], x[2], x[3], x[4])
        args.y_stride[:] = (y[0], y[2], y[3], y[4], y[5])
        args.x_size[:], args.y_size[:] = work.input, work.output
        args.y_channels, args.taps = work.out_channels, work.in_channels * work.taps
        fill(args, work, "kernel", "stride", "pad")
        layout = cut.layout
        fill(args, layout, "planes", "column", "y_last")
        fill(args, cut, "tap_groups", "warps_m", "warps_n", "rows", "segment", "stages")
        fill(args, cut, "x_lead", "stage_bytes")
        args.row_units = ceil_div(work.output[1], cut.rows)
        args.segments = ceil_div(work.output[2], cut.segment)
        args.units, args.more = divmod(units, splits)
        args.x_at = layout.item * cut.y_size
        for name in ("y_row", "y_column", "y_channel", "x_row", "x_plane"):
            setattr(args, name, layout.item * getattr(cut, name))
        y_length, y_rows, y_planes = cut.warps_n * COLUMNS, cut.segment, cut.rows
        if not layout.y_last:
            y_length, y_rows, y_planes = cut.segment, cut.rows, cut.warps_n * COLUMNS
        for name, x_bytes, y_bytes in (
            ("shape", layout.x_bytes, layout.y_bytes),
            ("scan", CHUNK_BYTES, CHUNK_BYTES),
        ):
            x_chunks = cut.x_length * layout.item // x_bytes
            y_chunks = y_length * layout.item // y_bytes
            x_shape, y_shape = getattr(args, f"x_{name}"), getattr(args, f"y_{name}")
            _shape(x_shape, x_bytes, cut.x_rows, x_chunks, layout.planes, cut.threads)
            _shape(y_shape, y_bytes, y_rows, y_chunks, y_planes, cut.threads)
        partials = f"{work.prefix}partials"
        launch = Launch(
            _instance(work.dtype, cut.tile, is_split(work)),
            (blocks, splits, 1),
            (cut.threads, 1, 1),
            pack(args, x=work.x, y=work.y, partials=partials),
            cut.shared_bytes,
        )
        return Fragment(
            f"{self.name}/{splits}",
            (launch, first_sum(work, partials, splits, device)),
            (Workspace(partials, splits * results * 4),),
            expected_s=expected_s(work, device, cut),
        )

    def instances(self) -> Iterable[Instance]:
        return [
            *(_instance(dtype, tile, False) for dtype in DTYPES for tile in TILES),
            *(_instance(DType.FLOAT32, tile, True) for tile in TILES),
            *first_sum_instances(),
        ]


def _shape(shape: Any, size: int, rows: int, chunks: int, planes: int, threads: int) -> None:
    """Fill in a ``CopyShape``."""
    shape.bytes, shape.places, shape.chunks = size, rows * chunks, chunks
    shape.groups = max(1, min(planes, threads // shape.places))
    for by, count in (
        (shape.by_places, shape.places if shape.groups > 1 else threads),
        (shape.by_chunks, chunks),
    ):
        by.factor, by.shift = divider(count)


def _instance(dtype: DType, tile: Tile, split: bool) -> Instance:
    return Instance.of(
        "conv/first_weight.cu",
        ELEMENT=dtype,
        FRAGMENTS=tile.fragments,
        SPLIT=split,
        THREADS=32 * tile.warps,
        BLOCKS=tile.blocks(split),
    )
