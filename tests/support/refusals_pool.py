"""What pooling problems refuse, as in `refusals_conv`."""

from __future__ import annotations

from typing import Any

from tests.support.refusals_conv import NCHW, X, ones

POOL = {"input": X, "kernel_size": 3}
POOL_BWD = {"grad_output": ones(8, 32, 10, 10), "kernel_size": 3}
INDICES = POOL_BWD | {"indices": ones(8, 32, 10, 10, dtype="int64")}

POOL_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("maxpool2d_fwd", POOL | {"kernel_size": 0}, "kernel_size is 0; expected at least 1"),
    (
        "maxpool2d_fwd",
        POOL | {"padding": ((0, 3), 1)},
        "padding is [0, 3] in spatial dimension 0; expected less than the effective kernel, 3 "
        "(size 3, dilation 1)",
    ),
    (
        "maxpool2d_fwd",
        POOL | {"input": ones(1, 1, 3, 3), "kernel_size": 2, "dilation": 7, "padding": 5},
        "a pooling window holds no input element in spatial dimension 0: with dilation 7 and "
        "padding 5 before it, it steps over the input's 3; expected every window to hold at "
        "least one",
    ),
    (
        "maxpool2d_fwd",
        POOL | {"layout": "GNHWC"},
        "layout is GNHWC; expected one without groups, as NHWC",
    ),
    (
        "maxpool2d_fwd",
        POOL | {"input": ones(1, 1, 1, 9, 9)},
        "input has shape (1, 1, 1, 9, 9); expected 4 dimensions (NCHW) in layout NCHW",
    ),
    (
        "maxpool3d_fwd",
        POOL | {"layout": "NCHW"},
        "layout NCHW has 2 spatial dimensions; expected 3",
    ),
    (
        "maxpool2d_fwd",
        {
            "input": ones(1, 1, 2**16, 2**16),
            "kernel_size": 2,
            "return_indices": True,
            "index_dtype": "int32",
        },
        "index_dtype is int32 and a plane of the input has 4294967296 elements; expected int64, "
        "or at most 2147483648",
    ),
    (
        "maxpool2d_bwd",
        INDICES | {"input": X},
        "both are given; expected either input or indices",
    ),
    (
        "maxpool2d_bwd",
        INDICES,
        "there are indices but no input_size; expected it, since indices are flat in the planes "
        "of an input of that size",
    ),
    (
        "maxpool2d_bwd",
        INDICES | {"input_size": (33, 30)},
        "grad_output has shape (8, 32, 10, 10); expected (8, 32, 11, 10) from input size (33, "
        "30), kernel 3x3, stride 3, padding 0, ceil_mode False" + NCHW,
    ),
    (
        "maxpool2d_bwd",
        INDICES | {"input_size": (30, 30), "indices": ones(8, 32, 10, 9, dtype="int64")},
        "indices has shape (8, 32, 10, 9); expected (8, 32, 10, 10) (grad_output's shape)" + NCHW,
    ),
    (
        "maxpool2d_bwd",
        {
            "grad_output": ones(1, 1, 2**15, 2**15),
            "indices": ones(1, 1, 2**15, 2**15, dtype="int32"),
            "kernel_size": 2,
            "input_size": (2**16, 2**16),
        },
        "the dtype of indices is int32 and a plane of the input has 4294967296 elements; expected "
        "int64, or at most 2147483648",
    ),
    (
        "maxpool2d_bwd",
        POOL_BWD | {"input": ones(8, 31, 30, 30)},
        "input has shape (8, 31, 30, 30); expected (8, 32, 30, 30) from grad_output's N and C"
        + NCHW,
    ),
    (
        "avg_pool_fwd",
        {"input": X, "kernel_size": 3, "divisor_override": 0},
        "divisor_override is 0; expected any other integer",
    ),
    (
        "avg_pool_fwd",
        {"input": X, "kernel_size": 3, "padding": 3},
        "padding is [3, 3] in spatial dimension 0; expected less than the effective kernel, 3 "
        "(size 3, dilation 1)",
    ),
    (
        "avg_pool_fwd",
        {"input": X, "kernel_size": 3, "layout": "NHWGC"},
        "input has shape (8, 32, 30, 30); expected 5 dimensions (NHWGC) in layout NHWGC",
    ),
    (
        "avg_pool_bwd",
        {"grad_output": ones(2, 3, 4, 5), "kernel_size": 2, "input_size": [8, 8]},
        "grad_output has shape (2, 3, 4, 5); expected (2, 3, 4, 4) from input size (8, 8), kernel "
        "2x2, stride 2, padding 0, ceil_mode False" + NCHW,
    ),
    (
        "avg_pool_bwd",
        {"grad_output": ones(2, 3, 4, 5), "kernel_size": 2, "input_size": [2, 4, 8, 10]},
        "input_size is (2, 4, 8, 10); expected (2, 3, 8, 10) (N, C, H, W) from the other tensors",
    ),
    (
        "adaptive_avg_pool_fwd",
        {"input": X, "output_size": [7, None, 7]},
        "output_size has 3 values; expected one integer, or 2 (one per spatial dimension, null for "
        "the input's own)" + NCHW,
    ),
    (
        "adaptive_max_pool_fwd",
        {"input": X, "output_size": [0, 7]},
        "output_size[0] is 0; expected at least 1",
    ),
    (
        "adaptive_max_pool_bwd",
        {"grad_output": ones(1, 1, 2, 2), "indices": ones(1, 1, 2, 2, dtype="int64")},
        "there are indices but no input_size; expected it, since indices are flat in the planes of "
        "an input of that size",
    ),
    (
        "max_unpool_fwd",
        {
            "input": ones(1, 1, 2, 2),
            "indices": ones(1, 1, 2, 2, dtype="int64"),
            "kernel_size": 2,
            "output_size": [4, 6],
        },
        "output_size is 6 in spatial dimension 1; expected more than 2 and less than 6, from "
        "kernel_size, stride and padding",
    ),
    (
        "max_unpool_fwd",
        {
            "input": ones(1, 1, 2, 2),
            "indices": ones(1, 1, 2, 3, dtype="int64"),
            "kernel_size": 2,
        },
        "indices has shape (1, 1, 2, 3); expected (1, 1, 2, 2) (input's shape)" + NCHW,
    ),
    (
        "max_unpool_bwd",
        {"grad_output": ones(1, 2, 4, 4), "indices": ones(1, 1, 2, 2, dtype="int32")},
        "indices has shape (1, 1, 2, 2); expected (1, 2, 2, 2) from grad_output's N and C" + NCHW,
    ),
]
