"""What convolutions refuse, and the sentence they refuse with: (operation, fields, sentence)."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["CONV_REFUSALS", "NCHW", "X", "ones"]

# What is added where sizes contradict each other.
NCHW = "; layout is NCHW, by default"
NCHW_KCRS = "; layout is NCHW, weights KCRS, by default"


def ones(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Of any shape, without its memory."""
    return np.broadcast_to(np.ones((), dtype), shape)


X, W, DY = ones(8, 32, 30, 30), ones(64, 32, 3, 3), ones(8, 64, 30, 30)
DATA = {"grad_output": DY, "weight": W, "padding": 1}
WEIGHT = {"input": X, "grad_output": DY, "padding": 1, "weight_size": (3, 3)}
FWD = {"input": X, "weight": W}
FUSED = {"input": X, "weight0": W, "weight1": ones(16, 64, 1, 1)}
DY3, W3 = ones(1, 20, 4, 5, 6), ones(20, 3, 3, 3, 3)
BACKPROP = {"grad_output": DY3, "weight": W3}
PACKED = {
    "grad_output": ones(1, 4, 3, 5, 6, 8),
    "weight": ones(27, 2, 16, 8),
    "grad_output_format": "NDC1HWC0",
    "weight_format": "FRACTAL_Z_3D",
}
TRANSPOSE = {"input": DY3, "weight": W3}
BACKWARD = {"grad_output": DY, "input": X, "weight": W, "padding": 1}
UP = {"input": ones(2, 6, 5, 5), "weight": ones(6, 2, 3, 3), "stride": 2, "padding": 1}
UP_BACKWARD = UP | {"grad_output": ones(2, 2, 10, 10)}

