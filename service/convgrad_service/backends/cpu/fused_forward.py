"""grouped_conv_conv_fwd: two convolutions, piece by piece, so that what is between stays in cache.

A piece is some rows of one sample's output and the rows of the intermediate that they read. Rows
that two pieces read are computed by both; the intermediate as a whole never exists.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu import dense, direct, grouped
from convgrad_service.backends.cpu.activation import activate
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.plans.base import Plan
from convgrad_service.plans.cpu import Choice, choose
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems import GroupedConvConvFwd
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import activation_view, weight_view

__all__ = ["explain_fused", "run_fused"]

Array = NDArray[Any]
# A piece's intermediate. Larger ones cost fewer launches, smaller ones less cache.
INTERMEDIATE_BYTES = 4 * 1024 * 1024
NO_ROOM = (("grouped", "its padded planes do not fit into the workspace"),)


def run_fused(
    machine: Machine,
    problem: GroupedConvConvFwd,
    tensors: Mapping[str, Array],
    cancelled: threading.Event | None,
) -> Ran:
    """output = activation1(conv1(activation0(conv0(input) + bias0)) + bias1)."""
    spec = problem.outputs["output"]
    output = np.empty(spec.shape, spec.dtype.numpy)
    weights = [
        weight_view(tensors[f"weight{i}"], problem.layout, conv.groups)
        for i, conv in enumerate((problem.conv0, problem.conv1))
    ]
    biases = [
        tensors[f"bias{i}"].reshape(conv.groups, -1) if f"bias{i}" in tensors else None
        for i, conv in enumerate((problem.conv0, problem.conv1))
    ]
    kernels, used, pieces = [""], 0, problem.split(_parts(problem))
    for piece in pieces:
        part: Any = piece.problem
        source = tensors["input"][piece.inputs["input"]]
        target = output[piece.outputs["output"]]
        between = np.empty(part.intermediate.shape, part.dtype.numpy)
        layout, first, second = part.layout, part.conv0, part.conv1
        step0 = _convolve(
            machine, first, part.dtype, activation_view(source, layout, first.groups),
            weights[0], biases[0], part.activation0,
            activation_view(between, layout, first.groups), cancelled,
        )  # fmt: skip
        # The second convolution may group the channels between in its own way.
        regrouped = _regrouped(activation_view(between, layout, first.groups), second.groups)
        step1 = _convolve(
            machine, second, part.dtype, regrouped, weights[1], biases[1], part.activation1,
            activation_view(target, layout, second.groups), cancelled,
        )  # fmt: skip
        kernels = [step0[0], step1[0]]
        used = max(used, between.nbytes + max(step0[1], step1[1]))
    return Ran({"output": output}, " + ".join(kernels), used, len(pieces))


def explain_fused(problem: GroupedConvConvFwd, device: CpuDevice) -> Plan:
    """The kernels of both convolutions, for the first piece."""
    pieces = problem.split(_parts(problem))
    part: Any = pieces[0].problem
    plans = [choose("fwd", conv, part.dtype, device).plan for conv in (part.conv0, part.conv1)]
    return Plan(
        " + ".join(plan.kernel for plan in plans),
        part.intermediate.size_bytes + max(plan.workspace_bytes for plan in plans),
        len(pieces),
        tuple(reason for plan in plans for reason in plan.passed_over),
    )


def _parts(problem: GroupedConvConvFwd) -> int:
    return -(-problem.intermediate.size_bytes // INTERMEDIATE_BYTES)


def _regrouped(view: Array, groups: int) -> Array:
    """(N, G, C/G, ...) with other groups; a copy only where the two groupings' strides differ."""
    batch, _, _, *size = view.shape
    return view.reshape(batch, groups, -1, *size)


def _convolve(
    machine: Machine,
    conv: ConvShape,
    dtype: DType,
    x: Array,
    weight: Array,
    bias: Array | None,
    activation: str,
    y: Array,
    cancelled: threading.Event | None,
) -> tuple[str, int]:
    """y = activation(conv(x) + bias), rounded once; the kernel's name and the bytes it took."""
    choice = choose("fwd", conv, dtype, machine.device)
    if choice.engine == "grouped":
        used = grouped.forward(
            machine.library, machine.workers, conv, dtype, x, weight, y,
            bias=bias, activation=activation, cancelled=cancelled,
        )  # fmt: skip
        if used is not None:
            return choice.kernel, used
        choice = choose("fwd", conv, dtype, machine.device, NO_ROOM)
    if activation != "silu" or dtype.itemsize != 2:
        _plain(machine, choice, conv, x, weight, bias, y, cancelled)
        if activation != "none":
            # In place: clamping to 0 and 6 commutes with the rounding before it.
            activate(machine, activation, y, y, cancelled)
        return choice.kernel, choice.plan.workspace_bytes
    # silu does not commute with a rounding to 16 bits, so the sums are kept in float32.
    single = np.float32
    choice = choose("fwd", conv, DType.FLOAT32, machine.device, NO_ROOM)
    wide, wide_x, wide_weight = np.empty_like(y, single), x.astype(single), weight.astype(single)
    wide_bias = None if bias is None else bias.astype(single)
    _plain(machine, choice, conv, wide_x, wide_weight, wide_bias, wide, cancelled)
    activate(machine, activation, wide, y, cancelled)
    widened_bytes = wide.nbytes + wide_x.nbytes + wide_weight.nbytes
    return choice.kernel, choice.plan.workspace_bytes + widened_bytes


def _plain(
    machine: Machine,
    choice: Choice,
    conv: ConvShape,
    x: Array,
    weight: Array,
    bias: Array | None,
    y: Array,
    cancelled: threading.Event | None,
) -> None:
    if choice.dense is None:
        direct.forward(
            machine.library, machine.workers, conv, x, weight, y, bias=bias, cancelled=cancelled
        )
        return
    dense.forward(
        machine.library, machine.workers, choice.dense, conv, x, weight, y,
        bias=bias, cancelled=cancelled,
    )  # fmt: skip
