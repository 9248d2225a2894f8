"""A two-dimensional convolution as a piece of work for the planner of GPU kernels."""

from __future__ import annotations

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Direction,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS, activation_shape, weight_shape

ADA = CudaDevice("L40S", (8, 9), 142, 101376, 102400, 96 * 2**20, 48 * 10**9)


def work_of(
    direction: Direction,
    *,
    batch: int = 2,
    channels: tuple[int, int] = (64, 128),
    size: int = 14,
    kernel: int = 3,
    stride: int = 1,
    pad: int = 1,
    dilation: int = 1,
    groups: int = 1,
    layout: str = "NHWC",
    dtype: DType = DType.BFLOAT16,
    precision: str = "highest",
) -> ConvWork:
    out = (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
    order = LAYOUTS[layout]
    conv = ConvShape(
        batch=batch,
        groups=groups,
        in_channels=channels[0] * groups,
        out_channels=channels[1] * groups,
        input_size=(size, size),
        kernel_size=(kernel, kernel),
        output_size=(out, out),
        stride=(stride, stride),
        padding=((pad, pad), (pad, pad)),
        dilation=(dilation, dilation),
    )
    x, y = (
        activation_operand(
            name, dtype, order, activation_shape(order, batch, groups, total, extent), groups
        )
        for name, total, extent in (
            ("x", conv.in_channels, conv.input_size),
            ("y", conv.out_channels, conv.output_size),
        )
    )
    shape = weight_shape(order, groups, conv.in_channels, conv.out_channels, conv.kernel_size)
    return ConvWork(
        direction=direction,
        conv=conv,
        dtype=dtype,
        result_dtype=dtype,
        x=x,
        w=weight_operand("w", dtype, order, shape, groups),
        y=y,
        precision=precision,
    )


def pointwise(
    batch: int, channels: tuple[int, int], size: int, direction: Direction = "fwd"
) -> ConvWork:
    """A 1x1 convolution in bfloat16, channels last."""
    return work_of(direction, batch=batch, channels=channels, size=size, kernel=1, pad=0)
