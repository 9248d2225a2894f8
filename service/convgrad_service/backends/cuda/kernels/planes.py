"""Images whose planes kernels read as they lie, channels apart and pixels side by side."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from convgrad_service.backends.cuda.kernels.channels_last import CHUNK_BYTES
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["flat_planes"]


def flat_planes(work: ConvWork) -> ConvWork | None:
    """The same work with one row a plane, where the tensors can be read as they lie: kernels of one
    tap and stride 1, whose images are planes of whole 16 bytes side by side."""
    if work.taps > 1 or max(work.stride) > 1 or work.input != work.output or any(work.pad):
        return None
    pixels, chunk = prod(work.output), CHUNK_BYTES // work.dtype.itemsize
    operands = []
    for operand in (work.x, work.y):
        inner = 1
        for extent, stride in zip(
            reversed(work.output), reversed(operand.strides[3:]), strict=True
        ):
            if extent > 1 and stride != inner:
                return None
            inner *= extent
        image, group, channel = operand.strides[:3]
        if pixels % chunk or channel % chunk or (work.batch > 1 and image % chunk):
            return None
        operands.append(replace(operand, strides=(image, group, channel, pixels, pixels, 1)))
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
