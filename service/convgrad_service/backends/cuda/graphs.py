"""Running plans; one that runs again at the same addresses is replayed as a CUDA graph."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.plans.cuda.program import CudaPlan

__all__ = ["Graphs"]

MAX_GRAPHS = 128


class Graphs:
    """Runs plans on streams, by CUDA graphs where a plan repeats at the same addresses.

    A server's requests repeat, and so do their addresses in the memory pool. The first run launches
    step by step, with branches on concurrent streams. The second captures that as a graph, and
    later ones launch it, which costs the host a few microseconds. The latest ``MAX_GRAPHS`` pairs
    of plan and addresses are kept. ``new_stream`` creates streams for branches. Thread-safe as long
    as no two runs share memory or a stream.
    """

    def __init__(self, kernels: Kernels, new_stream: Callable[[], Any]) -> None:
        self._kernels, self._new_stream = kernels, new_stream
        # Plans are compared by identity; keeping them alive keeps their identity unique.
        self._seen: OrderedDict[tuple[int, tuple[int, ...]], tuple[CudaPlan, Any]] = OrderedDict()
        # The latest graph of each stream may be running: eviction must not destroy it.
        self._running: dict[int, Any] = {}
        # For each stream, those of the branches after the first.
        self._branch_streams: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def run(self, plan: CudaPlan, addresses: Mapping[str, int], stream: Any) -> None:
        """Enqueue a plan on a stream, on which the previous plan must have ended."""
        # A graph uses the zeros of the stream that it was captured on, so it must run there.
        key = id(plan), (stream.ptr, *addresses.values())
        with self._lock:
            seen, (_, graph) = key in self._seen, self._seen.get(key, (plan, None))
        if graph is None and seen:
            graph = self.captured(plan, addresses, stream)
        if graph is None:
            self.run_steps(plan, addresses, stream)
        else:
            graph.launch(stream)
        with self._lock:
            self._seen[key] = plan, graph
            self._seen.move_to_end(key)
            if len(self._seen) > MAX_GRAPHS:
                self._seen.popitem(last=False)
            self._running[stream.ptr] = graph

    def run_steps(self, plan: CudaPlan, addresses: Mapping[str, int], stream: Any) -> None:
        """Enqueue a plan step by step, with branches on other streams that this one waits for."""
        if not plan.branches:
            self._kernels.run(plan.steps, addresses, stream)
            return
        others = self._streams_for(stream, len(plan.branches) - 1)
        spans = pairwise([*plan.branches, len(plan.steps)])
        self._kernels.run(plan.steps[: plan.branches[0]], addresses, stream)
        fork = stream.record()
        for other in others:
            other.wait_event(fork)
        try:
            for one, span in zip((stream, *others), spans, strict=True):
                self._kernels.run(plan.steps[slice(*span)], addresses, one)
        finally:
            # Join even if a launch was refused: the stream's owner then waits for everything.
            for other in others:
                stream.wait_event(other.record())

    def captured(self, plan: CudaPlan, addresses: Mapping[str, int], stream: Any) -> Any:
        """Return the graph of a plan that has run on the stream before."""
        stream.begin_capture()
        try:
            self.run_steps(plan, addresses, stream)
        finally:
            # End the capture even if a step failed, so that the stream stays usable.
            graph = stream.end_capture()
        return graph

    def _streams_for(self, stream: Any, count: int) -> list[Any]:
        """Return ``count`` streams for branches of plans on this stream.

        They are created when a plan first runs, and so are the zeros of their kernels: a capture,
        which comes later, must create neither.
        """
        others = self._branch_streams.setdefault(stream.ptr, [])
        others += [self._new_stream() for _ in range(count - len(others))]
        return others[:count]
