"""Runs the plain convolution problems: picks the engine, makes the outputs, gives it views."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu import dense, direct, grouped
from convgrad_service.backends.cpu.channel_sum import channel_sum
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.plans.cpu import Choice, choose
from convgrad_service.problems.base import PLAIN, Epilogue
from convgrad_service.problems.conv3d_transpose import Conv3dTranspose
from convgrad_service.problems.conv_backward import ConvBackward
from convgrad_service.problems.conv_bwd_data import ConvBwdData
from convgrad_service.problems.conv_fwd import ConvFwd
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.grouped_conv_bwd_weight import GroupedConvBwdWeight
from convgrad_service.problems.layouts import activation_view, weight_view

__all__ = [
    "bwd_data_into",
    "run_backward",
    "run_bwd_data",
    "run_bwd_weight",
    "run_forward",
    "run_transpose",
]

Array = NDArray[Any]
Tensors = Mapping[str, Array]
# Why an engine that ran out of room at run time is passed over.
NO_ROOM = (("grouped", "its padded planes do not fit into the workspace"),)
NO_BIAS = (("grouped", "it adds no bias to a gradient of the input"),)


def run_forward(
    machine: Machine, problem: ConvFwd, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """conv_fwd."""
    conv, layout = problem.conv, problem.layout
    output = np.empty(problem.output_spec.shape, problem.dtype.numpy)
    x = activation_view(tensors["input"], layout, conv.groups)
    w = weight_view(tensors["weight"], layout, conv.groups)
    y = activation_view(output, layout, conv.groups)
    bias = _by_group(tensors["bias"], conv.groups) if problem.bias else None
    choice = choose("fwd", conv, problem.dtype, machine.device)
    used: int | None = None
    if choice.engine == "grouped":
        used = grouped.forward(
            machine.library, machine.workers, conv, problem.dtype, x, w, y,
            bias=bias, cancelled=cancelled,
        )  # fmt: skip
        if used is None:
            choice = choose("fwd", conv, problem.dtype, machine.device, NO_ROOM)
    if choice.dense is not None:
        dense.forward(
            machine.library, machine.workers, choice.dense, conv, x, w, y,
            bias=bias, cancelled=cancelled,
        )  # fmt: skip
    elif choice.engine == "direct":
        direct.forward(
            machine.library, machine.workers, conv, x, w, y, bias=bias, cancelled=cancelled
        )
    return _ran({"output": output}, choice, used)


def run_bwd_data(
    machine: Machine, problem: ConvBwdData, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """conv_bwd_data."""
    conv, layout = problem.conv, problem.layout
    grad_input = np.empty(problem.input_spec.shape, problem.dtype.numpy)
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


def run_transpose(
    machine: Machine, problem: Conv3dTranspose, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """conv3d_transpose: the gradient of the input of the convolution it transposes, and a bias."""
    conv, layout = problem.conv, problem.layout
    output = np.empty(problem.input_spec.shape, problem.dtype.numpy)
    choice, used = bwd_data_into(
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


def bwd_data_into(
    machine: Machine,
    conv: ConvShape,
    dtype: DType,
    grad_output: Array,
    weight: Array,
    grad_input: Array,
    *,
    epilogue: Epilogue = PLAIN,
    accumulate: Array | None = None,
    bias: Array | None = None,
    cancelled: threading.Event | None = None,
) -> tuple[Choice, int | None]:
    """The gradient of the input from and into canonical views; the choice and bytes it took."""
    alpha, beta = epilogue.alpha, epilogue.beta
    without = NO_BIAS if bias is not None else ()
    choice = choose("bwd_data", conv, dtype, machine.device, without)
    used: int | None = None
    if choice.engine == "grouped":
        used = grouped.bwd_data(
            machine.library, machine.workers, conv, dtype, grad_output, weight, grad_input,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
        if used is None:
            choice = choose("bwd_data", conv, dtype, machine.device, NO_ROOM)
    if choice.dense is not None:
        dense.bwd_data(
            machine.library, machine.workers, choice.dense, conv, grad_output, weight, grad_input,
            alpha=alpha, beta=beta, accumulate=accumulate, bias=bias, cancelled=cancelled,
        )  # fmt: skip
    elif choice.engine == "direct":
        direct.bwd_data(
            machine.library, machine.workers, conv, grad_output, weight, grad_input,
            alpha=alpha, beta=beta, accumulate=accumulate, bias=bias, cancelled=cancelled,
        )  # fmt: skip
    return choice, used


def run_bwd_weight(
    machine: Machine,
    problem: GroupedConvBwdWeight,
    tensors: Tensors,
    cancelled: threading.Event | None,
) -> Ran:
    """grouped_conv_bwd_weight: grad_weight, grad_bias or both."""
    conv, layout = problem.conv, problem.layout
    outputs: dict[str, Array] = {}
    choice = choose("bwd_weight", conv, problem.dtype, machine.device)
    kernel, used, pieces = f"channel_sum/{machine.device.level}", 0, 1
    y = activation_view(tensors["grad_output"], layout, conv.groups)
    if "grad_weight" in problem.wanted:
        spec = problem.outputs["grad_weight"]
        grad_weight = np.empty(spec.shape, spec.dtype.numpy)
        add = tensors["accumulate"] if problem.epilogue.accumulate else None
        choice, own = _bwd_weight_into(
            machine,
            problem,
            activation_view(tensors["input"], layout, conv.groups),
            y,
            weight_view(grad_weight, layout, conv.groups),
            None if add is None else weight_view(add, layout, conv.groups),
            cancelled,
        )
        outputs["grad_weight"] = grad_weight
        kernel, used, pieces = choice.kernel, own, choice.plan.pieces
    if "grad_bias" in problem.wanted:
        grad_bias = np.empty(problem.bias_spec.shape, problem.weight_dtype.numpy)
        own = channel_sum(machine, y, _by_group(grad_bias, conv.groups), cancelled=cancelled)
        outputs["grad_bias"], used = grad_bias, max(used, own)
    return Ran(outputs, kernel, used, pieces)


def _bwd_weight_into(
    machine: Machine,
    problem: GroupedConvBwdWeight,
    x: Array,
    y: Array,
    grad_weight: Array,
    accumulate: Array | None,
    cancelled: threading.Event | None,
) -> tuple[Choice, int]:
    conv, alpha, beta = problem.conv, problem.epilogue.alpha, problem.epilogue.beta
    choice = choose("bwd_weight", conv, problem.dtype, machine.device)
    if choice.engine == "grouped":
        used = grouped.bwd_weight(
            machine.library, machine.workers, conv, problem.dtype, x, y, grad_weight,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
        if used is not None:
            return choice, used
        choice = choose("bwd_weight", conv, problem.dtype, machine.device, NO_ROOM)
    if choice.dense is not None:
        dense.bwd_weight(
            machine.library, machine.workers, choice.dense, conv, x, y, grad_weight,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
    else:
        direct.bwd_weight(
            machine.library, machine.workers, conv, x, y, grad_weight,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
    return choice, choice.plan.workspace_bytes


def run_backward(
    machine: Machine, problem: ConvBackward, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """conv_backward: its parts, one after another."""
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
    )


def _by_group(bias: Array, groups: int) -> Array:
    return bias.reshape(groups, -1)


def _ran(outputs: dict[str, Array], choice: Choice, used: int | None) -> Ran:
    plan = choice.plan
    return Ran(outputs, choice.kernel, plan.workspace_bytes if used is None else used, plan.pieces)
