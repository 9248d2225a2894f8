"""The runner of each problem class."""

from __future__ import annotations

from collections.abc import Mapping

from convgrad_service.backends.cpu import pooling, window_pooling
from convgrad_service.backends.cpu.conv3d_formats import run_backprop_input
from convgrad_service.backends.cpu.convolution import (
    run_backward,
    run_bwd_data,
    run_bwd_weight,
    run_forward,
)
from convgrad_service.backends.cpu.fused_forward import run_fused
from convgrad_service.backends.cpu.passes import run_passes
from convgrad_service.backends.cpu.runner import Runner
from convgrad_service.problems import (
    AdaptiveAvgPoolBwd,
    AdaptiveAvgPoolFwd,
    AdaptiveMaxPoolBwd,
    AdaptiveMaxPoolFwd,
    AvgPoolBwd,
    AvgPoolFwd,
    Conv3dBackpropInput,
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    ConvPasses,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    MaxUnpoolBwd,
    MaxUnpoolFwd,
    Problem,
)

__all__ = ["RUNNERS"]

RUNNERS: Mapping[type[Problem], Runner] = {
    ConvBwdData: run_bwd_data,
    GroupedConvBwdWeight: run_bwd_weight,
    ConvFwd: run_forward,
    ConvBackward: run_backward,
    ConvPasses: run_passes,
    Conv3dBackpropInput: run_backprop_input,
    MaxPoolFwd: pooling.run_forward,
    MaxPoolBwd: pooling.run_backward,
    GroupedConvConvFwd: run_fused,
    AvgPoolFwd: window_pooling.run_average_forward,
    AvgPoolBwd: window_pooling.run_average_backward,
    AdaptiveAvgPoolFwd: window_pooling.run_average_forward,
    AdaptiveAvgPoolBwd: window_pooling.run_average_backward,
    AdaptiveMaxPoolFwd: window_pooling.run_adaptive_max_forward,
    AdaptiveMaxPoolBwd: window_pooling.run_adaptive_max_backward,
    MaxUnpoolFwd: window_pooling.run_unpool_forward,
    MaxUnpoolBwd: window_pooling.run_unpool_backward,
}
