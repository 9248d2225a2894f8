"""Run average and adaptive pooling and max unpooling: kernels/window_*.cpp, max_unpool.cpp."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import InvalidProblem
from convgrad_service.backends.cpu.arguments import aligned_empty
from convgrad_service.backends.cpu.runner import Machine, Ran
from convgrad_service.backends.cpu.threads import Rehearsal
from convgrad_service.backends.cpu.window_args import (
    WindowArgs,
    planes,
    scratch_bytes,
    set_windows,
    task_count,
    window_args,
)
from convgrad_service.plans.cpu_device import sum_bytes
from convgrad_service.plans.planar import PLANS_KEPT
from convgrad_service.problems import (
    AdaptiveMaxPoolBwd,
    AdaptiveMaxPoolFwd,
    AvgPoolBwd,
    AvgPoolFwd,
    MaxUnpoolBwd,
    MaxUnpoolFwd,
)
from convgrad_service.problems.planes import PlaneProblem
from convgrad_service.problems.windows import WindowAxis

__all__ = [
    "run_adaptive_max_backward",
    "run_adaptive_max_forward",
    "run_average_backward",
    "run_average_forward",
    "run_unpool_backward",
    "run_unpool_forward",
]

Array = NDArray[Any]
Tensors = Mapping[str, Array]
Cancelled = threading.Event | None
_BY_ONE, _BY_OUTPUTS, _BY_INPUTS = 0, 1, 2


def run_average_forward(
    machine: Machine, problem: AvgPoolFwd, tensors: Tensors, cancelled: Cancelled
) -> Ran:
    """Run avg_pool_fwd or adaptive_avg_pool_fwd."""
    return _sums(machine, problem, tensors["input"], "output", cancelled)


def run_average_backward(
    machine: Machine, problem: AvgPoolBwd, tensors: Tensors, cancelled: Cancelled
) -> Ran:
    """Run avg_pool_bwd or adaptive_avg_pool_bwd."""
    return _sums(machine, problem, tensors["grad_output"], "grad_input", cancelled)


@lru_cache(maxsize=PLANS_KEPT)
def _averages(problem: AvgPoolFwd | AvgPoolBwd) -> tuple[WindowArgs, int]:
    """Return the arguments without tensors, and the bytes of scratch."""
    if isinstance(problem, AvgPoolFwd):
        args = window_args(problem, problem.input_size, problem.output_size, 8)
        set_windows(args.window, problem.windows)
        _set_divisor(args, problem, _BY_OUTPUTS)
    else:
        args = window_args(problem, problem.output_size, problem.input_size, 8)
        set_windows(args.window, [axis.transposed() for axis in problem.windows])
        _set_divisor(args, problem, _BY_INPUTS)
    return args, scratch_bytes(args, problem.dtype)


def _set_divisor(args: WindowArgs, problem: AvgPoolFwd | AvgPoolBwd, varying: int) -> None:
    """Set the divisor if all windows share one, else the windows whose sizes are the divisors."""
    set_windows(args.counted, problem.counted)
    sizes = [axis.uniform_size for axis in problem.counted]
    one = problem.divisor
    if one is None and all(size is not None for size in sizes):
        one = prod(size for size in sizes if size is not None)
    args.divide = varying if one is None else _BY_ONE
    args.divisor = 1.0 if one is None else float(one)


def _sums(
    machine: Machine,
    problem: AvgPoolFwd | AvgPoolBwd,
    x: Array,
    result: str,
    cancelled: Cancelled,
) -> Ran:
    template, scratch = _averages(problem)
    args = WindowArgs.from_buffer_copy(template)
    y = machine.output(result, problem.outputs[result])
    with _Views(problem, args) as views:
        views.read("x", x)
        views.write("y", y)
        used = _launch(machine, "window_sums", args, scratch, cancelled)
    return Ran({result: y}, f"window_sums/{machine.device.level}", used)


def run_adaptive_max_forward(
    machine: Machine, problem: AdaptiveMaxPoolFwd, tensors: Tensors, cancelled: Cancelled
) -> Ran:
    """Run adaptive_max_pool_fwd."""
    outputs = {name: machine.output(name, spec) for name, spec in problem.outputs.items()}
    indices = outputs.get("indices")
    used = _maxima(machine, problem, tensors["input"], outputs["output"], indices, cancelled)
    return Ran(outputs, f"window_maxima/{machine.device.level}", used)


def _maxima(
    machine: Machine,
    problem: AdaptiveMaxPoolFwd | AdaptiveMaxPoolBwd,
    x: Array,
    y: Array | None,
    indices: Array | None,
    cancelled: Cancelled,
) -> int:
    index_bytes = 8 if indices is None else indices.itemsize
    args = window_args(problem, problem.input_size, problem.output_size, index_bytes)
    set_windows(args.window, problem.windows)
    lane_bytes = 8 + sum_bytes(problem.dtype)
    with _Views(problem, args) as views:
        views.read("x", x)
        views.write("y", y)
        views.write("indices", indices)
        return _launch(machine, "window_maxima", args, max(1, args.lanes) * lane_bytes, cancelled)


def run_adaptive_max_backward(
    machine: Machine, problem: AdaptiveMaxPoolBwd, tensors: Tensors, cancelled: Cancelled
) -> Ran:
    """Run adaptive_max_pool_bwd, from the input or from indices."""
    grad = machine.output("grad_input", problem.outputs["grad_input"])
    used = 0
    if problem.index_dtype is None:
        spec = problem.inputs["grad_output"]
        indices = aligned_empty(8 * spec.elements).view(np.int64).reshape(spec.shape)
        used = _maxima(machine, problem, tensors["input"], None, indices, cancelled)
        used += indices.nbytes
    else:
        indices = tensors["indices"]
        if not isinstance(machine.workers, Rehearsal):
            _check_windows(indices, problem)
    args = window_args(problem, problem.output_size, problem.input_size, indices.itemsize)
    set_windows(args.window, [axis.transposed() for axis in problem.windows])
    with _Views(problem, args) as views:
        views.read("x", tensors["grad_output"])
        views.read("indices", indices)
        views.write("y", grad)
        _launch(machine, "window_routes", args, 0, cancelled)
    kernel = f"window_routes_from_{problem.source}/{machine.device.level}"
    return Ran({"grad_input": grad}, kernel, used)


def run_unpool_forward(
    machine: Machine, problem: MaxUnpoolFwd, tensors: Tensors, cancelled: Cancelled
) -> Ran:
    """Run max_unpool_fwd."""
    return _moved(machine, problem, "max_unpool_scatter", tensors, "input", "output", cancelled)


def run_unpool_backward(
    machine: Machine, problem: MaxUnpoolBwd, tensors: Tensors, cancelled: Cancelled
) -> Ran:
    """Run max_unpool_bwd."""
    return _moved(
        machine, problem, "max_unpool_gather", tensors, "grad_output", "grad_input", cancelled
    )


def _moved(
    machine: Machine,
    problem: MaxUnpoolFwd | MaxUnpoolBwd,
    kernel: str,
    tensors: Tensors,
    source: str,
    result: str,
    cancelled: Cancelled,
) -> Ran:
    indices = tensors["indices"]
    if not isinstance(machine.workers, Rehearsal):
        _check_plane(indices, problem)
    y = machine.output(result, problem.outputs[result])
    scatters = source == "input"
    sizes = (problem.input_size, problem.output_size)
    x_size, y_size = sizes if scatters else sizes[::-1]
    args = window_args(problem, x_size, y_size, indices.itemsize)
    args.rows_per_task = max(1, args.y_size[0] * args.y_size[1])
    with _Views(problem, args) as views:
        views.read("x", tensors[source])
        views.read("indices", indices)
        views.write("y", y)
        used = _launch(machine, kernel, args, 0, cancelled)
    return Ran({result: y}, f"{kernel}/{machine.device.level}", used)


def _launch(
    machine: Machine, kernel: str, args: WindowArgs, scratch: int, cancelled: Cancelled
) -> int:
    """Launch a kernel and return the bytes of scratch used."""
    machine.workers.launch(
        machine.library.kernel(kernel),
        args,
        scratch_bytes=scratch,
        tasks=task_count(args),
        cancelled=cancelled,
    )
    return scratch * machine.workers.threads


class _Views:
    """Sets the kernel's tensors. Those that `planes` cannot view are copied."""

    def __init__(self, problem: PlaneProblem, args: WindowArgs) -> None:
        self._layout, self._args = problem.layout, args
        self._kept: list[Array] = []
        self._written: list[tuple[Array, Array]] = []

    def read(self, field: str, array: Array) -> None:
        self._view(field, array)

    def write(self, field: str, array: Array | None) -> None:
        if array is None:
            return
        used = self._view(field, array)
        if used is not array:
            self._written.append((array, used))

    def _view(self, field: str, array: Array) -> Array:
        view = planes(array, self._layout)
        if view is None:
            array = np.ascontiguousarray(array)
            view = planes(array, self._layout)
        setattr(self._args, field, view)
        self._kept.append(array)
        return array

    def __enter__(self) -> _Views:
        return self

    def __exit__(self, *error: object) -> None:
        for array, used in self._written:
            array[...] = used


