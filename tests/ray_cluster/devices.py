"""A replica with a simulated device: computing takes time but no CPU.

On a machine with few cores, replicas, front end and clients compete for them. These replicas do
not, so that only the path to them is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.errors import ServiceError
from convgrad_service.backends.base import Outcome
from convgrad_service.problems import Problem
from convgrad_service.server.ray_serve import Compute

__all__ = ["DEVICE_S", "Waiting"]

DEVICE_S = 0.1


class Waiting(Compute):
    """Returns zeros after `DEVICE_S`, one problem at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._device = asyncio.Lock()

    async def run(
        self, problem: Problem, tensors: Mapping[str, NDArray[Any]]
    ) -> Outcome | ServiceError:
        """Override `Compute.run`."""
        async with self._device:
            await asyncio.sleep(DEVICE_S)
        outputs = {
            name: np.zeros(spec.shape, spec.dtype.numpy) for name, spec in problem.outputs.items()
        }
        return Outcome(outputs, "waits", DEVICE_S, 1, 0)
