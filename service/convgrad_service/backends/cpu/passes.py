"""Run several passes of one convolution in sequence: problems.passes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cpu.channel_sum import channel_sum
from convgrad_service.backends.cpu.engines import bwd_data_into, bwd_weight_into, forward_into
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.plans.cpu import Choice
from convgrad_service.problems.concatenation import concatenate
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import activation_view, weight_view
from convgrad_service.problems.passes import ConvPasses, Pass, Side

__all__ = ["run_passes"]

Array = NDArray[Any]
Tensors = Mapping[str, Array]
# Limit on one piece's concatenated operands. A constant, so that settings do not change the split.
CONCATENATED_BYTES = 64 * 1024 * 1024


def run_passes(
    machine: Machine, problem: ConvPasses, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Compute every output of the problem."""
    ran = [_run(machine, problem.only([one.output]), tensors, cancelled) for one in problem.passes]
    return Ran(
        {name: array for one in ran for name, array in one.outputs.items()},
        " + ".join(one.kernel for one in ran),
        max(one.workspace_bytes for one in ran),
        sum(one.pieces for one in ran),
        tuple(reason for one in ran for reason in one.passed_over),
    )


def _run(
    machine: Machine, problem: ConvPasses, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Run one pass. If operands are concatenated, run it in pieces, to bound the copies."""
    (one,) = problem.passes
    result = machine.output(one.output, problem.outputs[one.output])
    whole = {**tensors, one.output: result}
    outputs = {one.output: result}
    if one.direction == "input_sums":
        source = _view(problem, "x", tensors[one.terms[0][0]])
        used = channel_sum(machine, source, _by_group(problem, result), cancelled=cancelled)
        return Ran(outputs, f"channel_sum/{machine.device.level}", used)
    if not one.terms:
        view = _view(problem, one.written, result)
        view[...] = _over(view, _by_group(problem, tensors[one.bias])) if one.bias else 0
        return Ran(outputs, "fill", 0)
    if len(one.terms) == 1:
        choice, used = _product(machine, problem, one, whole, cancelled)
        return Ran(outputs, choice.kernel, used, choice.plan.pieces, choice.passed_over)
    return _run_concatenated(machine, problem, one, whole, cancelled)


def _product(
    machine: Machine,
    problem: ConvPasses,
    one: Pass,
    tensors: Tensors,
    cancelled: threading.Event | None,
) -> tuple[Choice, int]:
    views: dict[str | None, Array] = {
        side: _view(problem, side, tensors[name])
        for name, side in {**one.sides, one.output: one.written}.items()
    }
    bias = None if one.bias is None else _by_group(problem, tensors[one.bias])
    return _into(machine, problem.conv, problem, one, views, bias, cancelled)


def _into(
    machine: Machine,
    conv: ConvShape,
    problem: ConvPasses,
    one: Pass,
    views: Mapping[str | None, Array],
    bias: Array | None,
    cancelled: threading.Event | None,
) -> tuple[Choice, int]:
    x, w, y = (views[side] for side in "xwy")
    if one.direction == "fwd":
        return forward_into(machine, conv, problem.dtype, x, w, y, bias=bias, cancelled=cancelled)
    if one.direction == "bwd_data":
        return bwd_data_into(machine, conv, problem.dtype, y, w, x, bias=bias, cancelled=cancelled)
    return bwd_weight_into(machine, conv, problem.dtype, x, y, w, cancelled=cancelled)


def _run_concatenated(
    machine: Machine,
    problem: ConvPasses,
    one: Pass,
    tensors: Tensors,
    cancelled: threading.Event | None,
) -> Ran:
    side: Side = "x" if one.direction == "fwd" else "y"
    activations, weights = zip(*one.terms, strict=True)
    copied = 2 * problem.spec_of(side).size_bytes
    pieces = problem.split(max(1, -(-copied // CONCATENATED_BYTES)))
    weight: Array | None = None
    ran = Ran({one.output: tensors[one.output]}, "", 0, len(pieces))
    for piece in machine.to_run(pieces):
        part = piece.problem
        assert isinstance(part, ConvPasses)  # noqa: S101 - its own pieces
        found = concatenate(part.conv, "fwd" if one.direction == "fwd" else "bwd_data")
        sources = [_view(part, side, tensors[name][piece.inputs[name]]) for name in activations]
        if weight is None:
            order = weights[::-1] if found.reversed_taps else weights
            views = [_view(part, "w", tensors[name]) for name in order]
            along = 2 if one.direction == "fwd" else 1
            weight = np.stack(views, 3) if found.by_taps else np.concatenate(views, along)
        source = np.stack(sources, 3) if found.by_taps else _concatenated(sources)
        target = _view(part, one.written, tensors[one.output][piece.outputs[one.output]])
        if found.by_taps:
            target = target[:, :, :, None]
        both: dict[str | None, Array] = {side: source, "w": weight, one.written: target}
        bias = None if one.bias is None else _by_group(part, tensors[one.bias])
        choice, used = _into(machine, found.conv, part, one, both, bias, cancelled)
        used += source.nbytes + weight.nbytes
        ran = replace(
            ran,
            kernel=choice.kernel,
            workspace_bytes=max(used, ran.workspace_bytes),
            passed_over=choice.passed_over,
        )
    return ran


def _concatenated(views: Sequence[Array]) -> Array:
    """Concatenate canonical activations along each group's channels, preserving memory order."""
    first = views[0]
    if first.strides[2] != first.itemsize:
        return np.concatenate(views, 2)
    last = [np.moveaxis(view, (1, 2), (-2, -1)) for view in views]
    return np.moveaxis(np.concatenate(last, -1), (-2, -1), (1, 2))


def _view(problem: ConvPasses, side: str | None, array: Array) -> Array:
    view = weight_view if side == "w" else activation_view
    return view(array, problem.layout, problem.conv.groups)


def _by_group(problem: ConvPasses, bias: Array) -> Array:
    return bias.reshape(problem.conv.groups, -1)


def _over(view: Array, bias: Array) -> Array:
    """Reshape a bias (G, C) to broadcast against (N, G, C, *spatial)."""
    return bias.reshape(*bias.shape, *(1,) * (view.ndim - 3))
