"""The runner, and the explainer, of every class of problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from convgrad_service.backends.cpu import pooling
from convgrad_service.backends.cpu.conv3d_formats import run_backprop_input
from convgrad_service.backends.cpu.convolution import (
    run_backward,
    run_bwd_data,
    run_bwd_weight,
    run_forward,
    run_transpose,
)
from convgrad_service.backends.cpu.fused_forward import explain_fused, run_fused
from convgrad_service.backends.cpu.runner import Runner
from convgrad_service.plans.base import Plan
from convgrad_service.plans.cpu import choose
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems import (
    Conv3dBackpropInput,
    Conv3dTranspose,
    ConvBackward,
    ConvBwdData,
    ConvFwd,
    GroupedConvBwdWeight,
    GroupedConvConvFwd,
    MaxPoolBwd,
    MaxPoolFwd,
    Problem,
)

__all__ = ["EXPLAINERS", "RUNNERS"]

RUNNERS: Mapping[type[Problem], Runner] = {
    ConvBwdData: run_bwd_data,
    GroupedConvBwdWeight: run_bwd_weight,
    ConvFwd: run_forward,
    ConvBackward: run_backward,
    Conv3dTranspose: run_transpose,
    Conv3dBackpropInput: run_backprop_input,
    MaxPoolFwd: pooling.run_forward,
    MaxPoolBwd: pooling.run_backward,
    GroupedConvConvFwd: run_fused,
}


def _explain_bwd_data(problem: Any, device: CpuDevice) -> Plan:
    return choose("bwd_data", problem.conv, problem.dtype, device).plan


def _explain_bwd_weight(problem: Any, device: CpuDevice) -> Plan:
    return choose("bwd_weight", problem.conv, problem.dtype, device).plan


def _explain_forward(problem: Any, device: CpuDevice) -> Plan:
    return choose("fwd", problem.conv, problem.dtype, device).plan


def _explain_backward(problem: ConvBackward, device: CpuDevice) -> Plan:
    plans = [EXPLAINERS[type(part)](part, device) for part in problem.parts]
    return Plan(
        " + ".join(plan.kernel for plan in plans),
        max(plan.workspace_bytes for plan in plans),
        sum(plan.pieces for plan in plans),
        tuple(reason for plan in plans for reason in plan.passed_over),
    )


EXPLAINERS: Mapping[type[Problem], Callable[[Any, CpuDevice], Plan]] = {
    ConvBwdData: _explain_bwd_data,
    Conv3dTranspose: _explain_bwd_data,
    Conv3dBackpropInput: _explain_bwd_data,
    GroupedConvBwdWeight: _explain_bwd_weight,
    ConvFwd: _explain_forward,
    ConvBackward: _explain_backward,
    MaxPoolFwd: pooling.explain_forward,
    MaxPoolBwd: pooling.explain_backward,
    GroupedConvConvFwd: explain_fused,
}
