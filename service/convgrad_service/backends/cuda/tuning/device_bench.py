"""Runs plans on the GPU for the tuner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.backends.cuda.stopwatch import CudaStopwatch
from convgrad_service.backends.cuda.tuning.tuner import Run
from convgrad_service.plans.cuda.program import CudaPlan
from convgrad_service.problems.base import Problem

__all__ = ["DeviceBench"]


class DeviceBench:
    """See `Bench`: on random inputs, the same for all plans of a problem."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._inputs = lru_cache(maxsize=1)(_inputs)

    @contextmanager
    def run(self, problem: Problem, plan: CudaPlan) -> Iterator[Run]:
        """See `Bench.run`."""
        inputs = self._inputs(problem)
        with self._backend.stopwatch_of(problem, inputs, plan) as watch:
            (output,) = problem.outputs
            yield _DeviceRun(watch, output)


class _DeviceRun:
    def __init__(self, watch: CudaStopwatch, output: str) -> None:
        self._watch, self._output = watch, output

    def seconds(self) -> float:
        """See `Run.seconds`."""
        return self._watch.cold()

    def result(self) -> Any:
        """See `Run.result`."""
        view = self._watch.tensors[self._output]
        # Whatever is not written stays NaN.
        view.data.memset(0xFF, view.nbytes)
        import_cupy().cuda.runtime.deviceSynchronize()
        self._watch.warm()
        return np.asarray(view.get()).astype(np.float32)


def _inputs(problem: Problem) -> Mapping[str, Any]:
    draw = np.random.default_rng(0)
    return {
        name: draw.standard_normal(spec.shape, np.float32).astype(spec.dtype.numpy)
        for name, spec in problem.inputs.items()
    }
