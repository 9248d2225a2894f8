"""Direct convolution, the fallback for shapes that no other engine supports: kernels/direct.cpp.

Views are those of dense.py. No workspace is needed.
"""

from __future__ import annotations

import threading
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.arguments import conv_args, view_of
from convgrad_service.backends.cpu.library import Library
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.problems.geometry import ConvShape

__all__ = ["bwd_data", "bwd_weight", "forward"]

Array = NDArray[Any]


def forward(
    library: Library,
    workers: Workers,
    conv: ConvShape,
    input: Array,
    weight: Array,
    output: Array,
    *,
    bias: Array | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Compute output = conv(input, weight) + bias, rounded once."""
    args = conv_args(conv, input.dtype, output.dtype)
    args.x, args.w, args.y = view_of(input, 3), view_of(weight, 3), view_of(output, 3)
    args.bias = view_of(bias)
    workers.launch(library.kernel("direct_fwd"), args, cancelled=cancelled)


def bwd_data(
    library: Library,
    workers: Workers,
    conv: ConvShape,
    grad_output: Array,
    weight: Array,
    grad_input: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: Array | None = None,
    bias: Array | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Compute grad_input = alpha * grad + beta * accumulate + bias, rounded once."""
    args = conv_args(conv, grad_output.dtype, grad_input.dtype)
    args.x, args.w, args.y = view_of(grad_input, 3), view_of(weight, 3), view_of(grad_output, 3)
    args.alpha, args.bias = alpha, view_of(bias)
    if accumulate is not None:
        args.beta, args.accumulate = beta, view_of(accumulate, 3)
    workers.launch(library.kernel("direct_bwd_data"), args, cancelled=cancelled)


def bwd_weight(
    library: Library,
    workers: Workers,
    conv: ConvShape,
    input: Array,
    grad_output: Array,
    grad_weight: Array,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    accumulate: Array | None = None,
    cancelled: threading.Event | None = None,
) -> None:
    """Compute grad_weight = alpha * grad + beta * accumulate, rounded once to its own dtype."""
    args = conv_args(conv, input.dtype, grad_weight.dtype)
    args.x, args.w, args.y = view_of(input, 3), view_of(grad_weight, 3), view_of(grad_output, 3)
    args.alpha = alpha
    if accumulate is not None:
        args.beta, args.accumulate = beta, view_of(accumulate, 3)
    workers.launch(library.kernel("direct_bwd_weight"), args, cancelled=cancelled)
