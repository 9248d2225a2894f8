"""Dense convolutions whose result has few channels, as a GEMM and col2im (col2im.cu).

An implicit GEMM with C channels of the result has tiles of 8 columns or more, of which C are used,
and reads each pixel of the source once per tap. Here a GEMM multiplies each pixel once with the
weights of all taps, which makes taps * C columns, and col2im adds up what meets in an element of
the result. Columns are written and read once, in float32; so this is for few taps, or for many
channels of the source.

This serves the input gradients of first layers and, at stride 1, forward passes of last layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd, prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.conv.lowering import Lowered, LoweringFamily
from convgrad_service.backends.cuda.kernels.core.elements import ACTIVATIONS, linear_grid
from convgrad_service.backends.cuda.kernels.core.limits import (
    DTYPES,
    Requirements,
    in_order,
    why_not_32bit_positions,
)
from convgrad_service.backends.cuda.kernels.layout.channels_last import (
    CHUNK_BYTES,
    Prepared,
    prepare_side,
)
from convgrad_service.backends.cuda.kernels.layout.strided_copy import StridedCopy
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.program import Clear, Instance, Launch, Step, Workspace, ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Copy, CopyAxis, Operand, contiguous_strides

__all__ = ["Col2im"]

SUM = DType.FLOAT32
THREADS = 256
# The most channels of a result, by instance.
CHANNELS = (1, 2, 3, 4, 8)
MAX_PIXELS = 2**31 - THREADS
# Workspace that callers in a training process can spare.
MOST_COLUMNS_BYTES = 2**31

Col2imArgs = structure("conv/col2im.cu", "Col2imArgs")


def _gemm(work: ConvWork, device: CudaDevice) -> Lowered | None:
    """Return the product of all taps and the source's pixels; None if these do not have a single
    stride.

    It is a pointwise convolution whose result has a plane of pixels for each column. In float32,
    for which kernels write rows of channels, the taps are its pixels, and the pixels of the source
    its output channels.
    """
    source = prepare_side(work, "source", device)
    size = work.sizes[0]
    n, _, channel, *spatial = source.operand.strides
    pixel = spatial[2]
    if channel != 1 or not in_order((n, *spatial), (work.batch, *size)):
        return None
    chunk = CHUNK_BYTES // work.dtype.itemsize
    channels = work.channels[0]
    if source.steps:
        # The copy has zeros up to a whole chunk.
        channels = ceil_div(channels, chunk) * chunk
    rows, pixels = work.taps * work.channels[1], work.batch * prod(size)
    lead = f"{work.prefix}{work.direction}."
    weight = _weight(work, channels, f"{lead}taps", device)
    taps = weight.operand
    read = replace(source.operand, strides=(pixels * pixel, pixel, 1, 0, 0, pixel))
    columns = Operand(f"{lead}columns", SUM, (rows * pixels, 0, pixels, 0, 0, 1))
    x, w, outputs, positions = read, taps, rows, pixels
    if work.dtype is SUM:
        columns = replace(columns, strides=(rows * pixels, 0, 1, 0, 0, pixels))
        x, w, outputs, positions = taps, read, pixels, rows
    conv = replace(
        work.conv,
        batch=1,
        in_channels=channels,
        out_channels=outputs,
        input_size=(positions,),
        output_size=(positions,),
        kernel_size=(1,),
        stride=(1,),
        dilation=(1,),
        padding=((0, 0),),
    )
    product = replace(
        work,
        direction="fwd",
        conv=conv,
        result_dtype=SUM,
        x=x,
        w=replace(w, strides=(*w.strides[:3], 0, 0, 0)),
        y=columns,
        accumulate=None,
        bias=None,
        alpha=1.0,
        beta=0.0,
        activation="none",
        split_k=None,
        follows=False,
        leads=False,
    )
    between = Workspace(columns.buffer, rows * pixels * SUM.itemsize)
    workspace = (*weight.workspace, *source.workspace, between)
    return Lowered(product, (*weight.steps, *source.steps), workspace)


class Col2im(LoweringFamily):
    """fwd of stride 1 and bwd_data, with the GEMM of the first family that takes it."""

    name, suffix = "col2im", "col2im"
    copy_s = 3.2e-6

    def __init__(
        self,
        narrow: Sequence[Family[ConvWork]],
        wide: Sequence[Family[ConvWork]],
    ) -> None:
        """Create the family.

        Parameters
        ----------
        narrow
            Families for the GEMM of 16-bit types, which write a result in float32.
        wide
            Those for float32.
        """
        super().__init__(narrow)
        self._wide = wide

    def lowered(self, work: ConvWork, device: CudaDevice) -> Lowered | str:
        """See `LoweringFamily.lowered`.

        Pieces of a problem may get another answer than the whole: their order of additions differs.
        """
        if work.direction == "bwd_weight":
            return "a gradient of the weight"
        if (reason := Requirements().why_not(work, device)) is not None:
            return reason
        channels = work.channels[1]
        if channels > CHANNELS[-1]:
            return f"{channels} channels of the result are more than {CHANNELS[-1]}"
        if work.taps == 1:
            return "one tap"
        if work.result_dtype not in DTYPES:
            return f"a result in {work.result_dtype}"
        if work.direction == "fwd" and max(work.stride) > 1:
            return "a forward pass with a stride, of which most products would be unused"
        columns = work.taps * channels
        pixels = [work.batch * prod(size) for size in work.sizes]
        if max(pixels) > MAX_PIXELS:
            return f"more than {MAX_PIXELS} pixels"
        if pixels[0] * columns * SUM.itemsize > MOST_COLUMNS_BYTES:
            return f"{columns} columns at {pixels[0]} pixels: over {MOST_COLUMNS_BYTES} bytes"
        reason = why_not_32bit_positions(work)
        if reason is not None:
            return reason
        return _gemm(work, device) or "pixels of the source that do not follow one another"

    def after(
        self, work: ConvWork, device: CudaDevice, lowered: Lowered, last: Step
    ) -> Iterable[Step]:
        overlaps = isinstance(last, Launch) and device.capability >= OVERLAPPING
        return (replace(_col2im(work, lowered.work.y), overlaps=overlaps),)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`. Those of the GEMM are the instances of its families."""
        return [_instance(dtype, most) for dtype in DTYPES for most in CHANNELS]

    def families_of(self, work: ConvWork) -> Sequence[Family[ConvWork]]:
        return self._wide if work.dtype is SUM else self._families


