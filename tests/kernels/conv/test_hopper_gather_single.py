"""Hopper's dense kernel with one tile per block or cluster, in the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, gates
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd
from tests.support.numerics.geometries import Conv

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
Place = Callable[..., Backend]

# Of several tiles, some of which skip taps, or have a partial chunk of channels, or begin in the
# middle of a row.
LAYERS = {
    "resnet": Conv(9, 72, 136, (7, 7), (3, 3), 1, 1),
    "dilated": Conv(2, 64, 64, (17, 19), (3, 3), 1, 4, 4),
    "padding_beyond": Conv(3, 64, 72, (6, 9), (3, 3), padding=((3, 2), (4, 1))),
    "strided": Conv(3, 64, 64, (23, 21), (3, 3), 2, 1),
    "nine_phases": Conv(2, 64, 72, (13, 11), (4, 3), 3, 1),
    "3d": Conv(2, 64, 200, (4, 6, 7), (3, 3, 3), 1, 1),
    "1d": Conv(2, 136, 64, (150,), (3,), padding=2, dilation=2),
}
CASES = [make(name, conv) for name, conv in LAYERS.items() for make in (conv_fwd, conv_bwd_data)]
SCHEDULES = (
    Schedule(HopperTile(64, 64, 1, single=True, blocks=2)),
    Schedule(HopperTile(64, 192, 1, single=True), True),
    Schedule(HopperTile(64, 64, 1, single=True, taps=3)),
    Schedule(HopperTile(128, 64, split=4, single=True, taps=3)),
    Schedule(HopperTile(128, 128, split=3, single=True)),
)


def _backend(place: Place, schedule: Schedule) -> Backend:
    family = HopperGather(True, schedule)
    return place(families=replace(FAMILIES, fwd=[family], bwd_data=[family]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gates(place: Place, seed: int, case: Case, schedule: Schedule) -> None:
    backend = _backend(place, schedule)
    layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[case.ndim]
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, "bfloat16", gate)
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {schedule}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", ["resnet", "strided"])
def test_tf32(place: Place, seed: int, name: str, schedule: Schedule) -> None:
    """A gradient's weights are transposed in shared memory."""
    for make in (conv_fwd, conv_bwd_data):
        gates(_backend(place, schedule), seed, make(name, LAYERS[name]), "tf32", ["NHWC"])


@pytest.mark.parametrize("place", PLACES)
def test_whole_sums_have_the_bits_of_other_tiles(place: Place, seed: int) -> None:
    """So that pieces of a problem may have other tiles than the whole."""
    case = conv_bwd_data("resnet", LAYERS["resnet"])
    tensors, _ = drawn(seed, case, "bfloat16", "bounded")
    schedules = (*SCHEDULES[:3], Schedule(HopperTile(128, 128)))
    found = [answers(_backend(place, one), case, tensors, "NHWC") for one in schedules]
    for other in found[1:]:
        for name, array in found[0].items():
            assert np.array_equal(array, other[name])
