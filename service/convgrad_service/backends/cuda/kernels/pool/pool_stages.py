"""Max pooling in stages: of all axes at once, or of one after another.

The maximum of a window is that of its rows' maxima, whatever the stride, padding and dilation. Axis
by axis, a window of n by n positions takes 2n comparisons instead of n*n, and more passes over
memory. Rows come first: of equal maxima the first in the order of positions wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.pool.window_form import LARGEST, widths
from convgrad_service.plans.cuda.device import CudaDevice, sum_dtype
from convgrad_service.plans.cuda.families import Chosen, Family, Solver, choose
from convgrad_service.plans.cuda.pooling import sliding_windows
from convgrad_service.plans.cuda.program import Fragment, Instance, Workspace
from convgrad_service.plans.cuda.works import PoolWork, WindowWork
from convgrad_service.problems.sizes import Size
from convgrad_service.problems.windows import WindowAxis

__all__ = ["MaximaByAxes", "PoolThroughIndices"]

# The time of a pass over a tensor between two stages, in comparisons of a thread: forward and of a
# gradient, channels first and last. Fitted to windows of 4 to 13 positions with strides of 1 to 3.
FORWARD_PASS = {False: 14, True: 6}
GRADIENT_PASS = {False: 24, True: 6}
# Maxima of large windows go axis by axis too where there are fewer threads for a multiprocessor.
FEW_THREADS, LARGE_WINDOW = 256, 32


@dataclass(frozen=True, slots=True)
class _Stage:
    """The windows along all axes, most of which may be single positions."""

    windows: tuple[WindowAxis, ...]
    dilation: Size

    @property
    def outputs(self) -> int:
        return prod(axis.output for axis in self.windows)

    @property
    def taps(self) -> int:
        """The positions of a window."""
        axes = zip(self.windows, self.dilation, strict=True)
        return prod((axis.last - axis.first - 1) // step + 1 for axis, step in axes)


def _by_axes(whole: _Stage) -> list[_Stage]:
    """Return a stage for each axis with windows, the last axis first."""
    found: list[_Stage] = []
    for own, axis in reversed(list(enumerate(whole.windows))):
        if axis.is_identity:
            continue
        sizes = [
            other.output if index > own else other.input
            for index, other in enumerate(whole.windows)
        ]
        windows = [WindowAxis.sliding(size, size, 1, 1, 0) for size in sizes]
        windows[own] = axis
        dilation = [step if index == own else 1 for index, step in enumerate(whole.dilation)]
        found.append(_Stage(tuple(windows), tuple(dilation)))
    return found


def _stages(
    windows: tuple[WindowAxis, ...], dilation: Size, a_pass: int, *, few: bool = False
) -> list[_Stage]:
    """Return the stages that are expected to take the least time, if there are ``few`` threads."""
    whole = _Stage(windows, dilation or (1,) * len(windows))
    apart = _by_axes(whole)
    # Comparisons for an output, as if windows were far from the edges.
    cost, outputs = 0, 1
    for stage in reversed(apart):
        cost += (stage.taps + a_pass) * outputs
        outputs *= prod(axis.step for axis in stage.windows)
    pays = cost < whole.taps or (few and whole.taps >= LARGE_WINDOW)
    return apart if len(apart) > 1 and pays else [whole]


class MaximaByAxes(Solver[WindowWork, list[_Stage]]):
    """Maxima over windows of many positions along several axes, an axis after another."""

    name = "maxima_by_axes"

    def __init__(self, maxima: Sequence[Family[WindowWork]]) -> None:
        self._maxima = maxima

    def solve(self, work: WindowWork, device: CudaDevice) -> list[_Stage] | str:
        if work.kind != "maxima":
            return "no maxima"
        if any(axis.unit != 1 for axis in work.windows):
            return "windows that do not slide by whole positions"
        stages = self._stages(work, device)
        if len(stages) == 1:
            return "small windows"
        if prod(axis.input for axis in work.windows) > LARGEST:
            return "positions of more than 32 bits"
        return stages

    def fragment(self, work: WindowWork, device: CudaDevice, stages: list[_Stage]) -> Fragment:
        found = [_maxima_of(work, stage) for stage in stages]
        buffers = _Buffers(work)
        for index, stage in enumerate(stages[:-1]):
            values = buffers.add(f"values{index}", stage.outputs, work.dtype)
            places = None
            if work.indices is not None:
                places = buffers.add(f"places{index}", stage.outputs, DType.INT32)
            found[index] = replace(found[index], y=values, indices=places, index_dtype=DType.INT32)
            found[index + 1] = replace(found[index + 1], x=values, carried=places)
        chosen = [choose(self._maxima, stage, device) for stage in found]
        return buffers.fragment(self.name, chosen)

    def _stages(self, work: WindowWork, device: CudaDevice) -> list[_Stage]:
        outputs = prod(axis.output for axis in work.windows)
        vectors = work.channels // max(widths(work.dtype))
        threads = work.batch * vectors * outputs if work.channels_last and outputs > 1 else 0
        few = 0 < threads < FEW_THREADS * device.multiprocessors
        return _stages(work.windows, work.dilation, FORWARD_PASS[work.channels_last], few=few)


class PoolThroughIndices:
    """Max pooling's gradient from its input: of each stage the indices, then their gradients."""

    name = "pool_through_indices"

    def __init__(
        self, maxima: Sequence[Family[WindowWork]], routes: Sequence[Family[WindowWork]]
    ) -> None:
        self._maxima, self._routes = maxima, routes

    def why_not(self, work: PoolWork, device: CudaDevice) -> str | None:
        for stage in self._works(work)[0]:
            for families, part in ((self._maxima, stage), (self._routes, _routes_of(stage))):
                reason = families[-1].why_not(part, device)
                if reason is not None:
                    return reason
        return None

    def launches(self, work: PoolWork, device: CudaDevice) -> Fragment:
        found, buffers = self._works(work)
        chosen = [choose(self._maxima, stage, device) for stage in found]
        gradient, dtype = work.y.buffer, work.dtype
        for index, stage in reversed(list(enumerate(found))):
            routes = replace(_routes_of(stage), x=gradient, x_dtype=dtype, y=work.x.buffer)
            if index:
                dtype = sum_dtype(work.dtype)
                positions = prod(axis.input for axis in stage.windows)
                gradient = buffers.add(f"gradient{index}", positions, dtype)
                routes = replace(routes, y=gradient, dtype=dtype)
            chosen.append(choose(self._routes, routes, device))
        return buffers.fragment(self.name, chosen)

    def instances(self) -> Iterable[Instance]:
        """None of its own; see `Family.instances`."""
        return ()

    def _works(self, work: PoolWork) -> tuple[list[WindowWork], _Buffers]:
        """Return the stages' maxima, and the workspace between them."""
        whole = WindowWork(
            kind="maxima",
            batch=work.batch,
            channels=work.channels,
            channels_last=work.x.channels_last,
            dtype=work.dtype,
            windows=sliding_windows(work.pool),
            dilation=work.pool.dilation,
            x=work.source.buffer,
            y=None,
            prefix=work.prefix,
        )
        found: list[WindowWork] = []
        buffers = _Buffers(whole)
        a_pass = GRADIENT_PASS[whole.channels_last]
        stages = _stages(whole.windows, whole.dilation, a_pass)
        values = whole.x
        for index, stage in enumerate(stages):
            narrow = prod(axis.input for axis in stage.windows) <= LARGEST
            index_dtype = DType.INT32 if narrow else DType.INT64
            indices = buffers.add(f"indices{index}", stage.outputs, index_dtype)
            part = replace(
                _maxima_of(whole, stage), x=values, indices=indices, index_dtype=index_dtype
            )
            if index + 1 < len(stages):
                values = buffers.add(f"values{index}", stage.outputs, whole.dtype)
                part = replace(part, y=values)
            found.append(part)
        return found, buffers


