"""Groups as tiles of the dense Hopper kernels, in the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.split_gather import SplitGather
from convgrad_service.backends.cuda.kernels.conv.split_weight import SplitWeight
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.layout.dense_channels_first import (
    ResultThroughChannelsLast,
)
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
Place = Callable[..., Backend]

# Widths of groups in whole and in parts of k-tiles and tiles.
LAYERS = {
    "two": Conv(3, 128, 256, (7, 6), (3, 3), padding=1, groups=2),
    "wide_48": Conv(2, 144, 144, (9, 8), (3, 3), padding=1, groups=3),
    "strided": Conv(2, 128, 160, (9, 10), (3, 3), 2, 1, groups=2),
    "pointwise": Conv(2, 240, 192, (8, 8), (1, 1), groups=3),
    "1d": Conv(2, 192, 96, (70,), (6,), padding=3, groups=2),
    "3d_strided": Conv(1, 64, 64, (4, 5, 6), (3, 3, 3), 2, 1, groups=2),
}
WIDE = ("two", "strided")
SCHEDULES = (
    Schedule(HopperTile(128, 128)),
    Schedule(HopperTile(192, 128, pingpong=True)),
    Schedule(HopperTile(64, 64, 1, single=True, blocks=2)),
    Schedule(HopperTile(128, 64, split=4, single=True, taps=3)),
)


def _backend(place: Place, schedule: Schedule | None = None) -> Backend:
    gather = HopperGather(True, schedule)
    split = SplitGather(HopperGather(True, parts=3))
    gathers = [gather, split, GatherDirect()]
    if schedule is None:
        gathers = [ResultThroughChannelsLast(gather, COPIES), *gathers]
        gathers = [ResultThroughChannelsLast(split, COPIES, timed=True), *gathers]
    weights = [HopperWeight(1), SplitWeight(HopperWeight(1)), WeightDirect()]
    return place(families=replace(FAMILIES, fwd=gathers, bwd_data=gathers, bwd_weight=weights))


def _cases(name: str) -> list[Case]:
    operations = "conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight"
    return [FROM_CONV[operation](name, LAYERS[name]) for operation in operations]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_gates(place: Place, seed: int, name: str, dtype: str) -> None:
    """Where groups do not follow one another, the kernels refuse."""
    layouts = with_layouts(LAYERS[name].ndim, grouped=name == "wide_48")
    for case in _cases(name):
        gates(_backend(place), seed, case, dtype, layouts)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_schedules(place: Place, seed: int, name: str, schedule: Schedule) -> None:
    layout = with_layouts(LAYERS[name].ndim, grouped=False)[-1:]
    for case in _cases(name)[:2]:
        gates(_backend(place, schedule), seed, case, "bfloat16", layout)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["wide_48", "strided"])
def test_nonfinite(place: Place, seed: int, name: str) -> None:
    """No group's values reach another's results."""
    for case in _cases(name):
        for layout in with_layouts(LAYERS[name].ndim, grouped=False):
            check_rule(_backend(place), seed, case, "bfloat16", layout)
