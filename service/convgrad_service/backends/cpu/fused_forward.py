"""grouped_conv_conv_fwd: two convolutions run piece by piece, to keep the intermediate in cache.

A piece is a range of output rows of one sample and the intermediate rows that they read. Rows read
by two pieces are computed twice. The full intermediate is never materialised.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu.engines import forward_into
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.plans.cpu import Choice
from convgrad_service.problems import GroupedConvConvFwd
from convgrad_service.problems.layouts import activation_view, weight_view

__all__ = ["run_fused"]

Array = NDArray[Any]
# Size of a piece's intermediate: larger means fewer launches, smaller means less cache.
INTERMEDIATE_BYTES = 4 * 1024 * 1024
# Limit on a piece's float32 copies: silu widens a 16-bit convolution's input and output.
WIDENED_BYTES = 64 * 1024 * 1024


def run_fused(
    machine: Machine,
    problem: GroupedConvConvFwd,
    tensors: Mapping[str, Array],
    cancelled: threading.Event | None,
) -> Ran:
    """Compute output = activation1(conv1(activation0(conv0(input) + bias0)) + bias1)."""
    pieces = problem.split(_parts(problem))
    output = machine.output("output", problem.outputs["output"])
    weights = [
        weight_view(tensors[f"weight{i}"], problem.layout, conv.groups)
        for i, conv in enumerate((problem.conv0, problem.conv1))
    ]
    biases = [
        tensors[f"bias{i}"].reshape(conv.groups, -1) if f"bias{i}" in tensors else None
        for i, conv in enumerate((problem.conv0, problem.conv1))
    ]
    choices: tuple[Choice, ...] = ()
    used = 0
    for piece in machine.to_run(pieces):
        part: Any = piece.problem
        source = tensors["input"][piece.inputs["input"]]
        target = output[piece.outputs["output"]]
        layout, first, second = part.layout, part.conv0, part.conv1
        with machine.workers.workspaces.array(part.intermediate) as between:
            choice0, used0 = forward_into(
                machine, first, part.dtype, activation_view(source, layout, first.groups),
                weights[0], activation_view(between, layout, first.groups),
                bias=biases[0], activation=part.activation0, cancelled=cancelled,
            )  # fmt: skip
            # The second convolution may have another number of groups.
            regrouped = _regrouped(activation_view(between, layout, first.groups), second.groups)
            choice1, used1 = forward_into(
                machine, second, part.dtype, regrouped,
                weights[1], activation_view(target, layout, second.groups),
                bias=biases[1], activation=part.activation1, cancelled=cancelled,
            )  # fmt: skip
        choices = choice0, choice1
        used = max(used, part.intermediate.size_bytes + max(used0, used1))
    return Ran(
        {"output": output},
        " + ".join(choice.kernel for choice in choices),
        used,
        len(pieces),
        tuple(reason for choice in choices for reason in choice.passed_over),
    )


def _parts(problem: GroupedConvConvFwd) -> int:
    between = problem.intermediate.size_bytes
    parts = -(-between // INTERMEDIATE_BYTES)
    if problem.dtype.itemsize != 2:
        return parts
    sides = (
        (problem.activation0, problem.inputs["input"].size_bytes),
        (problem.activation1, problem.outputs["output"].size_bytes),
    )
    widened = max((2 * (side + between) for name, side in sides if name == "silu"), default=0)
    return max(parts, -(-widened // WIDENED_BYTES))


def _regrouped(view: Array, groups: int) -> Array:
    """View (N, G, C/G, ...) with another number of groups; copy if strides do not allow it."""
    batch, _, _, *size = view.shape
    return view.reshape(batch, groups, -1, *size)