def _weight(work: ConvWork, channels: int, name: str, device: CudaDevice) -> Prepared:
    """Return the weight as (taps, result channels, source channels), padded to ``channels``."""
    _, out_channel, in_channel, *taps = work.w.strides
    from_source, from_result = (
        (out_channel, in_channel) if work.direction == "bwd_data" else (in_channel, out_channel)
    )
    extents = (*work.kernel, work.channels[1], work.channels[0])
    target = contiguous_strides((*extents[:-1], channels))
    axes = tuple(map(CopyAxis, extents, (*taps, from_result, from_source), target))
    copy = Copy(work.w.buffer, name, work.dtype, axes, follows=False)
    rows = prod(extents[:-1])
    size_bytes = rows * channels * work.dtype.itemsize
    steps: list[Step] = [] if channels == extents[-1] else [Clear(name, size_bytes)]
    steps += StridedCopy().launches(copy, device).steps
    operand = Operand(name, work.dtype, (rows * channels, channels, 1, 0, 0, channels))
    return Prepared(operand, tuple(steps), (Workspace(name, size_bytes),))


def _col2im(work: ConvWork, columns: Operand) -> Launch:
    result = work.result
    channels, size = work.channels[1], work.sizes[1]
    n, _, c, d, h, w = result.strides
    args = Col2imArgs()
    args.result_stride[:] = n, d, h, w, c
    for axis, extent, source, taps, stride, dilation, pad in zip(
        args.axis,
        size,
        work.sizes[0],
        work.kernel,
        work.stride,
        work.dilation,
        work.pad,
        strict=True,
    ):
        backward = work.direction == "bwd_data"
        axis.extent, axis.source, axis.taps, axis.stride = extent, source, taps, stride
        axis.offset, axis.step = (pad, -dilation) if backward else (-pad, dilation)
        axis.tap_step = stride // gcd(stride, dilation)
    args.pixels = work.batch * prod(size)
    args.column_stride = max(columns.strides[2], columns.strides[5])
    args.channels, args.activation = channels, ACTIVATIONS[work.activation]
    args.alpha, args.beta = work.alpha, work.beta
    most = next(most for most in CHANNELS if most >= channels)
    return Launch(
        _instance(work.result_dtype, most),
        linear_grid(args.pixels, THREADS),
        (THREADS, 1, 1),
        pack(args, columns=columns, result=result, accumulate=work.accumulate, bias=work.bias),
    )


def _instance(result: DType, channels: int) -> Instance:
    return Instance.of("conv/col2im.cu", ELEMENT=result, CHANNELS=channels)
