"""Fixtures of the kernels' host sides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from convgrad_service.backends.cuda.kernels.conv import hopper_weight, pointwise_gemm_model
from convgrad_service.backends.cuda.tuning import correction


@pytest.fixture
def uncorrected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cost models without the shipped corrections."""

    def forget() -> None:
        hopper_weight._best.cache_clear()
        pointwise_gemm_model.chosen.cache_clear()

    monkeypatch.setattr(correction, "_shipped", dict)
    forget()
    yield
    forget()
