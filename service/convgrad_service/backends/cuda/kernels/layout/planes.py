"""Channels-first images that kernels read in place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand
from convgrad_service.problems.sizes import Size3

__all__ = ["ROW_BYTES", "PixelRows", "Rows", "flat_planes", "image_rows"]

ROW_BYTES = 128


@dataclass(frozen=True, slots=True)
class Rows:
    """An operand as planes of rows of contiguous pixels, a row for each channel.

    Attributes
    ----------
    extents : tuple of int
        Pixels of a row, channels, rows and planes.
    strides : tuple of int
        Of channels, rows and planes, in elements.
    """

    operand: Operand
    extents: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    def map(self, channels: int) -> TiledMap:
        """Return the tensor map of boxes of 128 bytes by ``channels``; float32 becomes TF32."""
        dtype = self.operand.dtype
        return TiledMap(
            dtype,
            self.extents,
            tuple(stride * dtype.itemsize for stride in self.strides),
            swizzle=ROW_BYTES,
            round_to_tf32=dtype is DType.FLOAT32,
            box=(ROW_BYTES // dtype.itemsize, channels, 1, 1),
        )


@dataclass(frozen=True, slots=True)
class PixelRows:
    """A weight gradient's operands as rows, in which pixels, K of the product, are contiguous.

    A row of y has the pixels (w, n) of ``batch`` images, n the fastest. Positions along W with
    different remainders by ``stride[2]`` are in different rows of x, which ``stride[1]``,
    ``dilation[1]`` and ``pad[1]`` count.
    """

    x: Rows
    y: Rows
    batch: int
    output: Size3
    stride: Size3
    dilation: Size3
    pad: Size3

    @property
    def step_pixels(self) -> int:
        """Pixels of a k-tile: 128 bytes."""
        return ROW_BYTES // self.y.operand.dtype.itemsize

    @property
    def steps(self) -> int:
        """K-tiles, none of which spans two rows."""
        pixels, _, rows, planes = self.y.extents
        return planes * rows * ceil_div(pixels, self.step_pixels)


def image_rows(work: ConvWork) -> PixelRows | None:
    """Return the planes of a pointwise work, each as one row, if `flat_planes` allows it."""
    flat = flat_planes(work)
    if flat is None:
        return None
    pixels, batch = flat.output[2], work.batch
    x, y = (
        Rows(operand, (pixels, work.groups * channels, batch, 1), (channel, image, image))
        for operand, channels in ((flat.x, work.in_channels), (flat.y, work.out_channels))
        for channel in (operand.strides[2],)
        for image in (operand.strides[0] if batch > 1 else channel,)
    )
    ones = 1, 1, 1
    return PixelRows(x, y, 1, (1, batch, pixels), ones, ones, (0, 0, 0))


def flat_planes(work: ConvWork, together: int = 1) -> ConvWork | None:
    """Return a pointwise work of stride 1 with each plane as one row, if planes allow it.

    Planes must be contiguous, and ``together`` channels start at multiples of 16 bytes.
    """
    if work.taps > 1 or max(work.stride) > 1 or work.input != work.output or any(work.pad):
        return None
    operands = []
    for operand, channels in ((work.x, work.in_channels), (work.y, work.out_channels)):
        pixels = plane_pixels(operand, work.batch, work.output, together)
        if pixels is None or channels % together:
            return None
        image, group, channel = operand.strides[:3]
        operands.append(replace(operand, strides=(image, group, channel, pixels, pixels, 1)))
    pixels = prod(work.output)
    conv = replace(
        work.conv,
        input_size=(pixels,),
        output_size=(pixels,),
        kernel_size=(1,),
        stride=(1,),
        dilation=(1,),
        padding=((0, 0),),
    )
    return replace(work, conv=conv, x=operands[0], y=operands[1])


def plane_pixels(operand: Operand, batch: int, size: Size3, together: int = 1) -> int | None:
    """Return the pixels of a plane if it is contiguous, and if ``together`` planes are in aligned
    16-byte chunks, else None."""
    pixels, chunk = 1, CHUNK_BYTES // operand.dtype.itemsize
    for extent, stride in zip(reversed(size), reversed(operand.strides[3:]), strict=True):
        if extent > 1 and stride != pixels:
            return None
        pixels *= extent
    image, _, channel = operand.strides[:3]
    whole = together * pixels % chunk == together * channel % chunk == 0
    if not whole or (batch > 1 and image % chunk):
        return None
    return pixels
