"""Launches as an executable CUDA graph, with a driver that notes what it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from convgrad.errors import DeviceUnavailable
from convgrad_service.inprocess.launch_graph import KernelNode, LaunchGraph


class Driver:
    def __init__(self, instantiating: int = 0) -> None:
        self.instantiating = instantiating
        self.nodes: list[tuple[list[int], int]] = []  # what runs before, blocks
        self.clusters: dict[int, int] = {}
        self.destroyed: list[int] = []

    def cuGraphCreate(self, out: Any, _: int) -> int:  # noqa: N802 - CUDA's name
        out._obj.value = 1
        return 0

    def cuGraphAddKernelNode_v2(  # noqa: N802
        self, out: Any, graph: Any, before: Any, count: Any, kernel: Any
    ) -> int:
        self.nodes.append((list(before)[: count.value], kernel._obj.grid[0]))
        out._obj.value = 10 + len(self.nodes)
        return 0

    def cuGraphKernelNodeSetAttribute(self, node: Any, _: int, value: Any) -> int:  # noqa: N802
        self.clusters[node.value] = value[0]
        return 0

    def cuGraphInstantiateWithFlags(self, out: Any, *_: Any) -> int:  # noqa: N802
        out._obj.value = 2
        return self.instantiating

    def cuGraphExecDestroy(self, executable: Any) -> None:  # noqa: N802
        self.destroyed.append(executable.value)

    def cuGraphDestroy(self, graph: Any) -> None:  # noqa: N802
        self.destroyed.append(graph.value)


def kernels() -> list[KernelNode]:
    return [KernelNode(grid=(blocks, 1, 1)) for blocks in (5, 6, 7)]


def test_kernels_wait_for_those_before_them() -> None:
    driver, before = Driver(), LaunchGraph.alive
    graph = LaunchGraph(driver, kernels(), [1, 4, 1], [None, 0, 0])
    assert LaunchGraph.alive == before + 1
    assert driver.nodes == [([], 5), ([11], 6), ([11], 7)]
    assert (graph.address, graph.nodes, driver.clusters) == (2, [11, 12, 13], {12: 4})
    del graph
    assert driver.destroyed == [2, 1]
    assert LaunchGraph.alive == before


def test_a_graph_that_the_driver_refuses() -> None:
    driver = Driver(instantiating=2)
    with pytest.raises(DeviceUnavailable, match="cuGraphInstantiateWithFlags failed: CUDA error 2"):
        LaunchGraph(driver, kernels(), [1, 1, 1], [None, None, 1])
    assert driver.destroyed == [1]
