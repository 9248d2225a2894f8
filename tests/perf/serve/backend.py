"""A backend that only sums its inputs and returns a ready result: what is left is the path."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.base import Outcome, Plan
from convgrad_service.problems import Problem

__all__ = ["Sums"]


class Sums:
    """Reads every byte of the inputs once, as the model that Triton runs here does."""

    name = "sums"
    fault: str | None = None

    def __init__(self) -> None:
        self._ready: dict[tuple[Any, ...], NDArray[Any]] = {}

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
    ) -> Outcome:
        for tensor in tensors.values():
            tensor.sum()
        outputs = {}
        for name, spec in problem.outputs.items():
            key = (spec.shape, spec.dtype)
            if key not in self._ready:
                self._ready[key] = np.ones(spec.shape, spec.dtype.numpy)
            outputs[name] = self._ready[key]
        return Outcome(outputs, "sums", 1e-6, 1, 0)

    def explain(self, problem: Problem) -> Plan:
        raise NotImplementedError("this backend has no kernels")
