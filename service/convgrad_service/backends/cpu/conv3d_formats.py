"""Run conv3d_backprop_input: conv_bwd_data with conversion from and to Ascend formats."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cpu.engines import bwd_data_into
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.problems.conv3d_backprop_input import Conv3dBackpropInput
from convgrad_service.problems.layouts import LAYOUTS, activation_view, weight_view

__all__ = ["run_backprop_input"]

Array = NDArray[Any]
PLAIN = LAYOUTS["NCDHW"]
# Limit on one piece's unpacked copies. A constant, so that settings do not change the split.
COPIES_BYTES = 64 * 1024 * 1024


def run_backprop_input(
    machine: Machine,
    problem: Conv3dBackpropInput,
    tensors: Mapping[str, Array],
    cancelled: threading.Event | None,
) -> Ran:
    """Run piece by piece, to bound the unpacked copies of blocked formats."""
    pieces = problem.split(_parts(problem))
    conv = problem.conv
    grad_input = machine.output("grad_input", problem.outputs["grad_input"])
    plain_weight = problem.weight_format.unpack(tensors["weight"], conv.groups, problem.weight_size)
    weight = weight_view(plain_weight, PLAIN, conv.groups)
    ran = Ran({"grad_input": grad_input}, "", 0)
    for piece in machine.to_run(pieces):
        part = cast("Conv3dBackpropInput", piece.problem)
        source = tensors["grad_output"][piece.inputs["grad_output"]]
        plain = part.grad_output_format.unpack(source, conv.out_channels)
        target = grad_input[piece.outputs["grad_input"]]
        # A plain format unpacks to a view, so the result is written in place.
        view = part.output_format.unpack(target, conv.in_channels)
        choice, used = bwd_data_into(
            machine,
            part.conv,
            part.dtype,
            activation_view(plain, PLAIN, conv.groups),
            weight,
            activation_view(view, PLAIN, conv.groups),
            cancelled=cancelled,
        )
        if not np.may_share_memory(view, target):
            part.output_format.pack(view, target)
        used += _copied(plain_weight, tensors["weight"])
        used += _copied(plain, source) + _copied(view, target)
        used = max(used, ran.workspace_bytes)
        ran = Ran(ran.outputs, choice.kernel, used, len(pieces), choice.passed_over)
    return ran


def _copied(plain: Array, packed: Array) -> int:
    """Return the bytes of an unpacked copy; 0 if it is a view of the packed array."""
    return 0 if np.may_share_memory(plain, packed) else plain.nbytes


def _parts(problem: Conv3dBackpropInput) -> int:
    copies = 0
    if problem.grad_output_format.name == "NDC1HWC0":
        copies += problem.inputs["grad_output"].size_bytes
    if problem.output_format.name == "NDC1HWC0":
        copies += problem.outputs["grad_input"].size_bytes
    return max(1, -(-copies // COPIES_BYTES))
