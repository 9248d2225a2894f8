"""Problems of the fused forward."""

from __future__ import annotations

from dataclasses import replace

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import H200
from convgrad_service.problems import GroupedConvConvFwd
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS

AMPERE = replace(H200, name="A100", capability=(8, 0))


def conv(
    batch: int,
    channels: int,
    outputs: int,
    size: tuple[int, ...],
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
    pad: int = 0,
) -> ConvShape:
    ndim = len(size)
    return ConvShape(
        batch=batch,
        groups=groups,
        in_channels=channels,
        out_channels=outputs,
        input_size=size,
        kernel_size=(kernel,) * ndim,
        output_size=tuple((extent + 2 * pad - kernel) // stride + 1 for extent in size),
        stride=(stride,) * ndim,
        padding=((pad, pad),) * ndim,
        dilation=(1,) * ndim,
    )


def fused(
    first: ConvShape, second: ConvShape, dtype: DType = DType.BFLOAT16, layout: str = "NHWC"
) -> GroupedConvConvFwd:
    return GroupedConvConvFwd(
        conv0=first,
        conv1=second,
        dtype=dtype,
        layout=LAYOUTS[layout],
        bias0=True,
        bias1=True,
        activation0="relu6",
        activation1="silu",
        precision="highest",
    )


def separable(
    channels: int,
    outputs: int,
    size: tuple[int, ...] = (14, 14),
    kernel: int = 3,
    stride: int = 1,
    batch: int = 64,
    **more: object,
) -> GroupedConvConvFwd:
    first = conv(batch, channels, channels, size, kernel, stride, channels, kernel // 2)
    second = conv(batch, channels, outputs, first.output_size)
    return fused(first, second, **more)  # type: ignore[arg-type]
