"""Images whose planes kernels read as they lie, channels apart and pixels side by side."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda.works import ConvWork, Operand, Size3

__all__ = ["flat_planes", "plane_map", "plane_pixels"]

ROW_BYTES = 128


def flat_planes(work: ConvWork) -> ConvWork | None:
    """The same work with one row a plane, where the tensors can be read as they lie: kernels of one
    tap and stride 1, whose images are planes of whole 16 bytes side by side."""
    if work.taps > 1 or max(work.stride) > 1 or work.input != work.output or any(work.pad):
        return None
    operands = []
    for operand in (work.x, work.y):
        pixels = plane_pixels(operand, work.batch, work.output)
        if pixels is None:
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


def plane_pixels(operand: Operand, batch: int, size: Size3) -> int | None:
    """How many pixels an image has, if they lie side by side, whole chunks of 16 bytes of them that
    are aligned in every image and channel."""
    pixels, chunk = 1, CHUNK_BYTES // operand.dtype.itemsize
    for extent, stride in zip(reversed(size), reversed(operand.strides[3:]), strict=True):
        if extent > 1 and stride != pixels:
            return None
        pixels *= extent
    image, _, channel = operand.strides[:3]
    if pixels % chunk or channel % chunk or (batch > 1 and image % chunk):
        return None
    return pixels


def plane_map(
    operand: Operand, batch: int, channels: int, pixels: int, box_channels: int
) -> TiledMap:
    """Boxes of 128 bytes of each of so many channels, of one image. Float32 becomes TF32."""
    image, _, channel, *_ = operand.strides
    itemsize = operand.dtype.itemsize
    strides = channel, image if batch > 1 else channel
    return TiledMap(
        operand.dtype,
        (pixels, channels, batch),
        tuple(stride * itemsize for stride in strides),
        swizzle=ROW_BYTES,
        round_to_tf32=operand.dtype is DType.FLOAT32,
        box=(ROW_BYTES // itemsize, box_channels, 1),
    )
