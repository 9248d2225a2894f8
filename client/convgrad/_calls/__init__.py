"""All operations as functions that build a Call, public as ``convgrad.calls``.

::

    answer = client.call(convgrad.calls.conv_bwd_data(grad_output, weight, stride=2))
    answer.outputs, answer.report.kernel, answer.server_timing_s["compute"]

`Client` and `AsyncClient` have a method for each function, with the same parameters, that returns
only the outputs.
"""

from __future__ import annotations

from convgrad._calls.avg_pool import (
    adaptive_avg_pool_bwd,
    adaptive_avg_pool_fwd,
    avg_pool_bwd,
    avg_pool_fwd,
)
from convgrad._calls.conv import ConvOptions, conv_fwd, grouped_conv_conv_fwd
from convgrad._calls.conv3d import conv3d_backprop_input, conv3d_transpose
from convgrad._calls.conv_bwd import conv_backward, conv_bwd_data, grouped_conv_bwd_weight
from convgrad._calls.conv_double import conv_double_backward, conv_transpose_double_backward
from convgrad._calls.conv_transpose import conv_transpose_backward, conv_transpose_fwd
from convgrad._calls.maxima import (
    adaptive_max_pool_bwd,
    adaptive_max_pool_fwd,
    max_unpool_bwd,
    max_unpool_fwd,
)
from convgrad._calls.pool import maxpool2d_bwd, maxpool2d_fwd, maxpool3d_bwd, maxpool3d_fwd
from convgrad._calls.pool1d import maxpool1d_bwd, maxpool1d_fwd

__all__ = [
    "ConvOptions",
    "adaptive_avg_pool_bwd",
    "adaptive_avg_pool_fwd",
    "adaptive_max_pool_bwd",
    "adaptive_max_pool_fwd",
    "avg_pool_bwd",
    "avg_pool_fwd",
    "conv3d_backprop_input",
    "conv3d_transpose",
    "conv_backward",
    "conv_bwd_data",
    "conv_double_backward",
    "conv_fwd",
    "conv_transpose_backward",
    "conv_transpose_double_backward",
    "conv_transpose_fwd",
    "grouped_conv_bwd_weight",
    "grouped_conv_conv_fwd",
    "max_unpool_bwd",
    "max_unpool_fwd",
    "maxpool1d_bwd",
    "maxpool1d_fwd",
    "maxpool2d_bwd",
    "maxpool2d_fwd",
    "maxpool3d_bwd",
    "maxpool3d_fwd",
]
