"""Plans that run again at the same addresses, as CUDA graphs: one call for all of their steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from convgrad_service.backends.cuda.launch import Kernels
from convgrad_service.plans.cuda_program import Step

__all__ = ["Graphs"]

KEPT = 128

Steps = tuple[Step, ...]


class Graphs:
    """Runs plans on streams; what has run there before at the same addresses, from its graph.

    A server's requests repeat, and so does the memory that they are given. The first run launches
    step by step, the second records a graph, and later ones launch that: a few microseconds for
    the host, and none between the kernels of a plan. ``KEPT`` plans and addresses are remembered,
    the latest. Safe to call from several threads, as long as no two run on the same memory at once.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # Steps are told apart by identity, and kept, so that no others get theirs.
        self._seen: OrderedDict[tuple[int, tuple[int, ...]], tuple[Steps, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, steps: Steps, addresses: Mapping[str, int], stream: Any) -> Any:
        """Put the steps on a stream, in order; returns before they have run.

        What it returns must be kept until they have.
        """
        # A graph uses the zeros of the stream it was recorded on, which only one may at a time.
        key = id(steps), (stream.ptr, *addresses.values())
        with self._lock:
            seen, (_, graph) = key in self._seen, self._seen.get(key, (steps, None))
        if graph is None and seen:
            graph = self._recorded(steps, addresses, stream)
        if graph is None:
            self._kernels.run(steps, addresses, stream)
        else:
            graph.launch(stream)
        with self._lock:
            self._seen[key] = steps, graph
            self._seen.move_to_end(key)
            if len(self._seen) > KEPT:
                self._seen.popitem(last=False)
        return graph

    def _recorded(self, steps: Steps, addresses: Mapping[str, int], stream: Any) -> Any:
        """A graph of the steps."""
        stream.begin_capture()
        try:
            self._kernels.run(steps, addresses, stream)
        finally:
            # Also where a step could not be recorded: the stream must be one again.
            graph = stream.end_capture()
        return graph
