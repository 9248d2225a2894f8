"""True float32 fprop and dgrad on Hopper by bfloat16 parts, in the emulator and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import PART_TILES, HopperTile
from convgrad_service.backends.cuda.kernels.conv.split_gather import SplitGather
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.program import Fragment, Instance
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems.pieces import run_in_pieces
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import (
    answers,
    check,
    drawn,
    gates,
    problem_and_tensors,
    with_layouts,
)
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected

Place = Callable[..., Backend]
emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
OPERATIONS = ("conv_fwd", "conv_bwd_data")
GEOMETRIES = {
    "plain": Conv(2, 64, 64, (9, 11), (3, 3), padding=1),
    # Several k-tiles and tiles of channels, in part.
    "channels_67_to_131": Conv(3, 67, 131, (7, 6), (3, 3), padding=1),
    "pointwise": Conv(3, 136, 72, (7, 8), (1, 1)),
    "pointwise_strided": Conv(2, 64, 40, (9, 8), (1, 1), 2),
    "strided": Conv(2, 40, 72, (9, 10), (3, 3), 2, 1),
    "stride_beyond_kernel": Conv(2, 64, 72, (13, 14), (1, 2), (2, 3)),
    "dilated": Conv(1, 48, 64, (12, 11), (3, 3), 1, (2, 3), (2, 3)),
    "padding_beyond": Conv(1, 64, 48, (6, 9), (3, 3), padding=((3, 2), (4, 1))),
    "1d": Conv(2, 64, 72, (150,), (5,), padding=2),
    "3d_strided": Conv(1, 32, 40, (4, 5, 6), (3, 3, 3), 2, 1),
}
CASES = [
    FROM_CONV[operation](name, conv)
    for name, conv in GEOMETRIES.items()
    for operation in OPERATIONS
]
EPILOGUE = [case for case in EPILOGUES if case.operation in OPERATIONS and case.groups == 1]


class OnFew:
    """The family planned for two multiprocessors, so that each has several tiles."""

    name = "split_gather"

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._family = SplitGather(HopperGather(True, schedule, parts=3))

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        return self._family.why_not(work, device)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        return self._family.launches(work, replace(device, multiprocessors=2))

    def instances(self) -> Iterable[Instance]:
        return self._family.instances()


def backend_of(place: Place, schedule: Schedule | None = None) -> Backend:
    family: Family[ConvWork] = OnFew(schedule)
    if schedule is not None and schedule.tile.single:
        family = SplitGather(HopperGather(True, schedule, parts=3))
    return place(families=replace(FAMILIES, fwd=[family], bwd_data=[family]))


def layouts_of(case: Case) -> list[str | None]:
    return with_layouts(case.ndim, grouped=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_geometries(place: Place, seed: int, case: Case) -> None:
    gates(backend_of(place), seed, case, "float32", layouts_of(case))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_epilogues(place: Place, seed: int, case: Case) -> None:
    gates(backend_of(place), seed, case, "float32", layouts_of(case))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tile", PART_TILES, ids=str)
def test_tiles(place: Place, seed: int, tile: HopperTile) -> None:
    """Those that do not split K have the same bits."""
    backend, other = (backend_of(place, Schedule(one)) for one in (tile, PART_TILES[0]))
    for operation, stride in zip(OPERATIONS, (1, 2), strict=True):
        case = FROM_CONV[operation]("tiles", Conv(5, 72, 136, (9, 10), (3, 3), stride, 1))
        for layout in ("NHWC", "NCHW"):
            what = f"seed {seed}, {case.id} {layout}"
            tensors, wanted = drawn(seed, case, "float32", "bounded")
            problem, given = problem_and_tensors(case, tensors, layout)
            assert f"_{tile}" in backend.run(problem, given).kernel
            found = answers(backend, case, tensors, layout)
            check(found, wanted, "bounded", what)
            if tile.split == 1:
                for name, array in answers(other, case, tensors, layout).items():
                    assert_same_bits(found[name], array, what)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_pieces_have_the_bits_of_the_whole(place: Place, seed: int, operation: str) -> None:
    """Even if other images have elements of other magnitudes."""
    case = FROM_CONV[operation]("pieces", Conv(4, 64, 40, (9, 11), (3, 3), padding=1))
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)
    first = next(name for name in ("grad_output", "input") if name in tensors)
    tensors[first][1:2] *= np.float32(2.0**-120)
    tensors[first][2:3] *= np.float32(2.0**100)
    backend = backend_of(place, Schedule(PART_TILES[0]))
    problem, given = problem_and_tensors(case, tensors, "NCHW")
    whole = backend.run(problem, given).outputs
    found = run_in_pieces(problem, given, 4, lambda one, t: backend.run(one, t).outputs)
    for name, array in found.items():
        assert_same_bits(array, whole[name], f"seed {seed}, {case.id}")


NUMERICS = [case for case in CASES if case.name in ("channels_67_to_131", "strided")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", NUMERICS, ids=lambda case: case.id)
def test_subnormals(place: Place, seed: int, case: Case) -> None:
    """Sums of multiples of the smallest subnormal are exact."""
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], integers)
    first = next(tensors[name] for name in ("grad_output", "input") if name in tensors)
    first *= np.finfo(np.float32).smallest_subnormal
    assert first.any()
    wanted = expected(case.operation, tensors, case.params)
    check(answers(backend_of(place), case, tensors), wanted, "exact", f"seed {seed}, {case.id}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", NUMERICS, ids=lambda case: case.id)
def test_nonfinite(place: Place, seed: int, case: Case) -> None:
    check_rule(backend_of(place), seed, case, "float32", layouts_of(case)[-1])
