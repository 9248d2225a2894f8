"""Separable convolution in two launches on Hopper, in the emulator and on a GPU.

The weights of the second launch are padded to whole cache lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import DEPTHWISE, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import Case, fused
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
Place = Callable[..., Backend]
TF32 = 2.0**-10  # error of rounding the factors

TILES = (
    HopperTile(128, 224),
    HopperTile(192, 128, pingpong=True),
    HopperTile(128, 64, split=2, single=True),
)


def separable(
    name: str, channels: int, outputs: int, size: tuple[int, int], stride: int = 1, kernel: int = 3
) -> Case:
    pad = kernel // 2
    first = Conv(3, channels, channels, size, (kernel, kernel), stride, pad, 1, channels)
    return fused(name, first, Conv(0, 0, outputs, (), (1, 1)), ("none", "none"), (False, False))


CASES = [
    # Weight rows of one and a partial cache line, and without padding; several output tiles.
    separable("lines", 72, 232, (9, 11)),
    separable("as_they_are", 128, 64, (7, 7)),
    separable("strided", 88, 136, (15, 13), 2),
    separable("one_pixel", 72, 64, (1, 1)),
    separable("5x5", 72, 64, (8, 9), 1, 5),
]


def backend(place: Place, tile: HopperTile) -> Backend:
    """Return a backend with only the two kernels under test."""
    gather = HopperGather(True, Schedule(tile))
    return place(families=replace(FAMILIES, fused=[], fwd=[*DEPTHWISE, gather]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_two_launches(place: Place, seed: int, case: Case, tile: HopperTile, dtype: str) -> None:
    """Through both gates, with equal bits when repeated."""
    computed = backend(place, tile)
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(computed, case, tensors, "NHWC")
        check(found, wanted, gate, f"seed {seed}, {case.id}, {tile}")
    again = answers(computed, case, tensors, "NHWC")
    np.testing.assert_array_equal(found["output"], again["output"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ["none", "relu", "relu6", "silu"])
@pytest.mark.parametrize("tile", [TILES[0], HopperTile(128, 160, pingpong=True)], ids=str)
def test_bias_and_activation(place: Place, seed: int, tile: HopperTile, activation: str) -> None:
    """The second launch applies bias and activation before the only rounding."""
    first = Conv(3, 72, 72, (9, 11), (3, 3), 1, 1, 1, 72)
    case = fused("finished", first, Conv(0, 0, 232, (), (1, 1)), ("none", activation), (True, True))
    computed = backend(place, tile)
    for gate in ("bounded",) if activation == "silu" else ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, "bfloat16", gate)
        found = answers(computed, case, tensors, "NHWC")
        check(found, wanted, gate, f"seed {seed}, {activation}, {tile}")
    check_rule(computed, seed, case, "bfloat16", "NHWC")


@pytest.mark.parametrize("place", PLACES)
def test_float32(place: Place, seed: int) -> None:
    """In TF32, whose rows of shared memory hold 32 channels."""
    for case in CASES[:2]:
        tensors, wanted = drawn(seed, case, "float32", "bounded")
        computed = backend(place, HopperTile(128, 160, pingpong=True))
        high = case.with_params("high", precision="high")
        found = answers(computed, high, tensors, "NHWC")
        check(found, wanted, "bounded", f"seed {seed}, {case.id}", TF32)


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_finite_stays_where_it_belongs(place: Place, seed: int) -> None:
    for case, tile in zip(CASES[:3], TILES, strict=True):
        check_rule(backend(place, tile), seed, case, "float16", "NHWC")