def _maxima_of(work: WindowWork, stage: _Stage) -> WindowWork:
    return replace(work, windows=stage.windows, dilation=stage.dilation)


def _routes_of(maxima: WindowWork) -> WindowWork:
    """Return the work of adding the gradients of maxima at their positions."""
    return replace(
        maxima,
        kind="routes",
        windows=tuple(axis.transposed() for axis in maxima.windows),
        counted=maxima.windows,
    )


class _Buffers:
    """The workspace between the pieces of a work, as many positions for each of its planes."""

    def __init__(self, work: WindowWork) -> None:
        self._prefix, self._planes = work.prefix, work.batch * work.channels
        self._workspace: list[Workspace] = []

    def add(self, name: str, positions: int, dtype: DType) -> str:
        size_bytes = self._planes * positions * dtype.itemsize
        self._workspace.append(Workspace(f"{self._prefix}{name}", size_bytes))
        return self._workspace[-1].name

    def fragment(self, name: str, chosen: Sequence[Chosen]) -> Fragment:
        """Return the launches of all pieces, one after another."""
        fragments = [one.fragment for one in chosen]
        steps = tuple(step for one in fragments for step in one.steps)
        workspace = (space for one in fragments for space in one.workspace)
        return Fragment(name, steps, (*self._workspace, *workspace))
