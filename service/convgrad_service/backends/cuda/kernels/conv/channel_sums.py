"""Bias gradients: sums over N, D, H and W per channel (channel_sums.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice, sum_dtype
from convgrad_service.plans.cuda.program import (
    ZEROS,
    ZEROS_BYTES,
    Fragment,
    Instance,
    Launch,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import ChannelSums

__all__ = ["ChannelSumsKernel"]

THREADS, WIDEST = 256, 32
VECTOR_BYTES = 16
# Two blocks per SM keep enough loads in flight; more would leave more partial sums to reduce.
BLOCKS_PER_MULTIPROCESSOR = 2
MOST_SPLITS = 256
# The fewest units per thread that amortise the block's reduction.
LEAST_UNITS_A_THREAD = 4


ChannelSumsArgs = structure("conv/channel_sums.cu", "ChannelSumsArgs")


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as units x columns of vectors, as in ``channel_sums.cu``."""

    vector: int
    along_channels: bool
    columns: int
    group_columns: int
    column_stride: int
    group_stride: int
    units: int
    span_units: int
    unit_stride: int
    span_stride: int

    @classmethod
    def of(cls, work: ChannelSums) -> _View:
        """Return the view of grad_output, whose pixels have a single stride."""
        n, g, k, _, _, w = work.y.strides
        pixels, samples = prod(work.output), work.batch
        channels, groups = work.conv.out_channels_per_group, work.conv.groups
        one_run = groups == 1 or g == channels * k
        run = work.channels if one_run else channels
        widest = VECTOR_BYTES // work.y.dtype.itemsize
        along_channels = k == 1
        inner, steps = (run, [w]) if along_channels else (pixels, [k])
        steps += [] if samples == 1 else [n]
        steps += [] if one_run else [g]
        fits = inner % widest == 0 and all(step % widest == 0 for step in steps)
        vector = widest if fits and (along_channels or w == 1) else 1
        # A vector along pixels holds several units, one along channels several columns.
        across, along = (vector, 1) if along_channels else (1, vector)
        one_span = samples == 1 or (along_channels and n == pixels * w)
        return cls(
            vector=vector,
            along_channels=along_channels,
            columns=work.channels // across,
            group_columns=run // across,
            column_stride=k * across,
            group_stride=0 if one_run else g,
            units=work.pixels // along,
            span_units=(work.pixels if one_span else pixels) // along,
            unit_stride=w * along,
            span_stride=n,
        )


class ChannelSumsKernel:
    """Bias gradients in any dtype, of tensors whose pixels have a single stride."""

    name = "channel_sums"

    def why_not(self, work: ChannelSums, device: CudaDevice) -> str | None:
        _, _, _, d, h, w = work.y.strides
        rows, columns = work.output[1:]
        nested = (h == columns * w or rows == 1) and (
            d == rows * columns * w or work.output[0] == 1
        )
        return None if nested else f"positions with strides {(d, h, w)} are not one run"

    def launches(self, work: ChannelSums, device: CudaDevice) -> Fragment:
        view = _View.of(work)
        # Along pixels, consecutive threads read consecutive vectors of one channel.
        width = min(WIDEST, view.columns) if view.along_channels else 1
        tiles = ceil_div(view.columns, width)
        wanted = ceil_div(BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors, tiles)
        worth = view.units // (THREADS // width * LEAST_UNITS_A_THREAD)
        splits = max(1, min(wanted, worth, MOST_SPLITS))
        if tiles > ZEROS_BYTES // 4:
            splits = 1  # too few counters, and enough blocks without splitting
        split_units = ceil_div(view.units, splits)
        splits = ceil_div(view.units, split_units)

        args = ChannelSumsArgs(
            column_stride=view.column_stride,
            group_stride=view.group_stride,
            unit_stride=view.unit_stride,
            span_stride=view.span_stride,
            span_units=view.span_units,
            units=view.units,
            split_units=split_units,
            columns=view.columns,
            group_columns=view.group_columns,
            width=width,
            column_tiles=tiles,
            splits=splits,
            channels=work.channels,
            wide_result=work.result_dtype is not work.y.dtype,
        )
        partials = f"{work.prefix}partials" if splits > 1 else None
        packed = pack(
            args,
            y=work.y.buffer,
            partials=partials,
            result=work.result,
            arrived=ZEROS if splits > 1 else None,
        )
        instance = _instance(work.y.dtype, view.vector, view.along_channels)
        launch = Launch(instance, (tiles * splits, 1, 1), (THREADS, 1, 1), packed)
        size = splits * work.channels * sum_dtype(work.y.dtype).itemsize
        workspace = (Workspace(partials, size),) if partials else ()
        return Fragment(self.name, (launch,), workspace)

    def instances(self) -> Iterable[Instance]:
        for dtype in FLOATING:
            for vector in (1, VECTOR_BYTES // dtype.itemsize):
                for along_channels in (False, True):
                    yield _instance(dtype, vector, along_channels)


def _instance(dtype: DType, vector: int, along_channels: bool) -> Instance:
    return Instance.of(
        "conv/channel_sums.cu", ELEMENT=dtype, VECTOR=vector, CHANNELS=along_channels
    )
