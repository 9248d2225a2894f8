"""Choose an engine for one direction of a convolution and run it on canonical views.

Activations are (N, G, C/G, *spatial), weights (G, K/G, C/G, *kernel), bias (G, K/G) or, for
bwd_data, (G, C/G), with any strides. Each function writes its result and returns the choice and
the bytes of workspace used.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu import dense, direct, grouped
from convgrad_service.backends.cpu.activation import activate
from convgrad_service.backends.cpu.runner import Machine
from convgrad_service.plans.cpu import Choice, choose
from convgrad_service.problems.base import PLAIN, Epilogue
from convgrad_service.problems.geometry import ConvShape

__all__ = ["bwd_data_into", "bwd_weight_into", "forward_into"]

Array = NDArray[Any]
UNGROUPED = (("grouped", "the sums are widened"),)


def forward_into(
    machine: Machine,
    conv: ConvShape,
    dtype: DType,
    x: Array,
    weight: Array,
    y: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    cancelled: threading.Event | None = None,
) -> tuple[Choice, int]:
    """Compute y = activation(conv(x, weight) + bias), rounded once."""
    last = grouped.channels_last(x, y)
    choice = choose("fwd", conv, dtype, machine.device, last)
    if choice.engine == "grouped":
        return choice, grouped.forward(
            machine.library, machine.workers, conv, dtype, x, weight, y,
            bias=bias, activation=activation, cancelled=cancelled,
        )  # fmt: skip
    if activation != "silu" or dtype.itemsize != 2:
        _ungrouped(machine, choice, conv, x, weight, bias, y, cancelled)
        if activation != "none":
            # In place: clamping to 0 and 6 commutes with the earlier rounding.
            activate(machine, activation, y, y, cancelled)
        return choice, choice.plan.workspace_bytes
    # silu does not commute with rounding to 16 bits, so the sums stay in float32.
    single = np.float32
    choice = choose("fwd", conv, DType.FLOAT32, machine.device, last, UNGROUPED)
    wide, wide_x, wide_weight = np.empty_like(y, single), x.astype(single), weight.astype(single)
    wide_bias = None if bias is None else bias.astype(single)
    _ungrouped(machine, choice, conv, wide_x, wide_weight, wide_bias, wide, cancelled)
    activate(machine, activation, wide, y, cancelled)
    widened_bytes = wide.nbytes + wide_x.nbytes + wide_weight.nbytes
    return choice, choice.plan.workspace_bytes + widened_bytes


def _ungrouped(
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
) -> tuple[Choice, int]:
    """Compute grad_input = alpha * grad + beta * accumulate + bias, rounded once."""
    alpha, beta = epilogue.alpha, epilogue.beta
    last = grouped.channels_last(grad_output, grad_input)
    choice = choose("bwd_data", conv, dtype, machine.device, last)
    if choice.engine == "grouped":
        return choice, grouped.bwd_data(
            machine.library, machine.workers, conv, dtype, grad_output, weight, grad_input,
            alpha=alpha, beta=beta, accumulate=accumulate, bias=bias, cancelled=cancelled,
        )  # fmt: skip
    if choice.dense is not None:
        dense.bwd_data(
            machine.library, machine.workers, choice.dense, conv, grad_output, weight, grad_input,
            alpha=alpha, beta=beta, accumulate=accumulate, bias=bias, cancelled=cancelled,
        )  # fmt: skip
    else:
        direct.bwd_data(
            machine.library, machine.workers, conv, grad_output, weight, grad_input,
            alpha=alpha, beta=beta, accumulate=accumulate, bias=bias, cancelled=cancelled,
        )  # fmt: skip
    return choice, choice.plan.workspace_bytes


def bwd_weight_into(
    machine: Machine,
    conv: ConvShape,
    dtype: DType,
    x: Array,
    grad_output: Array,
    grad_weight: Array,
    *,
    epilogue: Epilogue = PLAIN,
    accumulate: Array | None = None,
    cancelled: threading.Event | None = None,
) -> tuple[Choice, int]:
    """Compute grad_weight = alpha * grad + beta * accumulate, rounded once."""
    alpha, beta = epilogue.alpha, epilogue.beta
    last = grouped.channels_last(x, grad_output)
    choice = choose("bwd_weight", conv, dtype, machine.device, last)
    if choice.engine == "grouped":
        return choice, grouped.bwd_weight(
            machine.library, machine.workers, conv, dtype, x, grad_output, grad_weight,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
    if choice.dense is not None:
        dense.bwd_weight(
            machine.library, machine.workers, f"{choice.engine}_bwd_weight", choice.dense, conv,
            x, grad_output, grad_weight,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
    else:
        direct.bwd_weight(
            machine.library, machine.workers, conv, x, grad_output, grad_weight,
            alpha=alpha, beta=beta, accumulate=accumulate, cancelled=cancelled,
        )  # fmt: skip
    return choice, choice.plan.workspace_bytes
