"""Dense wgrad of float32 (``precision: high``) as TF32 products of copies with the batch last.

wgmma multiplies TF32 with K contiguous only, and K of a weight gradient is pixels, where channels
last have channels. Both operands are copied to (D, H, C, W, N): the pixels of a row, of all images,
are contiguous for each channel, and taps along W lie whole images apart, so the copy engine can
read the row of any tap. Positions along W with different remainders by the stride are in different
rows (``PixelRows``). The copies read and write each element once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.core.limits import Requirements, is_pointwise
from convgrad_service.backends.cuda.kernels.layout.channels_last import overlapping, prepare_side
from convgrad_service.backends.cuda.kernels.layout.planes import PixelRows, Rows
from convgrad_service.backends.cuda.kernels.layout.transpose import Transpose
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, Step, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Copy, CopyAxis, Operand
from convgrad_service.problems.sizes import Size3

__all__ = ["BatchLastWeight"]

# Float32 elements of 16 bytes, which the copy engine's coordinates are multiples of.
CHUNK = 4
# On an H200: a copy's launch, bytes that it reads and writes per second (some in the L2), and the
# measured time of a product over its modelled time. On 46 layers the sum errs by 7 % on average.
COPY_S, BYTES_PER_S, PRODUCT_SCALE = 3e-6, 5.0e12, 0.88


NEEDS = Requirements((DType.FLOAT32,), tf32=True)


class BatchLastWeight:
    """bwd_weight of float32 (``precision: high``) on sm_90a, by `HopperWeight`."""

    name = "batch_last_weight"

    def __init__(self, product: HopperWeight | None = None) -> None:
        """Create the family; ``product`` computes the products."""
        self._product = product or HopperWeight()
        self._copy = Transpose()

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        if (reason := NEEDS.why_not(work, device)) is not None:
            return reason
        read, *_ = _channels_last(work, device)
        if read.batch % CHUNK:
            return f"{read.batch} images; expected a multiple of {CHUNK}"
        if read.input[2] % read.stride[2]:
            return f"rows of {read.input[2]} are not whole strides of {read.stride[2]}"
        rows = _rows(read)
        for copy in _copies(read, rows):
            if (reason := self._copy.why_not(copy, device)) is not None:
                return reason
        return self._product.why_not(read, device, rows)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        read, steps, first = _channels_last(work, device)
        rows = _rows(read)
        for copy in _copies(read, rows):
            steps += self._copy.launches(replace(copy, follows=bool(first)), device).steps
        workspace = [Workspace(one.operand.buffer, _bytes(one)) for one in (rows.x, rows.y)]
        product = self._product.launches(read, device, rows=rows)
        waiting, *others = product.steps
        if isinstance(waiting, Launch):
            waiting = replace(waiting, overlaps=True)
        product_s = PRODUCT_SCALE * (product.expected_s or 0.0)
        return replace(
            product,
            kernel=f"{self.name}_{product.kernel}",
            steps=(*overlapping(steps, device), waiting, *others),
            workspace=(*first, *workspace, *product.workspace),
            expected_s=_copied_s(first) + (_copied_s(workspace) + product_s),
        )

    def instances(self) -> Iterable[Instance]:
        return [*self._copy.instances(), *self._product.instances()]


def _bytes(rows: Rows) -> int:
    return prod(rows.extents) * rows.operand.dtype.itemsize


def _copied_s(copies: Iterable[Workspace]) -> float:
    return sum(COPY_S + 2 * one.size_bytes / BYTES_PER_S for one in copies)


def _channels_last(
    work: ConvWork, device: CudaDevice
) -> tuple[ConvWork, list[Step], list[Workspace]]:
    """Return the work on channels-last operands, and how they are made where they are copies."""
    x, y = (prepare_side(work, name, device) for name in ("input", "grad_output"))
    # Copies to rows are not copies of the operands, which another work may share.
    read = replace(work, x=x.operand, y=y.operand, prefix=f"{work.prefix}rows_")
    return _flat(read), [*x.steps, *y.steps], [*x.workspace, *y.workspace]


def _flat(work: ConvWork) -> ConvWork:
    """Return pointwise work of stride 1 with all pixels as images, if one stride separates them."""
    if not is_pointwise(work):
        return work
    extents = (work.batch, *work.output)
    operands: list[Operand] = []
    for operand in (work.x, work.y):
        n, g, c, *spatial = operand.strides
        pitch = count = 0
        for extent, stride in zip(reversed(extents), reversed((n, *spatial)), strict=True):
            if extent > 1:
                pitch, count = pitch or stride, count or 1
                if stride != pitch * count:
                    return work
                count *= extent
        operands.append(replace(operand, strides=(pitch, g, c, 0, 0, 0)))
    point = (1,)
    conv = replace(
        work.conv,
        batch=prod(extents),
        input_size=point,
        output_size=point,
        kernel_size=point,
        stride=point,
        dilation=point,
        padding=((0, 0),),
    )
    return replace(work, conv=conv, x=operands[0], y=operands[1])


def _rows(work: ConvWork) -> PixelRows:
    """Return the operands as copied."""
    deep, high, wide = work.stride
    return PixelRows(
        _copied(work, "input", work.x, work.in_channels, work.input, wide),
        _copied(work, "grad_output", work.y, work.out_channels, work.output, 1),
        work.batch,
        work.output,
        (deep, high * wide, wide),
        (work.dilation[0], work.dilation[1] * wide, work.dilation[2]),
        (work.pad[0], work.pad[1] * wide, work.pad[2]),
    )


def _copied(
    work: ConvWork, name: str, operand: Operand, channels: int, size: Size3, phases: int
) -> Rows:
    pixels, rows = size[2] // phases * work.batch, size[1] * phases
    copy = replace(operand, buffer=f"{work.prefix}{name}")
    extents = pixels, channels, rows, size[0]
    return Rows(copy, extents, (pixels, channels * pixels, rows * channels * pixels))


def _copies(work: ConvWork, rows: PixelRows) -> tuple[Copy, Copy]:
    """Return the copies of the input and of grad_output."""
    return (
        _copy(work, work.x, rows.x, work.input, work.stride[2]),
        _copy(work, work.y, rows.y, work.output, 1),
    )


def _copy(work: ConvWork, source: Operand, target: Rows, size: Size3, phases: int) -> Copy:
    (_, channels, _, _), (of_channel, of_row, of_plane) = target.extents, target.strides
    n, _, c, d, h, w = source.strides
    axes = (
        CopyAxis(size[0], d, of_plane),
        CopyAxis(size[1], h, phases * of_row),
        CopyAxis(phases, w, of_row),
        CopyAxis(channels, c, of_channel),
        CopyAxis(size[2] // phases, phases * w, work.batch),
        CopyAxis(work.batch, n, 1),
    )
    return Copy(source.buffer, target.operand.buffer, work.dtype, axes, follows=False)
