"""The gradient of a bias: sums over everything but the channel."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from convgrad.dtypes import FLOATING, DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.split_sum import split_sum, split_sum_instances
from convgrad_service.plans.cuda_device import CudaDevice, sum_dtype
from convgrad_service.plans.cuda_program import Fragment, Instance, Launch, Workspace, ceil_div
from convgrad_service.plans.cuda_works import ChannelSums, Operand

__all__ = ["ChannelSumsKernel"]

BLOCK, LANES = 256, 32
LEAST_PIXELS = 2048
BLOCKS_PER_MULTIPROCESSOR = 8
MOST_SPLITS = 256


class ChannelSumsArgs(ctypes.Structure):
    """See ``channel_sums.cu``."""

    _fields_ = (
        ("y", ctypes.c_uint64),
        ("partials", ctypes.c_uint64),
        ("y_stride", ctypes.c_int64 * 6),
        ("pixels", ctypes.c_int64),
        ("split_pixels", ctypes.c_int64),
        ("channels", ctypes.c_int32),
        ("out_channels", ctypes.c_int32),
        ("y_size", ctypes.c_int32 * 3),
        ("lanes", ctypes.c_int32),
    )


class ChannelSumsKernel:
    """Every bias gradient, in any dtype and layout."""

    name = "channel_sums"

    def why_not(self, work: ChannelSums, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        return None

    def launches(self, work: ChannelSums, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        lanes = work.y.channels_last and work.conv.out_channels_per_group > 1
        lanes = lanes or work.y.strides[1] == 1
        blocks = ceil_div(work.channels, LANES) if lanes else work.channels
        wanted = ceil_div(BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors, blocks)
        count = max(1, min(wanted, MOST_SPLITS, work.pixels // LEAST_PIXELS))
        pixels = ceil_div(work.pixels, count)
        count = ceil_div(work.pixels, pixels)

        args = ChannelSumsArgs()
        args.y_stride[:], args.y_size[:] = work.y.strides, work.output
        args.pixels, args.split_pixels = work.pixels, pixels
        args.channels, args.out_channels = work.channels, work.conv.out_channels_per_group
        args.lanes = lanes
        partials = f"{work.prefix}partials"
        summed = sum_dtype(work.y.dtype)
        first = Launch(
            _instance(work.y.dtype),
            (blocks * count, 1, 1),
            (BLOCK, 1, 1),
            pack(args, y=work.y.buffer, partials=partials),
        )
        result = Operand(work.result, work.result_dtype, (0, 0, 0, 0, 0, 1))
        second = split_sum(partials, count, (1, 1, 1, 1, 1, work.channels), result, summed)
        workspace = Workspace(partials, count * work.channels * summed.itemsize)
        return Fragment(self.name, (first, second), (workspace,))

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [*map(_instance, FLOATING), *split_sum_instances()]


def _instance(dtype: DType) -> Instance:
    return Instance("channel_sums.cu", "channel_sums", (("ELEMENT", CUDA_TYPES[dtype]),))
