"""Depthwise fprop and dgrad with one tap: channels times their weights (depthwise_scale.cu)."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, linear_grid
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    DTYPES,
    channels_of,
    is_in_planes,
    strides_of,
    why_not_depthwise,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Solver
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand, contiguous_strides

__all__ = ["DepthwiseScale"]

THREADS = 256
MOST_ELEMENTS = 2**31 - 1
ONE = (1, 1, 1)

DepthwiseScaleArgs = structure("depthwise/depthwise_scale.cu", "DepthwiseScaleArgs")


class DepthwiseScale(Solver[ConvWork, int]):
    """fwd and bwd_data of one tap with stride 1, without padding, and one output channel per group,
    of contiguous tensors, channels last or first.

    A configuration is the elements of a channel before those of the next one.
    """

    name = "depthwise_scale"

    def solve(self, work: ConvWork, device: CudaDevice) -> int | str:
        if (reason := why_not_depthwise(work, in_planes=is_in_planes(work))) is not None:
            return reason
        if work.out_channels > 1:
            return f"{work.out_channels} output channels per group"
        if work.taps > 1 or work.stride != ONE or any(work.pad) or work.input != work.output:
            return "not one tap with stride 1 and without padding"
        if work.groups > 1 and work.w.strides[0] != 1:
            return "weights that are not contiguous"
        operands = [work.x, work.y, *([work.accumulate] if work.accumulate else [])]
        for inner in (1, prod(work.input)):
            if all(_is_contiguous(work, operand, inner) for operand in operands):
                break
        else:
            return "tensors that are not contiguous, or whose strides differ"
        if work.groups * prod(work.input) > MOST_ELEMENTS:
            return f"an image of more than {MOST_ELEMENTS} elements"
        return inner

    def fragment(self, work: ConvWork, device: CudaDevice, inner: int) -> Fragment:
        # Several launches, each from a chunk on, if 32-bit numbers do not hold all images.
        chunk = CHUNK_BYTES // work.dtype.itemsize
        fitting = MOST_ELEMENTS // (work.groups * prod(work.input))
        images = min(work.batch, fitting // chunk * chunk or 1)
        launches = (
            self._launch(work, inner, first, min(images, work.batch - first))
            for first in range(0, work.batch, images)
        )
        return Fragment(f"{self.name}_{work.direction}", tuple(launches))

    def _launch(self, work: ConvWork, inner: int, first: int, images: int) -> Launch:
        """Return the launch that computes a number of consecutive images."""
        source, result = work.sides
        args = DepthwiseScaleArgs()
        image = work.groups * prod(work.input)
        args.alpha, args.beta = work.alpha, work.beta
        args.activation, args.finishes = ACTIVATIONS[work.activation], not work.epilogue_free
        args.elements, args.channels, args.inner = images * image, channels_of(work), inner
        args.by_channels, args.by_inner = divider(work.groups), divider(inner)
        args.x = args.y = first * image * work.dtype.itemsize
        if work.accumulate is not None:
            args.accumulate = args.y
        chunks = ceil_div(args.elements, CHUNK_BYTES // work.dtype.itemsize)
        return Launch(
            _instance(work.dtype),
            linear_grid(chunks, THREADS),
            (THREADS, 1, 1),
            pack(args, x=source, w=work.w, y=result, accumulate=work.accumulate, bias=work.bias),
        )

    def instances(self) -> Iterable[Instance]:
        return [_instance(dtype) for dtype in DTYPES]


def _is_contiguous(work: ConvWork, operand: Operand, inner: int) -> bool:
    """Whether a channel has ``inner`` elements before the next one, and no others lie between."""
    size = prod(work.input)
    shape = (work.batch, size // inner, work.groups, inner)
    batch, outer, channel, last = contiguous_strides(shape)
    spatial = contiguous_strides((1, *work.input))[1:]
    expected = (batch, *(one * (outer if inner == 1 else last) for one in spatial), channel)
    extents = (work.batch, *work.input, work.groups)
    found = (*strides_of(operand), operand.strides[1])
    return all(
        extent == 1 or own == wanted
        for extent, own, wanted in zip(extents, found, expected, strict=True)
    )


def _instance(dtype: DType) -> Instance:
    return Instance.of("depthwise/depthwise_scale.cu", ELEMENT=dtype, THREADS=THREADS)
