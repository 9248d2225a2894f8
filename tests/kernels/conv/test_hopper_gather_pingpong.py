"""Hopper's dense ping-pong kernel with many tiles per block, in the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
Place = Callable[..., Backend]

LAYERS = {
    "resnet": Conv(6, 72, 136, (14, 14), (3, 3), 1, 1),
    "strided": Conv(5, 64, 64, (23, 21), (3, 3), 2, 1),
    "stride_beyond_kernel": Conv(4, 64, 72, (19, 20), (1, 2), (2, 3)),
    "3d_strided": Conv(2, 64, 64, (7, 10, 11), (3, 3, 3), 2, 1),
}
CASES = [make(name, conv) for name, conv in LAYERS.items() for make in (conv_fwd, conv_bwd_data)]
TILES = {
    "bfloat16": HopperTile(192, 128, pingpong=True),
    "float16": HopperTile(128, 64, sharing=2, pingpong=True),
    "float32": HopperTile(128, 160, pingpong=True),
}
TF32 = 2.0**-10  # error of rounding the factors


class OnFew:
    """The family planned for two multiprocessors, so that each has many tiles."""

    name = "hopper_gather"

    def __init__(self, schedule: Schedule) -> None:
        self._family = HopperGather(True, schedule)

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return self._family.why_not(work, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        return self._family.launches(work, replace(device, multiprocessors=2))

    def instances(self) -> Iterable[Instance]:
        return self._family.instances()


def _backend(place: Place, schedule: Schedule) -> Backend:
    family = OnFew(schedule)
    return place(families=replace(FAMILIES, fwd=[family], bwd_data=[family]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "images_first"), list(product(TILES, (False, True))))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_tiles_by_turns(
    place: Place, seed: int, case: Case, dtype: str, images_first: bool
) -> None:
    backend = _backend(place, Schedule(TILES[dtype], images_first, 2))
    high = dtype == "float32"
    gate = "bounded" if high else "exact"
    tensors, wanted = drawn(seed, case, dtype, gate)
    if high:
        case = case.with_params("high", precision="high")
    found = answers(backend, case, tensors, "NHWC" if case.ndim == 2 else "NDHWC")
    check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}", TF32 if high else 0.0)


@pytest.mark.parametrize("place", PLACES)
def test_narrow_tiles(place: Place, seed: int) -> None:
    backend = _backend(place, Schedule(HopperTile(256, 32, pingpong=True)))
    for make in (conv_fwd, conv_bwd_data):
        case = make("narrow", Conv(4, 32, 36, (19, 18), (3, 3), 1, 1))
        tensors, wanted = drawn(seed, case, "float32", "bounded")
        found = answers(backend, case.with_params("high", precision="high"), tensors, "NHWC")
        check(found, wanted, "bounded", f"seed {seed}, {case.id}", TF32)


ROWS = {
    "resnet": Conv(6, 72, 136, (14, 14), (3, 3), 1, 1),
    "padding_beyond": Conv(3, 64, 48, (6, 9), (3, 3), padding=((3, 2), (4, 1))),
    "3d": Conv(2, 64, 32, (4, 7, 11), (3, 3, 3), 1, 1),
    "1d": Conv(2, 136, 64, (350,), (3,), padding=2),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [conv_fwd, conv_bwd_data])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_taps(
    place: Place, seed: int, name: str, make: Callable[[str, Conv], Case]
) -> None:
    """Taps that share pixels; the bits are those of other tiles."""
    case = make(name, ROWS[name])
    layout = {1: "NWC", 2: "NHWC", 3: "NDHWC"}[case.ndim]
    backend, other = (
        _backend(place, Schedule(HopperTile(256, 64, pingpong=True, taps=taps))) for taps in (3, 1)
    )
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, "bfloat16", gate)
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id}")
    for key, array in answers(other, case, tensors, layout).items():
        assert np.array_equal(array, found[key])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pingpong", [False, True])
@pytest.mark.parametrize("channels", [(96, 112), (40, 24)])
def test_partial_chunks(place: Place, seed: int, channels: tuple[int, int], pingpong: bool) -> None:
    """Half and three quarters of a last k-tile, also of the only one; another tile follows."""
    backend = _backend(place, Schedule(HopperTile(128, 64, pingpong=pingpong)))
    for make in (conv_fwd, conv_bwd_data):
        case = make("partial", Conv(5, *channels, (9, 10), (3, 1), 1, (1, 0)))
        tensors, wanted = drawn(seed, case, "bfloat16", "exact")
        found = answers(backend, case, tensors, "NHWC")
        check(found, wanted, "exact", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["resnet", "3d_strided"])
def test_nonfinite(place: Place, seed: int, name: str) -> None:
    taps = 3 if name == "resnet" else 1
    backend = _backend(place, Schedule(HopperTile(256, 64, pingpong=True, taps=taps)))
    for case in (case for case in CASES if case.name == name):
        check_rule(backend, seed, case, "float16", "NHWC" if case.ndim == 2 else "NDHWC")
