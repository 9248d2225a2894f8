"""Runs conv3d_backprop_input: Ascend's formats in and out, around a plain conv_bwd_data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cpu.convolution import bwd_data_into
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.problems.conv3d_backprop_input import Conv3dBackpropInput
from convgrad_service.problems.layouts import LAYOUTS, activation_view, weight_view

__all__ = ["run_backprop_input"]

PLAIN = LAYOUTS["NCDHW"]


def run_backprop_input(
    machine: Machine,
    problem: Conv3dBackpropInput,
    tensors: Mapping[str, NDArray[Any]],
    cancelled: threading.Event | None,
) -> Ran:
    """Piece by piece, so that the plain copies that blocked formats need stay small."""
    conv = problem.conv
    spec = problem.outputs["grad_input"]
    grad_input = np.empty(spec.shape, spec.dtype.numpy)
    weight = weight_view(
        problem.weight_format.unpack(tensors["weight"], conv.groups, problem.weight_size),
        PLAIN,
        conv.groups,
    )
    kernel, used = "", 0
    pieces = problem.split(_parts(problem, machine.device.workspace_limit_bytes))
    for piece in pieces:
        part = cast("Conv3dBackpropInput", piece.problem)
        plain = part.grad_output_format.unpack(
            tensors["grad_output"][piece.inputs["grad_output"]], conv.out_channels
        )
        target = grad_input[piece.outputs["grad_input"]]
        # A plain format is written in place: its unpacked form is a view.
        view = part.output_format.unpack(target, conv.in_channels)
        choice, own = bwd_data_into(
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
        kernel = choice.kernel
        used = max(used, choice.plan.workspace_bytes if own is None else own)
    return Ran({"grad_input": grad_input}, kernel, used + _copies_bytes(problem), len(pieces))


def _copies_bytes(problem: Conv3dBackpropInput) -> int:
    """Bytes of plain copies, were the problem run in one piece."""
    copies = 0
    if problem.grad_output_format.name == "NDC1HWC0":
        copies += problem.inputs["grad_output"].size_bytes
    if problem.output_format.name == "NDC1HWC0":
        copies += problem.outputs["grad_input"].size_bytes
    return copies


def _parts(problem: Conv3dBackpropInput, limit_bytes: int) -> int:
    return max(1, -(-_copies_bytes(problem) // (limit_bytes // 4)))
