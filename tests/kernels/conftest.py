"""The backends under test: the CPU's, and with the mark `gpu` a GPU's, through one fixture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cpu import CpuBackend
from tests.kernels import cuda_backends


def _cpu() -> Backend:
    return CpuBackend(threads=2)


BACKENDS = {"cpu": _cpu, **cuda_backends.MAKERS}


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=pytest.mark.gpu) if name in cuda_backends.MAKERS else name
        for name in BACKENDS
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    return BACKENDS[request.param]()


@pytest.fixture(autouse=True)
def _fresh_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array that np.empty makes starts as NaNs, so an element never written is seen."""
    empty = np.empty

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        if array.dtype != object and array.flags.c_contiguous:
            array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    monkeypatch.setattr(np, "empty", poisoned)
