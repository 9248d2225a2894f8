"""Plans that run again at the same addresses, as CUDA graphs: one call for all of their steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.plans.cuda.program import CudaPlan

__all__ = ["Graphs"]

KEPT = 128


class Graphs:
    """Runs plans on streams; what has run there before at the same addresses, from its graph.

    A server's requests repeat, and so does the memory that they are given. The first run launches
    step by step, a plan's branches side by side; the second records that as a graph, and later ones
    launch it: a few microseconds for the host, and none between the kernels of a plan.
    ``KEPT`` plans and addresses are remembered, the latest. ``new_stream`` makes the streams that
    branches are recorded on. Safe to call from several threads, as long as no two run on the same
    memory, or the same stream, at once.
    """

    def __init__(self, kernels: Kernels, new_stream: Callable[[], Any]) -> None:
        self._kernels, self._new_stream = kernels, new_stream
        # Plans are told apart by identity, and kept, so that no other gets one's graph.
        self._seen: OrderedDict[tuple[int, tuple[int, ...]], tuple[CudaPlan, Any]] = OrderedDict()
        # The latest of each stream: it may run, so it must not go even if others push it out.
        self._running: dict[int, Any] = {}
        # Beside each stream, those of the branches after the first.
        self._beside: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def run(self, plan: CudaPlan, addresses: Mapping[str, int], stream: Any) -> None:
        """Put a plan on a stream; returns before it has run. The one before it there must have."""
        # A graph uses the zeros of the stream it was recorded on, which only one may at a time.
        key = id(plan), (stream.ptr, *addresses.values())
        with self._lock:
            seen, (_, graph) = key in self._seen, self._seen.get(key, (plan, None))
        if graph is None and seen:
            graph = self._recorded(plan, addresses, stream)
        if graph is None:
            self.side_by_side(plan, addresses, stream)
        else:
            graph.launch(stream)
        with self._lock:
            self._seen[key] = plan, graph
            self._seen.move_to_end(key)
            if len(self._seen) > KEPT:
                self._seen.popitem(last=False)
            self._running[stream.ptr] = graph

    def side_by_side(self, plan: CudaPlan, addresses: Mapping[str, int], stream: Any) -> None:
        """Put a plan on a stream, step by step, its branches on others that this one waits for."""
        if not plan.branches:
            self._kernels.run(plan.steps, addresses, stream)
            return
        beside = self._streams_beside(stream, len(plan.branches) - 1)
        cuts = pairwise([*plan.branches, len(plan.steps)])
        self._kernels.run(plan.steps[: plan.branches[0]], addresses, stream)
        start = stream.record()
        for side in beside:
            side.wait_event(start)
        try:
            for one, cut in zip((stream, *beside), cuts, strict=True):
                self._kernels.run(plan.steps[slice(*cut)], addresses, one)
        finally:
            # Also where a launch was refused: who waits for this stream waits for all there is.
            for side in beside:
                stream.wait_event(side.record())

    def _recorded(self, plan: CudaPlan, addresses: Mapping[str, int], stream: Any) -> Any:
        stream.begin_capture()
        try:
            self.side_by_side(plan, addresses, stream)
        finally:
            # Also where a step could not be recorded: the stream must be one again.
            graph = stream.end_capture()
        return graph

    def _streams_beside(self, stream: Any, count: int) -> list[Any]:
        """So many streams that only branches beside this one use.

        They are made as a plan first runs, step by step, and so are the zeros that its kernels
        count in: a recording, which comes after that on the same streams, makes neither.
        """
        beside = self._beside.setdefault(stream.ptr, [])
        beside += [self._new_stream() for _ in range(count - len(beside))]
        return beside[:count]
