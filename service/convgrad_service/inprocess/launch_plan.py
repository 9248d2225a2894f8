"""A plan's launches as structures that native code fills in and enqueues by one call.

They mirror ``native/launch_plan.hpp``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.attributed_launch import LaunchConfig
from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.inprocess.launch_graph import KernelNode, LaunchGraph
from convgrad_service.plans.cuda.program import Clear, Launch, Step

__all__ = ["MOST_BUFFERS", "Driver", "NativePlan"]

MOST_BUFFERS = 48
# With more, kernels are launched one by one: a program with that many shapes repeats few of them.
MOST_GRAPHS = 4096

_U32, _U64, _POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
# The driver's functions, in the order of the structure Driver in the native code.
_FUNCTIONS = (
    "cuLaunchKernelEx",
    "cuMemsetD8Async",
    "cuTensorMapReplaceAddress",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuCtxGetCurrent",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphLaunch",
)


class Driver(ctypes.Structure):
    """The addresses of the driver's functions."""

    _fields_ = tuple((name, _POINTER) for name in _FUNCTIONS)

    @classmethod
    def loaded(cls) -> Driver:
        """Look the functions up.

        Raises
        ------
        DeviceUnavailable
            There is no driver, or it is older than CUDA 12.
        """
        try:
            return cls(*(ctypes.cast(getattr(_driver(), name), _POINTER) for name in _FUNCTIONS))
        except AttributeError as error:
            raise DeviceUnavailable(f"the CUDA driver is too old: {error}") from error


class _Pointer(ctypes.Structure):
    _fields_ = (("word", _U32), ("buffer", _U32), ("offset", _U64))


class _Map(ctypes.Structure):
    _fields_ = (
        ("byte", _U32),
        ("buffer", _U32),
        ("offset", _U64),
        ("at", _U64),
        ("clears_bit", _U64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("config", _POINTER),
        ("function", _POINTER),
        ("block", _POINTER),
        ("pointers", _POINTER),
        ("maps", _POINTER),
        ("pointer_count", _U32),
        ("map_count", _U32),
        ("clear_bytes", _U64),
        ("clear_buffer", _U64),
        ("node", _POINTER),
        ("kernel", _POINTER),
    )


class _Branch(ctypes.Structure):
    _fields_ = (
        ("steps", _POINTER),
        ("count", _U64),
        ("zeros", _U64),
        ("stream", _POINTER),
        ("event", _POINTER),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("branches", _POINTER),
        ("branch_count", _U64),
        ("forks", _U64),
        ("workspace", _POINTER),
        ("workspace_count", _U64),
        ("start", _POINTER),
        ("graph", _POINTER),
    )


class NativePlan:
    """A plan's launches in memory.

    Attributes
    ----------
    address : int
        Address of the structure ``LaunchPlan``, which lives as long as this object.
    context : int
        The CUDA context that it is for.
    """

    def __init__(
        self,
        branches: Sequence[Sequence[Step]],
        kernels: Kernels,
        addresses: Mapping[str, int],
        zeros: Sequence[int],
        workspace: Sequence[int],
        sides: tuple[int, Sequence[tuple[int, int]]] | None,
    ) -> None:
        """Fill the structures in.

        Parameters
        ----------
        branches : sequence of sequence of Step
            As `CudaPlan.branches` divides the steps.
        kernels : Kernels
        addresses : mapping of str to int
            Where buffers might be: tensors, workspace, zeros, in the order of the native code.
        zeros : sequence of int
            The address of each branch's zeros.
        workspace : sequence of int
            The offset of each buffer in the workspace.
        sides : (event, sequence of (event, stream)), optional
            Given if branches run side by side: streams for those after the second, and events.
        """
        self._kept: list[Any] = []
        self._kernels, self._addresses, self._buffers = kernels, addresses, list(addresses)
        start, pairs = (None, []) if sides is None else sides
        others: list[tuple[int | None, int | None]] = [(None, None)] * 2 + list(pairs)
        made = [[self._step(step) for step in steps] for steps in branches]
        self._graph = self._as_graph(branches, made, sides is not None)
        arrays = [
            _Branch(self._array(_Step, steps), len(steps), zero, stream, event)
            for steps, zero, (event, stream) in zip(
                made, zeros, others + [(None, None)] * len(made), strict=False
            )
        ]
        self._plan = _Plan(
            self._array(_Branch, arrays),
            len(arrays),
            sides is not None,
            self._array(_U64, workspace),
            len(workspace),
            start,
            self._graph.address if self._graph else None,
        )
        self.address = ctypes.addressof(self._plan)
        self.context = _current_context()

    def _step(self, step: Step) -> _Step:
        if isinstance(step, Clear):
            buffer = self._buffers.index(step.buffer)
            return _Step(clear_bytes=step.size_bytes, clear_buffer=buffer)
        return self._launch(step)

    def _launch(self, step: Launch) -> _Step:
        block = step.arguments.block(self._addresses, self._buffers)
        config = LaunchConfig.of(step)
        self._kept += block, config
        places = list(self._addresses.values())
        pointers = [_Pointer(*each) for each in block.pointers]
        maps = [
            _Map(byte, buffer, offset, places[buffer], clears)
            for byte, buffer, offset, clears in block.maps
        ]
        return _Step(
            ctypes.addressof(config),
            self._kernels.function(step).ptr,
            block.address,
            self._array(_Pointer, pointers),
            self._array(_Map, maps),
            len(pointers),
            len(maps),
        )

    def _as_graph(
        self, branches: Sequence[Sequence[Step]], made: Sequence[Sequence[_Step]], forks: bool
    ) -> LaunchGraph | None:
        """Return the steps as a graph, which costs the host half of a launch, if it can be one."""
        launches = [step for steps in branches for step in steps if isinstance(step, Launch)]
        every = [step for steps in made for step in steps]
        if len(launches) < len(every) or LaunchGraph.alive >= MOST_GRAPHS:
            return None
        kernels = [
            KernelNode.of(launch, step.function, step.block)
            for launch, step in zip(launches, every, strict=True)
        ]
        after: list[int | None] = [index - 1 if index else None for index in range(len(every))]
        if forks:
            common = starts = len(branches[0])
            for steps in branches[1:]:
                if steps:
                    after[starts] = common - 1 if common else None
                starts += len(steps)
        clusters = [launch.cluster for launch in launches]
        graph = LaunchGraph(_driver(), kernels, clusters, after)
        for step, kernel, node in zip(every, kernels, graph.nodes, strict=True):
            step.kernel, step.node = ctypes.addressof(kernel), node
        self._kept += kernels
        return graph

    def _array(self, kind: Any, items: Any) -> int:
        """Return the address of an array that lives as long as this object."""
        listed = list(items)
        array = (kind * len(listed))(*listed)
        self._kept.append(array)
        return ctypes.addressof(array)


def _current_context() -> int:
    context = _POINTER()
    _driver().cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceUnavailable(f"there is no CUDA driver: {error}") from error
