"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.tensor_layout import tensor_layout_of


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split sums into parts of 32 kB, so that small problems have several."""
    monkeypatch.setattr(parts, "PART_BYTES", 16_000)
    tensor_layout_of.cache_clear()
    yield
    tensor_layout_of.cache_clear()
