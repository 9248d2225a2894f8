"""Kernel launches as an executable CUDA graph.

Native code launches it by one call, and sets the arguments of the kernels whose buffers have moved.
The structures mirror ``native/launch_plan.hpp``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.attributed_launch import CLUSTER_DIMENSION
from convgrad_service.plans.cuda.program import Launch

__all__ = ["KernelNode", "LaunchGraph"]

_POINTER, _U64 = ctypes.c_void_p, ctypes.c_uint64


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS: a kernel with its grid and arguments."""

    _fields_ = (
        ("function", _POINTER),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", _POINTER),
        ("extra", _POINTER),
        ("kernel", _POINTER),
        ("context", _POINTER),
    )

    @classmethod
    def of(cls, step: Launch, function: int, block: int) -> KernelNode:
        """Return the node of a launch of ``function`` with the argument structure at ``block``."""
        arguments = (_POINTER * 1)(block)
        node = cls(function, step.grid, step.block, step.shared_bytes)
        node.arguments = ctypes.addressof(arguments)
        node.kept = arguments  # alive as long as what points to it
        return node


class LaunchGraph:
    """An executable graph, destroyed with this object.

    Attributes
    ----------
    alive : int
        Number of graphs in this process; each holds some of the driver's memory.
    address : int
        The ``CUgraphExec``.
    nodes : list of int
        The ``CUgraphNode`` of each kernel.
    """

    alive = 0

    def __init__(
        self,
        driver: Any,
        kernels: Sequence[KernelNode],
        clusters: Sequence[int],
        after: Sequence[int | None],
    ) -> None:
        """Make a graph.

        Parameters
        ----------
        driver : CDLL
        kernels : sequence of KernelNode
        clusters : sequence of int
            The `Launch.cluster` of each.
        after : sequence of int or None
            Which of the kernels each one waits for.

        Raises
        ------
        DeviceUnavailable
            The driver refuses it.
        """
        self._driver, self._graph, self._executable = driver, _POINTER(), _POINTER()
        self.address = 0
        self.nodes: list[int] = []
        self._call("cuGraphCreate", ctypes.byref(self._graph), 0)
        for kernel, cluster, index in zip(kernels, clusters, after, strict=True):
            waits = [] if index is None else [self.nodes[index]]
            node, before = _POINTER(), (_POINTER * 1)(*waits)
            self._call(
                "cuGraphAddKernelNode_v2",
                ctypes.byref(node),
                self._graph,
                before,
                ctypes.c_size_t(len(waits)),
                ctypes.byref(kernel),
            )
            if cluster > 1:
                value = (ctypes.c_uint * 16)(cluster, 1, 1)
                self._call("cuGraphKernelNodeSetAttribute", node, CLUSTER_DIMENSION, value)
            self.nodes.append(node.value or 0)
        self._call(
            "cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, _U64(0)
        )
        self.address = self._executable.value or 0
        type(self).alive += 1

    def _call(self, name: str, *given: Any) -> None:
        status = getattr(self._driver, name)(*given)
        if status != 0:
            raise DeviceUnavailable(f"{name} failed: CUDA error {status}")

    def __del__(self) -> None:
        # When the interpreter exits, this module's names may be gone already.
        if self.address:
            type(self).alive -= 1
            self._driver.cuGraphExecDestroy(self._executable)
        if self._graph.value:
            self._driver.cuGraphDestroy(self._graph)
