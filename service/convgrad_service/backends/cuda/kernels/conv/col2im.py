"""Dense convolutions whose result has few channels, as a GEMM and col2im (col2im.cu).

An implicit GEMM with C channels of the result has tiles of 8 columns or more, of which C are used,
and reads each pixel of the source once per tap. Here a GEMM multiplies each pixel once with the
weights of all taps, taps * C columns, and col2im adds up the columns that meet in an element of the
result. The columns are written and read once, in float32; so this is for few taps, or for many
channels of the source.

This serves the input gradients of first layers and, at stride 1, forward passes of last layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd, prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import (
    ACTIVATIONS,
    CUDA_TYPES,
    linear_grid,
)
from convgrad_service.backends.cuda.kernels.core.limits import why_not_32bit_positions
from convgrad_service.backends.cuda.kernels.layout.channels_last import prepare_side
from convgrad_service.backends.cuda.kernels.layout.strided_copy import StridedCopy
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import OVERLAPPING, CudaDevice
from convgrad_service.plans.cuda.families import Family, choose
from convgrad_service.plans.cuda.program import (
    Clear,
    Fragment,
    Instance,
    Launch,
    Step,
    Workspace,
    ceil_div,
)
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Copy,
    CopyAxis,
    Operand,
    contiguous_strides,
)

__all__ = ["Col2im"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
SUM = DType.FLOAT32
THREADS = 256
MOST_CHANNELS = 8
# The columns of the GEMM are a multiple of this, so that its rows are whole vectors.
COLUMNS = 8
# Bytes of columns written and read, over the bytes of the source.
MOST_TRAFFIC = 2.0

Col2imArgs = structure("conv/col2im.cu", "Col2imArgs")


class Col2im:
    """fwd of stride 1 and bwd_data, with the GEMM of the first family that takes it."""

    name = "col2im"

    def __init__(
        self,
        narrow: Sequence[Family[ConvWork]],
        wide: Sequence[Family[ConvWork]],
        *,
        most_traffic: float = MOST_TRAFFIC,
    ) -> None:
        """Create the family.

        Parameters
        ----------
        narrow
            Families for the GEMM of 16-bit types, which write a result in float32.
        wide
            Those for float32.
        most_traffic
            The most traffic of the columns, in bytes per byte of the source.
        """
        self._narrow, self._wide, self._most_traffic = narrow, wide, most_traffic

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`. Splitting along N, D or H does not change the answer."""
        if work.direction == "bwd_weight":
            return "a gradient of the weight"
        if work.groups != 1:
            return f"{work.groups} groups"
        source, channels = work.channels
        if channels > MOST_CHANNELS:
            return f"{channels} channels of the result are more than {MOST_CHANNELS}"
        if work.taps == 1:
            return "one tap"
        if work.dtype not in DTYPES or work.result_dtype not in DTYPES:
            return f"{work.dtype.value} is not accumulated in float32"
        if work.direction == "fwd" and max(work.stride) > 1:
            return "products of pixels between the strides"
        if work.accumulate is not None and work.accumulate.strides != work.result.strides:
            return "accumulate does not lie as the result does"
        columns = 2 * _columns(work) * SUM.itemsize
        if columns > self._most_traffic * source * work.dtype.itemsize:
            return f"{columns} bytes of columns for each pixel of {source} channels"
        reason = why_not_32bit_positions(work)
        if reason is not None:
            return reason
        gemm = _gemm(work, prepare_side(work, "source", device).operand)
        reasons = [family.why_not(gemm, device) for family in self._families(work)]
        return None if None in reasons else "; ".join(map(str, reasons))

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        source = prepare_side(work, "source", device)
        gemm = _gemm(work, source.operand)
        chosen = choose(self._families(work), gemm, device)
        inner = chosen.fragment
        weight_bytes = work.channels[0] * _columns(work) * work.dtype.itemsize
        weight: list[Step] = []
        if _columns(work) != work.taps * work.channels[1]:
            weight.append(Clear(gemm.w.buffer, weight_bytes))
        weight += StridedCopy().launches(_weight_copy(work, gemm.w), device).steps
        columns_bytes = work.batch * prod(work.sizes[0]) * _columns(work) * SUM.itemsize
        sums = replace(
            self._col2im(work, gemm.result),
            overlaps=isinstance(inner.steps[-1], Launch) and device.capability >= OVERLAPPING,
        )
        return replace(
            inner,
            kernel=f"{inner.kernel}_{self.name}",
            steps=(*weight, *source.steps, *inner.steps, sums),
            workspace=(
                *source.workspace,
                Workspace(gemm.w.buffer, weight_bytes),
                Workspace(gemm.result.buffer, columns_bytes),
                *inner.workspace,
            ),
            expected_s=None,
            order=f"{chosen.family} {inner.order}",
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`. Those of the GEMM are the instances of its families."""
        return [_instance(dtype) for dtype in DTYPES]

    def _families(self, work: ConvWork) -> Sequence[Family[ConvWork]]:
        return self._wide if work.dtype is SUM else self._narrow

    def _col2im(self, work: ConvWork, columns: Operand) -> Launch:
        result = work.result
        args = Col2imArgs()
        channels, size = work.channels[1], work.sizes[1]
        n, _, c, d, h, w = result.strides
        args.elements = work.batch * channels * prod(size)
        args.result_stride[:] = n, d, h, w, c
        args.image_stride, _, args.column_stride, _, _, args.pixel_stride = columns.strides
        for dim in range(3):
            stride, step = work.stride[dim], -work.dilation[dim]
            offset = work.pad[dim]
            if work.direction == "fwd":
                step, offset = -step, -offset
            axis = args.axis[dim]
            axis.extent, axis.source, axis.taps = size[dim], work.sizes[0][dim], work.kernel[dim]
            axis.stride, axis.offset, axis.step = stride, offset, step
            axis.tap_step = stride // gcd(stride, work.dilation[dim])
        args.channels, args.channels_last = channels, c < w
        args.activation = ACTIVATIONS[work.activation]
        args.alpha, args.beta = work.alpha, work.beta
        pointers = {"columns": columns.buffer, "result": result.buffer}
        if work.accumulate is not None:
            pointers["accumulate"] = work.accumulate.buffer
        if work.bias is not None:
            pointers["bias"] = work.bias
        return Launch(
            _instance(work.result_dtype),
            linear_grid(args.elements, THREADS),
            (THREADS, 1, 1),
            pack(args, **pointers),
        )


def _columns(work: ConvWork) -> int:
    return ceil_div(work.taps * work.channels[1], COLUMNS) * COLUMNS


def _gemm(work: ConvWork, prepared: Operand) -> ConvWork:
    """Return the product of the source's pixels, whose channels are ``prepared`` to be contiguous,
    and all taps, as a pointwise convolution."""
    pixels, columns, source = work.sizes[0], _columns(work), work.channels[0]
    spatial = pixels[-work.conv.ndim :]
    ones = (1,) * work.conv.ndim
    backward = work.direction == "bwd_data"
    lead = f"{work.prefix}{work.direction}."
    image, plane, row, pixel, _ = contiguous_strides((work.batch, *pixels, columns))
    result = Operand(f"{lead}columns", SUM, (image, columns, 1, plane, row, pixel))
    strides = _weight_strides(work)
    weight = Operand(
        f"{lead}weight",
        work.dtype,
        (source * columns, *(strides if backward else strides[::-1]), 0, 0, 0),
    )
    conv = replace(
        work.conv,
        in_channels=columns if backward else source,
        out_channels=source if backward else columns,
        input_size=spatial,
        output_size=spatial,
        kernel_size=ones,
        stride=ones,
        dilation=ones,
        padding=((0, 0),) * work.conv.ndim,
    )
    return replace(
        work,
        conv=conv,
        result_dtype=SUM,
        x=result if backward else prepared,
        y=prepared if backward else result,
        w=weight,
        accumulate=None,
        bias=None,
        alpha=1.0,
        beta=0.0,
        activation="none",
        follows=False,
        leads=False,
    )


def _weight_strides(work: ConvWork) -> tuple[int, int]:
    """Return the strides of the GEMM's weight, of a channel of the source and of a column.

    The channels of the source are innermost where kernels want so: in the weight of a forward pass,
    and in TF32, whose products read both operands along the channels that they sum over.
    """
    source, columns = work.channels[0], _columns(work)
    innermost = work.direction == "fwd" or work.dtype is DType.FLOAT32
    return (1, source) if innermost else (columns, 1)


def _weight_copy(work: ConvWork, weight: Operand) -> Copy:
    """Return the copy of the taps of each result channel into the columns of the GEMM's weight."""
    _, out_channel, in_channel, *taps = work.w.strides
    backward = work.direction == "bwd_data"
    from_source, from_result = (out_channel, in_channel) if backward else (in_channel, out_channel)
    source, channels = work.channels
    to_source, to_column = _weight_strides(work)
    # Columns are in the order (t, r, s, channel).
    steps = contiguous_strides((*work.kernel, channels))
    axes = [CopyAxis(source, from_source, to_source)]
    axes += [
        CopyAxis(extent, from_, to * to_column)
        for extent, from_, to in zip(work.kernel, taps, steps, strict=False)
    ]
    axes.append(CopyAxis(channels, from_result, to_column))
    return Copy(work.w.buffer, weight.buffer, work.dtype, tuple(axes), follows=False)


def _instance(result: DType) -> Instance:
    return Instance("conv/col2im.cu", "col2im", (("ELEMENT", CUDA_TYPES[result]),))
