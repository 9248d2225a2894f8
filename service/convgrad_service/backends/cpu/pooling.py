"""Runners of the max-pooling problems: allocate outputs and pass views to max_pool.py."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from convgrad_service.backends.cpu import max_pool
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.problems.layouts import Layout, activation_view
from convgrad_service.problems.maxpool import MaxPoolBwd, MaxPoolFwd

__all__ = ["run_backward", "run_forward"]

Array = NDArray[Any]
Tensors = Mapping[str, Array]


def run_forward(
    machine: Machine, problem: MaxPoolFwd, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Run maxpool2d_fwd or maxpool3d_fwd."""
    outputs = {name: machine.output(name, spec) for name, spec in problem.outputs.items()}
    layout = problem.layout
    used = max_pool.forward(
        machine.library,
        machine.workers,
        problem.pool,
        problem.dtype,
        _view(tensors["input"], layout),
        _view(outputs["output"], layout),
        _view(outputs["indices"], layout) if problem.return_indices else None,
        cancelled=cancelled,
    )
    return Ran(outputs, f"max_pool_fwd/{machine.device.level}", used)


def run_backward(
    machine: Machine, problem: MaxPoolBwd, tensors: Tensors, cancelled: threading.Event | None
) -> Ran:
    """Run maxpool2d_bwd or maxpool3d_bwd, from the input or from indices."""
    grad_input = machine.output("grad_input", problem.outputs["grad_input"])
    layout = problem.layout
    used = max_pool.backward(
        machine.library,
        machine.workers,
        problem.pool,
        problem.dtype,
        _view(tensors["grad_output"], layout),
        _view(grad_input, layout),
        cancelled=cancelled,
        **{problem.source: _view(tensors[problem.source], layout)},
    )
    kernel = f"max_pool_bwd_from_{problem.source}/{machine.device.level}"
    return Ran({"grad_input": grad_input}, kernel, used)


def _view(array: Array, layout: Layout) -> Array:
    """Return the view (N, C, *spatial)."""
    return activation_view(array, layout, 1)[:, 0]
