"""What is refused because it was meant in another layout, as in `refusals_conv`."""

from __future__ import annotations

from typing import Any

from tests.support.refusals_conv import ones

__all__ = ["LAYOUT_REFUSALS"]

NCW = "; layout is NCW, by default (a single image needs a batch dimension too, N = 1)"

LAYOUT_REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (
        "conv_fwd",
        {"input": ones(2, 8, 8, 32), "weight": ones(64, 32, 3, 3), "layout": "NHWC"},
        "weight has shape (64, 32, 3, 3); expected (64, 32, 3, 32) from input's 32 channels and "
        "groups 1; layout is NHWC, weights KRSC",
    ),
    (
        "conv_bwd_data",
        {"grad_output": ones(2, 8, 8, 64), "weight": ones(64, 32, 3, 3), "layout": "NHWC"}
        | {"input_size": (8, 8), "padding": 1},
        "the kernel spans 32 positions in spatial dimension 0 (size 32, dilation 1); "
        "expected at most 10, the input's 8 with padding [1, 1]; layout is NHWC, weights KRSC",
    ),
    (
        "grouped_conv_bwd_weight",
        {"input": ones(3, 8, 8), "grad_output": ones(4, 6, 6)},
        "grad_output has shape (4, 6, 6), a batch of 4; expected 3, that of input" + NCW,
    ),
    (
        "conv_fwd",
        {"input": ones(32, 8, 8), "weight": ones(64, 32, 3, 3)},
        "weight has shape (64, 32, 3, 3); expected 3 dimensions (KCS) in layout NCW; if the "
        "weight is right, the other tensor lacks its batch dimension, N = 1",
    ),
    (
        "conv_fwd",
        {"input": ones(32, 8, 8), "weight": ones(64, 32, 3, 3), "layout": "NCHW"},
        "input has shape (32, 8, 8); expected 4 dimensions (NCHW) in layout NCHW; a single sample "
        "needs a batch dimension too, N = 1",
    ),
    (
        "avg_pool_fwd",
        {"input": ones(3, 8, 8), "kernel_size": (2, 2)},
        "kernel_size has 2 values; expected one integer, or 1 (one per spatial dimension)" + NCW,
    ),
]
