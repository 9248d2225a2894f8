"""Runners of the convolution problems: allocate outputs and pass canonical views to engines."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.channel_sum import channel_sum
from convgrad_service.backends.cpu.engines import bwd_data_into, bwd_weight_into, forward_into
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.plans.cpu import Choice
from convgrad_service.problems.conv_backward import ConvBackward
from convgrad_service.problems.conv_bwd_data import ConvBwdData
from convgrad_service.problems.conv_fwd import ConvFwd
from convgrad_service.problems.grouped_conv_bwd_weight import GroupedConvBwdWeight
from convgrad_service.problems.layouts import activation_view, weight_view

__all__ = ["run_backward", "run_bwd_data", "run_bwd_weight", "run_forward"]

Array = NDArray[Any]
Tensors = Mapping[str, Array]


def run_forward(
    machine: Machine, problem: ConvFwd, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Run conv_fwd."""
    conv, layout = problem.conv, problem.layout
    output = machine.output("output", problem.output_spec)
    choice, used = forward_into(
        machine,
        conv,
        problem.dtype,
        activation_view(tensors["input"], layout, conv.groups),
        weight_view(tensors["weight"], layout, conv.groups),
        activation_view(output, layout, conv.groups),
        bias=_by_group(tensors["bias"], conv.groups) if problem.bias else None,
        cancelled=cancelled,
    )
    return _ran({"output": output}, choice, used)


def run_bwd_data(
    machine: Machine, problem: ConvBwdData, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Run conv_bwd_data."""
    conv, layout = problem.conv, problem.layout
    grad_input = machine.output("grad_input", problem.input_spec)
    accumulate = tensors["accumulate"] if problem.epilogue.accumulate else None
    choice, used = bwd_data_into(
        machine,
        conv,
        problem.dtype,
        activation_view(tensors["grad_output"], layout, conv.groups),
        weight_view(tensors["weight"], layout, conv.groups),
        activation_view(grad_input, layout, conv.groups),
        epilogue=problem.epilogue,
        accumulate=None if accumulate is None else activation_view(accumulate, layout, conv.groups),
        cancelled=cancelled,
    )
    return _ran({"grad_input": grad_input}, choice, used)


def run_bwd_weight(
    machine: Machine,
    problem: GroupedConvBwdWeight,
    tensors: Tensors,
    cancelled: threading.Event | None,
) -> Ran:
    """Run grouped_conv_bwd_weight: grad_weight, grad_bias or both."""
    conv, layout = problem.conv, problem.layout
    grad_output = activation_view(tensors["grad_output"], layout, conv.groups)
    ran = Ran({}, f"channel_sum/{machine.device.level}", 0)
    if "grad_weight" in problem.wanted:
        grad_weight = machine.output("grad_weight", problem.outputs["grad_weight"])
        add = tensors["accumulate"] if problem.epilogue.accumulate else None
        choice, used = bwd_weight_into(
            machine,
            conv,
            problem.dtype,
            activation_view(tensors["input"], layout, conv.groups),
            grad_output,
            weight_view(grad_weight, layout, conv.groups),
            epilogue=problem.epilogue,
            accumulate=None if add is None else weight_view(add, layout, conv.groups),
            cancelled=cancelled,
        )
        ran = _ran({"grad_weight": grad_weight}, choice, used)
    if "grad_bias" in problem.wanted:
        grad_bias = machine.output("grad_bias", problem.outputs["grad_bias"])
        into = _by_group(grad_bias, conv.groups)
        used = channel_sum(machine, grad_output, into, cancelled=cancelled)
        ran = replace(
            ran,
            outputs=ran.outputs | {"grad_bias": grad_bias},
            workspace_bytes=max(ran.workspace_bytes, used),
        )
    return ran


def run_backward(
    machine: Machine, problem: ConvBackward, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Run conv_backward: its parts, in sequence."""
    ran = [
        run_bwd_data(machine, part, tensors, cancelled)
        if isinstance(part, ConvBwdData)
        else run_bwd_weight(machine, part, tensors, cancelled)
        for part in problem.parts
    ]
    return Ran(
        {name: array for one in ran for name, array in one.outputs.items()},
        " + ".join(one.kernel for one in ran),
        max(one.workspace_bytes for one in ran),
        sum(one.pieces for one in ran),
        tuple(reason for one in ran for reason in one.passed_over),
    )


def _by_group(bias: Array, groups: int) -> Array:
    return bias.reshape(groups, -1)


def _ran(outputs: dict[str, Array], choice: Choice, used: int) -> Ran:
    return Ran(outputs, choice.kernel, used, choice.plan.pieces, choice.passed_over)
