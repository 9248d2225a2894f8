"""Depthwise fprop and dgrad without staging in shared memory (depthwise_direct.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct_model import (
    BLOCKS,
    THREADS,
    Direct,
    DirectLayout,
    best_layout,
    expected_s,
    formed,
    instance_layouts,
    parts_of,
    read_columns,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    DTYPES,
    channel_strides_of,
    channels_of,
    strides_of,
    why_not_depthwise,
    why_not_images,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import MOST_BLOCKS_YZ, CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, macros_of
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DepthwiseDirect"]

MOST_INDEX = 2**31 - 1
# Words of x that a thread loads ahead: with a whole kernel, and with a row of taps at a time.
MOST_WORDS, MOST_ROW_WORDS = 64, 32
# With a whole kernel that leaves few registers.
FEW_WORDS = 28
# Blocks of an SM whose threads hold more than MOST_WORDS of a row and sums, so that none spill.
FEWER_BLOCKS = 3


DepthwiseDirectArgs = structure("depthwise/depthwise_direct.cuh", "DepthwiseDirectArgs")


class DepthwiseDirect(Solver[ConvWork, DirectLayout]):
    """fwd and bwd_data with one input channel per group, of any number of channels, kernel and
    padding, in one to three dimensions. Channels last, or with ``in_planes`` in any other order.

    bwd_data sums over at most ``most_summed`` output channels per group, and in three dimensions
    over one.
    """

    name = "depthwise_direct"

    def __init__(
        self,
        layout: DirectLayout | None = None,
        *,
        in_planes: bool = False,
        most_summed: int = 1,
        dtypes: Sequence[DType] = DTYPES,
    ) -> None:
        self._layout, self._in_planes = layout, in_planes
        self._most_summed, self._dtypes = most_summed, dtypes
        if in_planes:
            self.name = f"{self.name}_planes"
        elif most_summed > 1:
            self.name = f"{self.name}_sums"

    def solve(self, work: ConvWork, device: CudaDevice) -> DirectLayout | str:
        if (reason := why_not_depthwise(work, self._dtypes, in_planes=self._in_planes)) is not None:
            return reason
        summed = work.out_channels if work.direction == "bwd_data" else 1
        if summed > self._most_summed:
            return f"sums over {summed} channels"
        given, work = work, formed(work, turn=False)
        if work.out_channels > 1 and work.direction == "bwd_data":
            return f"sums over {summed} channels in three dimensions"
        if work.accumulate is not None and work.accumulate.strides != work.sides[1].strides:
            return "accumulate and the result have different strides"
        for stride, dilation, kernel in zip(work.stride, work.dilation, work.kernel, strict=True):
            if work.direction == "bwd_data" and stride > 1 and dilation > 1 and kernel > 1:
                return "both strided and dilated"
        if not _contiguous(work):
            return "weights that are not contiguous"
        if any(pad < 0 for pad in work.pad):
            return "negative padding"
        if (reason := why_not_images(work, MOST_INDEX)) is not None:
            return reason
        layout = self._layout or best_layout(given, device)
        if _launched_images(Direct(formed(given, layout.turned), layout)) == 0:
            return "more blocks of an image than a grid can have"
        return layout

    def fragment(self, work: ConvWork, device: CudaDevice, layout: DirectLayout) -> Fragment:
        # Several launches, if a grid does not hold all images.
        direct = Direct(formed(work, layout.turned), layout)
        images = _launched_images(direct)
        launches = (
            self._launch(direct, first, min(images, work.batch - first))
            for first in range(0, work.batch, images)
        )
        # All layouts with the whole kernel add in the same order, and so do all others; turned ones
        # by columns.
        whole = "whole" if layout.rows and not layout.line else "by rows"
        return Fragment(
            f"{self.name}_{work.direction}",
            tuple(launches),
            expected_s=expected_s(work, device, layout),
            order=f"{whole}, turned" if layout.turned else whole,
        )

    def _launch(self, whole: Direct, first: int, images: int) -> Launch:
        """Return the launch that computes a number of consecutive images."""
        work, layout = whole.work, whole.layout
        work = replace(work, conv=replace(work.conv, batch=images))
        direct, (source, result) = Direct(work, layout), work.sides
        backward, pad, period = direct.backward, list(work.pad), work.kernel[2]
        args = DepthwiseDirectArgs()
        if backward and work.stride[2] == 1:
            # Forward along W, or along both axes, with flipped taps.
            args.flipped = True
            axes = (1, 2) if layout.rows and not layout.line else (2,)
            for axis in axes:
                pad[axis] = work.dilation[axis] * (work.kernel[axis] - 1) - pad[axis]
            period = work.taps if layout.rows else period
        args.x_stride[:], args.y_stride[:] = strides_of(source), strides_of(result)
        args.alpha, args.beta = work.alpha, work.beta
        args.activation = ACTIVATIONS[work.activation]
        args.finishes = not work.epilogue_free
        args.channels, args.backward, args.period = channels_of(work), backward, period
        args.x_size[:], args.y_size[:] = work.sizes
        args.kernel[:], args.pad[:] = work.kernel, pad
        args.stride[:], args.dilation[:] = work.stride, work.dilation
        args.parts, args.part = parts_of(work)
        args.base[:] = [pad // s for pad, s in zip(work.pad[1:], work.stride[1:], strict=True)]
        args.down_first, planes = direct.down_first, work.sizes[1][0]
        args.inner, args.outer = direct.across, direct.down
        if direct.down_first:
            args.inner, args.outer = args.outer, args.inner
        args.positions = work.batch * direct.image_positions
        args.transposed = layout.turned and min(work.kernel[1:]) > 1
        args.by_rows, args.by_plane = divider(work.kernel[1]), divider(prod(work.kernel[1:]))
        args.vectors, args.places = layout.vectors, layout.places
        args.by_vectors, args.by_inner = divider(layout.vectors), divider(args.inner)
        args.by_outer, args.by_planes = divider(args.outer), divider(planes)
        args.by_stride[:] = [divider(stride) for stride in work.stride]
        args.spread = direct.apart
        args.by_period, args.by_spread = divider(period), divider(args.spread)
        args.by_multiplier = divider(work.out_channels)
        args.x_channel, args.y_channel = channel_strides_of(work)
        if backward:
            args.x_channel, args.y_channel = args.y_channel, args.x_channel
        args.in_planes, args.by_places = direct.adjacent, divider(layout.places)
        args.staged = direct.staged
        args.x, args.y = (
            first * side.strides[0] * side.dtype.itemsize for side in (source, result)
        )
        if work.accumulate is not None:
            args.accumulate = args.y
        return Launch(
            _instance(work.dtype, backward, layout),
            (*direct.grid, 1),
            (THREADS, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
            direct.shared_bytes,
        )

    def instances(self) -> Iterable[Instance]:
        return [
            _instance(dtype, backward, layout)
            for dtype in DTYPES
            for vector in ((1, 2) if dtype.itemsize == 2 else (1,))
            for layout in instance_layouts(dtype, vector)
            for backward in ((False, True) if layout.stride > 1 else (False,))
        ]


def _launched_images(direct: Direct) -> int:
    """Return the images of a launch; 0 if a grid does not hold the blocks of one."""
    most = MOST_BLOCKS_YZ * direct.layout.places // direct.image_positions
    return min(direct.work.batch, most)


def _contiguous(work: ConvWork) -> bool:
    """Whether the weights of all channels are contiguous; dimensions of one tap have no stride."""
    expected, multiplier = work.taps, work.out_channels
    if work.w.strides[0] != multiplier * expected:
        return False
    if multiplier > 1 and work.w.strides[1] != expected:
        return False
    for stride, extent in zip(work.w.strides[3:], work.kernel, strict=True):
        expected //= extent
        if extent != 1 and stride != expected:
            return False
    return True


def _instance(dtype: DType, backward: bool, layout: DirectLayout) -> Instance:
    backward = backward and layout.stride > 1
    read = read_columns(layout, backward)
    if layout.line:
        ahead = 1
    elif layout.rows > 1 and (layout.kernel, layout.vector) == (7, 2):
        ahead = FEW_WORDS // read
    elif layout.rows:
        ahead = max(1, MOST_WORDS // read)
    else:
        ahead = max(2, min(layout.kernel, MOST_ROW_WORDS // read))
    by_rows = layout.line or not layout.rows
    crowded = by_rows and ahead * read + layout.columns * layout.vector >= MOST_WORDS
    return Instance.of(
        "depthwise/depthwise_direct.cu",
        ELEMENT=dtype,
        KERNEL_H=layout.kernel if layout.rows and not layout.line else 1,
        **macros_of(layout, "kernel", "stride", "rows", "columns", "vector"),
        AHEAD=ahead,
        THREADS=THREADS,
        BLOCKS=FEWER_BLOCKS if crowded else BLOCKS,
        BACKWARD=backward,
    )
