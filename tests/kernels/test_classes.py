"""Random geometries of each class of layer with specialised kernels, through both gates."""

from __future__ import annotations

from random import Random

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import with_layouts
from tests.support.kernels.random_layers import check_class
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.classes import CLASSES

# Weights: the dtypes that networks are trained in are drawn most often.
SHARES = {"bfloat16": 4, "float16": 2, "float32": 3, "float64": 1}


def _layout(case: Case, rng: Random) -> str | None:
    """Draw a layout, channels last most often."""
    layouts = with_layouts(case.ndim, grouped=case.operation in FROM_CONV)
    return layouts[2] if rng.random() < 0.5 else rng.choice(layouts)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", CLASSES)
def test_class(backend: Backend, seed: int, name: str, part: int) -> None:
    rng = Random(f"{seed} {name} {part}")
    for _ in range(25):
        case = CLASSES[name](rng)
        (dtype,) = rng.choices(list(SHARES), list(SHARES.values()))
        high = dtype == "float32" and rng.random() < 0.5
        check_class(backend, case, dtype, _layout(case, rng), high, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize("name", CLASSES)
def test_emulated(seed: int, name: str) -> None:
    """Run the kernels that plans choose, in the emulator."""
    backend, rng = EmulatedBackend(FAMILIES), Random(f"{seed} {name}")
    for _ in range(200):
        case = CLASSES[name](rng)
        (dtype,) = rng.choices(list(SHARES), list(SHARES.values()))
        high = dtype == "float32" and rng.random() < 0.5
        check_class(backend, case, dtype, _layout(case, rng), high, seed)