CONV_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (
        "conv_bwd_data",
        DATA | {"grad_output": ones(8, 64, 29, 29), "input_size": (30, 30)},
        "grad_output has shape (8, 64, 29, 29); expected (8, 64, 30, 30) from input_size "
        "(30, 30), kernel 3x3, stride 1, padding 1" + NCHW_KCRS,
    ),
    (
        "conv_bwd_data",
        DATA | {"weight": ones(64, 32, 3, 3, dtype="float16")},
        "weight has dtype float16 and grad_output has float32; expected one dtype for all "
        "floating tensors of a request",
    ),
    (
        "conv_bwd_data",
        DATA | {"weight": ones(48, 32, 3, 3)},
        "weight has shape (48, 32, 3, 3), 48 output channels; expected 64, the channels of "
        "grad_output" + NCHW_KCRS,
    ),
    ("conv_bwd_data", DATA | {"stride": 0}, "stride is 0; expected at least 1"),
    ("conv_bwd_data", DATA | {"padding": -1}, "padding is -1; expected at least 0"),
    ("conv_bwd_data", DATA | {"dilation": (1, 0)}, "dilation[1] is 0; expected at least 1"),
    (
        "conv_bwd_data",
        DATA | {"stride": 10**30},
        "stride is an integer of 100 bits; expected at most 2147483647",
    ),
    (
        "conv_bwd_data",
        DATA | {"stride": (1, 1, 1)},
        "stride has 3 values; expected one integer, or 2 (one per spatial dimension)" + NCHW_KCRS,
    ),
    (
        "conv_bwd_data",
        DATA | {"padding": (1,)},
        "padding has 1 value; expected one integer, or 2 (for each spatial dimension an integer "
        "or a [before, after] pair)" + NCHW_KCRS,
    ),
    ("conv_bwd_data", DATA | {"groups": 0}, "groups is 0; expected at least 1"),
    (
        "conv_bwd_data",
        DATA | {"groups": 7},
        "grad_output has 64 channels; expected a multiple of groups, 7" + NCHW_KCRS,
    ),
    (
        "conv_bwd_data",
        DATA | {"padding": 99},
        "the input that yields an output of size (30, 30) has size (-166, -166) with kernel 3x3, "
        "padding 99; expected at least 1 in every dimension" + NCHW_KCRS,
    ),
    (
        "conv_bwd_data",
        DATA | {"input_size": (30, 30, 30)},
        "input_size has 3 values; expected 2 (the spatial size) or 4 (the full shape, N, C, H, W)",
    ),
    (
        "conv_bwd_data",
        DATA | {"input_size": (8, 31, 30, 30)},
        "input_size is (8, 31, 30, 30); expected (8, 32, 30, 30) (N, C, H, W) from the other "
        "tensors",
    ),
    (
        "conv_bwd_data",
        DATA | {"input_size": (1, 1), "padding": 0},
        "the kernel spans 3 positions in spatial dimension 0 (size 3, dilation 1); "
        "expected at most 1, the input's 1 with padding [0, 0]" + NCHW_KCRS,
    ),
    (
        "conv_bwd_data",
        DATA | {"stride": (2**31 - 1, 1)},
        "the input would have spatial size (62277025764, 30); expected at most 2147483647 in any "
        "dimension",
    ),
    (
        "conv_bwd_data",
        DATA | {"stride": 2**20},
        "grad_input has shape (8, 32, 30408705, 30408705), 236720470982918400 elements; expected "
        "at most 1099511627776",
    ),
    (
        "conv_bwd_data",
        DATA | {"beta": 1.0},
        "beta is 1.0 but there is no accumulate; expected both or neither",
    ),
    (
        "conv_bwd_data",
        DATA | {"accumulate": ones(8, 32, 30, 29)},
        "accumulate has shape (8, 32, 30, 29); expected (8, 32, 30, 30) (grad_input's shape)"
        + NCHW_KCRS,
    ),
    (
        "conv_bwd_data",
        DATA | {"accumulate": ones(8, 32, 30, 30, dtype="float64")},
        "accumulate has dtype float64 and grad_output has float32; expected one dtype for all "
        "floating tensors of a request",
    ),
    (
        "conv_bwd_data",
        DATA | {"layout": "NHWGC"},
        "grad_output has shape (8, 64, 30, 30); expected 5 dimensions (NHWGC) in layout NHWGC",
    ),
    (
        "conv_bwd_data",
        {"grad_output": ones(2, 3, 8, 8), "weight": ones(2, 8, 3, 3), "layout": "NGCHW"},
        "grad_output has shape (2, 3, 8, 8); expected 5 dimensions (NGCHW) in layout NGCHW",
    ),
    (
        "conv_bwd_data",
        {
            "grad_output": ones(2, 3, 8, 9, 9),
            "weight": ones(2, 8, 4, 3, 3),
            "layout": "NGCHW",
        },
        "weight has shape (2, 8, 4, 3, 3), 2 groups; expected 3 (G of grad_output) in layout NGCHW",
    ),
    (
        "conv_bwd_data",
        {
            "grad_output": ones(2, 3, 8, 9, 9),
            "weight": ones(3, 8, 4, 3, 3),
            "layout": "NGCHW",
            "groups": 2,
        },
        "groups is 2; expected 3, the G of grad_output's shape (2, 3, 8, 9, 9) in layout NGCHW",
    ),
    (
        "conv_bwd_data",
        DATA | {"grad_output": ones(0, 64, 30, 30)},
        "grad_output has shape (0, 64, 30, 30); expected at least 1 in every dimension",
    ),
    (
        "conv_bwd_data",
        DATA | {"grad_output": ones(8, 64, 30, 30, dtype="int32")},
        "grad_output has dtype int32; expected one of float16, bfloat16, float32, float64",
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"weight_size": None, "grad_output": ones(8, 64, 15, 15), "stride": 2},
        "weight_size is missing; expected it, since in spatial dimension 0 input has 30 positions "
        "and grad_output 15, with stride 2, padding [1, 1] and dilation 1: kernels of 3 to 4 are "
        "possible",
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"weight_size": None, "grad_output": ones(8, 64, 30, 33)},
        "in spatial dimension 1 input has 30 positions and grad_output 33, with stride 1, padding "
        "[1, 1] and dilation 1; expected sizes that some kernel size connects" + NCHW,
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"weight_size": (64, 32, 3, 3), "groups": 2},
        "weight_size is (64, 32, 3, 3); expected (64, 16, 3, 3) (K, C, R, S) from input's 32 "
        "channels, grad_output's 64 and groups 2",
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"weight_size": (5, 5)},
        "grad_output has shape (8, 64, 30, 30); expected (8, 64, 28, 28) from input_size (30, "
        "30), kernel 5x5, stride 1, padding 1" + NCHW,
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"grad_output": ones(7, 64, 30, 30)},
        "grad_output has shape (7, 64, 30, 30), a batch of 7; expected 8, that of input" + NCHW,
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"weight_dtype": "float16"},
        "weight_dtype is 'float16'; expected float32 for float32 inputs",
    ),
    ("grouped_conv_bwd_weight", WEIGHT | {"split_k": 0}, "split_k is 0; expected at least 1"),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"outputs": ("grad_bias",), "accumulate": W},
        "there is an accumulate but outputs lacks grad_weight, to which it is added; expected "
        "both or neither",
    ),
    (
        "grouped_conv_bwd_weight",
        WEIGHT | {"accumulate": ones(64, 32, 3, 3, dtype="float16")},
        "accumulate has dtype float16; expected float32, grad_weight's",
    ),
    (
        "conv_fwd",
        FWD | {"weight": ones(64, 31, 3, 3)},
        "weight has shape (64, 31, 3, 3); expected (64, 32, 3, 3) from input's 32 channels and "
        "groups 1" + NCHW_KCRS,
    ),
    (
        "conv_fwd",
        FWD | {"bias": ones(32)},
        "bias has shape (32,); expected (64,) (one value for each output channel)" + NCHW_KCRS,
    ),
    (
        "conv_fwd",
        FWD | {"dilation": 15},
        "the kernel spans 31 positions in spatial dimension 0 (size 3, dilation 15); "
        "expected at most 30, input's 30 with padding [0, 0]" + NCHW_KCRS,
    ),
    (
        "conv_fwd",
        FWD | {"padding": 2**31 - 1},
        "the output would have spatial size (4294967322, 4294967322); expected at most 2147483647 "
        "in any dimension",
    ),
    (
        "conv_fwd",
        {"input": ones(8, 31, 30, 30), "weight": W, "groups": 2},
        "input has 31 channels; expected a multiple of groups, 2" + NCHW_KCRS,
    ),
    (
        "conv_fwd",
        {"input": X, "weight": ones(63, 16, 3, 3), "groups": 2},
        "the output of weight has 63 channels; expected a multiple of groups, 2" + NCHW_KCRS,
    ),
    (
        "grouped_conv_conv_fwd",
        FUSED | {"weight1": ones(16, 63, 1, 1)},
        "weight1 has shape (16, 63, 1, 1); expected (16, 64, 1, 1) from the intermediate's 64 "
        "channels and groups 1" + NCHW_KCRS,
    ),
    (
        "grouped_conv_conv_fwd",
        FUSED | {"conv0": {"stride": -1}},
        "conv0.stride is -1; expected at least 1",
    ),
    (
        "grouped_conv_conv_fwd",
        FUSED | {"weight1": ones(16, 64, 29, 29)},
        "the kernel spans 29 positions in spatial dimension 0 (size 29, dilation 1); "
        "expected at most 28, the intermediate's 28 with padding [0, 0]" + NCHW_KCRS,
    ),
    (
        "conv3d_backprop_input",
        BACKPROP | {"region": {"d": (2, 9)}},
        "region.d is [2, 9]; expected 0 <= start < stop <= 6, the size of grad_input",
    ),
    (
        "conv3d_backprop_input",
        BACKPROP | {"output_padding": 1},
        "output_padding is 1 in spatial dimension 0; expected less than 1, the larger of stride 1 "
        "and dilation 1",
    ),
    (
        "conv3d_backprop_input",
        BACKPROP | {"input_size": (6, 7, 9)},
        "grad_output has size (4, 5, 6) (D, H, W); expected (4, 5, 7) from input_size (6, 7, 9)",
    ),
    (
        "conv3d_backprop_input",
        PACKED,
        "weight_size is missing; expected [K, C/groups, D, H, W] with a weight in FRACTAL_Z_3D, "
        "whose shape (27, 2, 16, 8) does not imply it",
    ),
    (
        "conv3d_backprop_input",
        PACKED | {"weight_size": (20, 9, 3, 3, 3)},
        "weight has shape (27, 2, 16, 8); expected (54, 2, 16, 8) (G*T*C1*R*S, N1, N0, C0) from "
        "weight_size (20, 9, 3, 3, 3) and groups 1",
    ),
    (
        "conv3d_backprop_input",
        PACKED | {"weight_size": (20, 3, 3, 3, 3), "grad_output": ones(1, 4, 2, 5, 6, 8)},
        "grad_output has shape (1, 4, 2, 5, 6, 8); expected (1, 4, 3, 5, 6, 8) (N, D, C1, H, W, "
        "C0) from the weight's 20 output channels",
    ),
    (
        "conv3d_backprop_input",
        BACKPROP
        | {
            "grad_output": DY3.astype("float64"),
            "weight": W3.astype("float64"),
            "output_format": "NDC1HWC0",
        },
        "NDC1HWC0 holds float64; expected one of float16, bfloat16, float32",
    ),
    (
        "conv3d_transpose",
        TRANSPOSE | {"weight": ones(19, 3, 3, 3, 3)},
        "weight has shape (19, 3, 3, 3, 3), for 19 input channels; expected 20, the channels of "
        "input ([C_in, C_out/groups, *kernel])"
        "; layout is NCDHW, weights KCTRS, by default",
    ),
    (
        "conv3d_transpose",
        TRANSPOSE | {"bias": ones(20)},
        "bias has shape (20,); expected (3,) (one value for each output channel)"
        "; layout is NCDHW, weights KCTRS, by default",
    ),
    (
        "conv_backward",
        BACKWARD | {"input": ones(8, 32, 31, 30)},
        "grad_output has shape (8, 64, 30, 30); expected (8, 64, 31, 30) from input_size (31, "
        "30), kernel 3x3, stride 1, padding 1" + NCHW_KCRS,
    ),
    (
        "conv_transpose_fwd",
        UP | {"output_padding": 2},
        "output_padding is 2 in spatial dimension 0; expected less than 2, the larger of stride 2 "
        "and dilation 1",
    ),
    (
        "conv_transpose_fwd",
        UP | {"padding": 6},
        "the output of an input of size (5, 5) has size (-1, -1) with kernel 3x3, padding 6; "
        "expected at least 1 in every dimension" + NCHW_KCRS,
    ),
    (
        "conv_transpose_backward",
        UP_BACKWARD,
        "grad_output has shape (2, 2, 10, 10); expected (2, 2, 9, 9) from input's shape (2, 6, 5, "
        "5), kernel 3x3, stride 2, padding 1 and output_padding 0; output_padding 1 would yield "
        "its size" + NCHW_KCRS,
    ),
    (
        "conv_transpose_backward",
        UP_BACKWARD | {"grad_output": ones(2, 3, 9, 9)},
        "grad_output has shape (2, 3, 9, 9); expected (2, 2, 9, 9) from input's shape (2, 6, 5, "
        "5), kernel 3x3, stride 2, padding 1 and output_padding 0" + NCHW_KCRS,
    ),
    (
        "conv_double_backward",
        BACKWARD,
        "there is none of grad_grad_input, grad_grad_weight, grad_grad_bias; expected at least one",
    ),
    (
        "conv_double_backward",
        BACKWARD | {"grad_grad_weight": ones(64, 32, 3, 2)},
        "grad_grad_weight has shape (64, 32, 3, 2); expected (64, 32, 3, 3) (the shape of weight)"
        + NCHW_KCRS,
    ),
    (
        "conv_transpose_double_backward",
        UP_BACKWARD | {"output_padding": 1, "grad_grad_bias": ones(6)},
        "grad_grad_bias has shape (6,); expected (2,) (one value for each output channel)"
        + NCHW_KCRS,
    ),
]
