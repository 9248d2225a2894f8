"""Layers of the suites as problems, for which PyTorch is not needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convgrad.dtypes import DType
from convgrad_service.problems import ConvBackward, ConvBwdData, ConvFwd, GroupedConvBwdWeight
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS

__all__ = ["layout_of", "problem_of", "shape_of"]


def layout_of(layer: Mapping[str, Any], layout: str) -> Any:
    last = layout == "NHWC"
    spatial = "DHW"[-layer["ndim"] :]
    return LAYOUTS[f"N{spatial}C" if last else f"NC{spatial}"], last


def shape_of(layer: Mapping[str, Any]) -> ConvShape:
    pads = tuple((pad, pad) for pad in layer["padding"])
    return ConvShape(
        batch=layer["N"],
        groups=layer["groups"],
        in_channels=layer["C"],
        out_channels=layer["K"],
        input_size=tuple(layer["input_size"]),
        kernel_size=tuple(layer["kernel_size"]),
        output_size=tuple(layer["output_size"]),
        stride=tuple(layer["stride"]),
        padding=pads,
        dilation=tuple(layer["dilation"]),
    )


def problem_of(layer: Mapping[str, Any], dtype: str, layout: str, op: str) -> Any:
    """A convolution's problem, without tensors."""
    kind = {
        "conv_bwd_data": ConvBwdData,
        "grouped_conv_bwd_weight": GroupedConvBwdWeight,
        "conv_backward": ConvBackward,
        "conv_fwd": ConvFwd,
    }[op]
    parsed, _ = layout_of(layer, layout)
    more: dict[str, Any] = {"precision": "high"} if dtype == "float32" else {}
    if kind is GroupedConvBwdWeight:
        more |= {"weight_dtype": DType(dtype), "split_k": None}
    if kind is ConvFwd:
        more |= {"bias": False}
    if kind is ConvBackward:
        more |= {"wanted": ("grad_input", "grad_weight")}
    return kind(conv=shape_of(layer), dtype=DType(dtype), layout=parsed, **more)