def _check_plane(indices: Array, problem: MaxUnpoolFwd | MaxUnpoolBwd) -> None:
    """Raise InvalidProblem for the first index that is not a position in a plane."""
    size = prod(problem.output_size)
    if int(indices.min()) >= 0 and int(indices.max()) < size:
        return
    at = np.argwhere((indices < 0) | (indices >= size))[0]
    where = ", ".join(map(str, at))
    raise InvalidProblem(
        f"indices[{where}] is {int(indices[tuple(at)])}; expected a flat position in a plane "
        f"of the {'output' if isinstance(problem, MaxUnpoolFwd) else 'gradient'}, 0 to {size - 1}"
    )


def _check_windows(indices: Array, problem: AdaptiveMaxPoolBwd) -> None:
    """Raise InvalidProblem for the first index outside its window."""
    layout = problem.layout
    size = prod(problem.input_size)
    wrong = (indices < 0) | (indices >= size)
    rest = indices
    for axis in reversed(range(layout.ndim)):
        window = problem.windows[axis]
        place, rest = rest % window.input, rest // window.input
        along = [1] * layout.rank
        along[layout.spatial_axis(axis)] = window.output
        starts, stops = _bounds(window)
        wrong |= (place < starts.reshape(along)) | (place >= stops.reshape(along))
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    windows = [
        f"{window.start(o)} to {window.stop(o) - 1}"
        for window, o in zip(problem.windows, _spatial(at, layout.activation), strict=True)
    ]
    value = int(indices[at])
    found = ""
    if 0 <= value < size:
        position = tuple(int(i) for i in np.unravel_index(value, problem.input_size))
        found = f", the input position {position}"
    raise InvalidProblem(
        f"indices{list(at)} is {value}{found}; expected one inside its window, "
        f"{' by '.join(windows)}"
    )


def _bounds(window: WindowAxis) -> tuple[Array, Array]:
    """Return the starts and stops of an adaptive pooling's windows."""
    o = np.arange(window.output)
    starts = (o * window.step + window.first) // window.unit
    return starts.clip(window.low), ((o * window.step + window.last) // window.unit).clip(
        max=window.high
    )


def _spatial(at: Sequence[int], letters: str) -> list[int]:
    return [place for place, letter in zip(at, letters, strict=True) if letter in "DHW"]
