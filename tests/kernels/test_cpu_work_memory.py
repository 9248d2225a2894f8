"""The CPU kernels read no work memory that they have not written: it is full of NaN here."""

from __future__ import annotations

from random import Random

import pytest

from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cpu.arguments import Buffer
from convgrad_service.backends.cpu.threads import Workspaces
from tests.support.kernels.harness import with_layouts
from tests.support.kernels.random_layers import check_class
from tests.support.numerics.cases import conv_backward
from tests.support.numerics.classes import CLASSES
from tests.support.numerics.geometries import Conv

ALL_BITS = 255  # a NaN in every type


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    """A backend whose buffers are filled before each launch."""
    take = Workspaces.take

    def filled(self: Workspaces, size_bytes: int) -> Buffer:
        buffer = take(self, size_bytes)
        buffer.memory.fill(ALL_BITS)
        return buffer

    monkeypatch.setattr(Workspaces, "take", filled)
    return CpuBackend(threads=2)


@pytest.mark.parametrize("name", CLASSES)
def test_random_layers(backend: CpuBackend, seed: int, name: str) -> None:
    rng = Random(f"{seed} {name} work memory")
    for _ in range(25):
        case = CLASSES[name](rng)
        layout = rng.choice(with_layouts(case.ndim, grouped=False))
        check_class(backend, case, rng.choice(["bfloat16", "float32"]), layout, False, seed)


def test_depthwise_columns_past_the_end_of_a_row(backend: CpuBackend, seed: int) -> None:
    """A stride leaves columns of the input that no output reads."""
    conv = Conv(1, 32, 32, (2, 9), (3, 3), 3, ((1, 1), (1, 0)), groups=32)
    for layout in with_layouts(2, grouped=True):
        check_class(backend, conv_backward("odd", conv), "float16", layout, False, seed)
