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
from convgrad_service.backends.cuda.kernels.conv.dense_weight import weight_expected_s
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.layout.channels_last import Prepared, prepare_side
from convgrad_service.backends.cuda.kernels.layout.planes import PixelRows, Rows
from convgrad_service.backends.cuda.kernels.layout.transpose import Transpose
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Step, Workspace
from convgrad_service.plans.cuda.works import ConvWork, Copy, CopyAxis, Operand, Size3

__all__ = ["BatchLastWeight"]

# Float32 elements of 16 bytes, which the copy engine's coordinates are multiples of.
CHUNK = 4
# On an H200: the start of the three launches, bytes read and written per second by a transposition,
# images of its tiles, and the measured time of a product over its modelled time.
START_S, BYTES_PER_S, TILE_IMAGES, PRODUCT_SCALE = 8e-6, 3.2e12, 64, 0.8
# dense_weight's measured time in TF32 on an H200, over its modelled time: 1.22 to 1.36.
TF32_SLOWER = 1.2


class BatchLastWeight:
    """bwd_weight of float32 (``precision: high``) on sm_90a, by `HopperWeight`."""

    name = "batch_last_weight"

    def __init__(self, product: HopperWeight | None = None, *, everywhere: bool = False) -> None:
        """Create the family.

        Parameters
        ----------
        product
            Computes the products.
        everywhere
            Take work even if products without copies are expected to be faster.
        """
        self._product, self._everywhere = product or HopperWeight(), everywhere
        self._copy = Transpose()

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        if (work.dtype, work.precision) != (DType.FLOAT32, "high"):
            return f"{work.dtype} of {work.precision} precision"
        if work.groups > 1:
            return f"{work.groups} groups of channels"
        if work.batch % CHUNK:
            return f"{work.batch} images; expected a multiple of {CHUNK}"
        if work.input[2] % work.stride[2]:
            return f"rows of {work.input[2]} are not whole strides of {work.stride[2]}"
        rows = _rows(work)
        for source, target, size, phases in _sides(work, rows, device):
            copy = _copy(work, source.operand, target, size, phases)
            if (reason := self._copy.why_not(copy, device)) is not None:
                return reason
        product = _product(work)
        if (reason := self._product.why_not(product, device, rows)) is not None:
            return reason
        tf32_s = TF32_SLOWER * weight_expected_s(work, device)
        if not self._everywhere and (self.launches(work, device).expected_s or 0.0) > tf32_s:
            return "few products for its size: copying would cost more than it saves"
        return None

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        rows = _rows(work)
        steps: list[Step] = []
        workspace: list[Workspace] = []
        for source, target, size, phases in _sides(work, rows, device):
            copy = _copy(work, source.operand, target, size, phases)
            steps += (*source.steps, *self._copy.launches(copy, device).steps)
            workspace += source.workspace
            size_bytes = prod(target.extents) * work.dtype.itemsize
            workspace.append(Workspace(target.operand.buffer, size_bytes))
        copied = 2 * sum(item.size_bytes for item in workspace)
        copied_s = copied / BYTES_PER_S * max(1.0, TILE_IMAGES / work.batch)
        fragment = self._product.launches(_product(work), device, rows=rows)
        return replace(
            fragment,
            kernel=f"{self.name}_{fragment.kernel}",
            steps=(*steps, *fragment.steps),
            workspace=(*workspace, *fragment.workspace),
            expected_s=START_S + copied_s + PRODUCT_SCALE * (fragment.expected_s or 0.0),
        )

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return [*self._copy.instances(), *self._product.instances()]


def _product(work: ConvWork) -> ConvWork:
    """Return the work with a prefix of its own: its copies are not copies of the operands, which
    another work may share."""
    return replace(work, prefix=f"{work.prefix}rows_")


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
    copy = replace(operand, buffer=f"{work.prefix}{name}_batch_last")
    extents = pixels, channels, rows, size[0]
    return Rows(copy, extents, (pixels, channels * pixels, rows * channels * pixels))


def _sides(
    work: ConvWork, rows: PixelRows, device: CudaDevice
) -> tuple[tuple[Prepared, Rows, Size3, int], ...]:
    """Return each operand, channels last; its copy, size and phases."""
    return (
        (prepare_side(work, "input", device), rows.x, work.input, work.stride[2]),
        (prepare_side(work, "grad_output", device), rows.y, work.output, 1),
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
