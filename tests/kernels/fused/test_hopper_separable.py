"""The fused kernel for Hopper, emulated: every tile, and the limits of what it supports."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fused.hopper_separable import TILES, HopperSeparable
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import Case, fused
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

NONE, BOTH = ("none", "none"), (True, True)


def separable(
    name: str,
    channels: int,
    outputs: int,
    size: tuple[int, int],
    stride: int = 1,
    padding: int = 1,
    batch: int = 2,
    activations: tuple[str, str] = NONE,
    biases: tuple[bool, bool] = (False, False),
) -> Case:
    first = Conv(batch, channels, channels, size, (3, 3), stride, padding, 1, channels)
    return fused(name, first, Conv(0, 0, outputs, (), (1, 1)), activations, biases)


def cases_of(index: int) -> list[Case]:
    """Return cases with partial and with several tiles of pixels, chunks and slices."""
    tile = TILES[index]
    few = min(tile.chunk, 24)
    many = few if tile.row_bytes == 64 else 136
    size = (tile.height + 2) * tile.stride, (tile.width + 3) * tile.stride
    more: dict[str, Any] = {"stride": tile.stride}
    outputs = tile.outputs + 24
    return [
        separable("several", many, outputs, size, batch=3, **more),
        separable("odd", few, 40, (3, 5), activations=("relu", "relu6"), biases=BOTH, **more),
        separable("silu", few, 8, (4, 2), activations=("silu", "silu"), biases=BOTH, **more),
        separable("padding_beyond", 8, 16, (3, 4), padding=5, biases=(False, True), **more),
        separable("one_pixel", 8, 8, (1, 1), batch=1, biases=(True, False), **more),
    ]


TAKEN = [
    pytest.param(index, case, gate, id=f"{index}-{case.name}-{gate}")
    for index in range(len(TILES))
    for case in cases_of(index)
    for gate in ("exact", "bounded")
    if gate == "bounded" or "silu" not in case.params.values()
]


class Fused(EmulatedBackend):
    """A backend with only the kernel under test."""

    def run(self, *given: Any, **named: Any) -> Outcome:
        outcome = super().run(*given, **named)
        assert outcome.kernel.startswith("hopper_separable")
        return outcome


@lru_cache
def emulated(index: int) -> EmulatedBackend:
    return Fused(replace(FAMILIES, fused=[HopperSeparable([TILES[index]], anything=True)]))


@pytest.mark.parametrize(("index", "case", "gate"), TAKEN)
def test_fused(seed: int, index: int, case: Case, gate: str) -> None:
    """One launch, through both gates."""
    tensors, wanted = drawn(seed, case, "bfloat16", gate)
    found = answers(emulated(index), case, tensors, "NHWC")
    check(found, wanted, gate, f"seed {seed}, {case.id}, tile {index}")


def test_float16(seed: int) -> None:
    case = cases_of(0)[0]
    tensors, wanted = drawn(seed, case, "float16", "bounded")
    check(answers(emulated(0), case, tensors, "NHWC"), wanted, "bounded", f"seed {seed}")


@pytest.mark.parametrize("index", [0, 2, 3])
def test_what_is_not_finite_stays_where_it_belongs(seed: int, index: int) -> None:
    for case in (cases_of(index)[1], separable("3x3", 16, 24, (9, 11))):
        check_rule(emulated(index), seed, case, "float16", "NHWC")
