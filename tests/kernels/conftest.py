"""The backends under test. A GPU's joins with the mark `gpu`, through the same fixture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cpu import CpuBackend


def _cpu() -> Backend:
    return CpuBackend(threads=2)


BACKENDS = {"cpu": _cpu}


@pytest.fixture(scope="session", params=BACKENDS)
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
