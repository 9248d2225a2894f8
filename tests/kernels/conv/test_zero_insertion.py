"""Gradients of the input of strided layers with one tap, computed without the stride and spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from convgrad.dtypes import DType
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.zero_insertion import ZeroInsertion
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import choose
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.conv_work import work_of
from tests.support.kernels.harness import gates, problem_and_tensors
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.cases import Case, conv_bwd_data
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulated, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
Place = Callable[..., Backend]
LAYERS = {
    # Sizes that are and are not multiples of the stride, and of a chunk.
    "even": Conv(2, 24, 40, (8, 10), (1, 1), 2),
    "odd": Conv(3, 17, 40, (7, 9), (1, 1), 2),
    "rest": Conv(2, 16, 24, (9, 11), (1, 1), (3, 4)),
    "padded": Conv(2, 24, 40, (8, 10), (1, 1), (2, 3), ((1, 1), (2, 0))),
    "beyond": Conv(2, 16, 24, (3, 3), (1, 1), 5),
    # Along some dimensions only.
    "rows": Conv(2, 16, 24, (9, 9), (1, 3), (2, 1), (0, 1)),
    "columns": Conv(2, 16, 24, (9, 9), (3, 1), (2, 2), (1, 0)),
    "1d": Conv(3, 16, 24, (31,), (1,), 4),
    "3d": Conv(1, 16, 24, (5, 6, 7), (1, 1, 1), 2),
    "planes": Conv(2, 16, 16, (5, 6, 7), (3, 1, 1), (1, 2, 2), (1, 0, 0)),
}
CASES = [conv_bwd_data(name, conv) for name, conv in LAYERS.items()]
FIRST = {1: "NCW", 2: "NCHW", 3: "NCDHW"}


def backend_of(place: Place) -> Backend:
    family = ZeroInsertion((GatherDirect(),), least_elements=1)
    return place(families=replace(FAMILIES, bwd_data=[family]))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(place: Place, seed: int, case: Case, dtype: str) -> None:
    gates(backend_of(place), seed, case, dtype, [FIRST[case.ndim]])


def test_large_layers_are_spread() -> None:
    work = work_of(
        "bwd_data", layout="NCHW", batch=32, size=56, kernel=1, stride=2, pad=0, dtype=DType.FLOAT32
    )
    assert choose(FAMILIES.bwd_data, work, H200).family == "zero_insertion"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["odd", "planes"])
def test_nonfinite(place: Place, seed: int, name: str) -> None:
    case = conv_bwd_data(name, LAYERS[name])
    check_rule(backend_of(place), seed, case, "float32", FIRST[case.ndim])


@emulated
def test_zeros_are_positive(seed: int) -> None:
    """As those that any other kernel writes."""
    case = conv_bwd_data("even", LAYERS["even"])
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)
    problem, given = problem_and_tensors(case, tensors, "NCHW")
    (found,) = backend_of(EmulatedBackend).run(problem, given).outputs.values()
    between = found[:, :, 1::2]
    assert not between.any()
    assert (between.view("uint32") == 0).all()


def test_what_is_lowered() -> None:
    family = ZeroInsertion((GatherDirect(),), least_elements=1)
    strided = work_of("bwd_data", layout="NCHW", kernel=1, stride=2, pad=0, dtype=DType.FLOAT32)
    assert family.why_not(strided, H200) is None
    assert family.launches(strided, H200).kernel == "gather_direct_bwd_data_spread"
    for how in (
        {"layout": "NHWC"},
        {"kernel": 3},
        {"stride": 1},
        {"groups": 2},
        {"dtype": DType.FLOAT64},
    ):
        given: dict[str, Any] = {
            "layout": "NCHW",
            "kernel": 1,
            "stride": 2,
            "pad": 0,
            "dtype": DType.FLOAT32,
        }
        assert family.why_not(work_of("bwd_data", **(given | how)), H200) is not None
    assert family.why_not(replace(strided, alpha=0.5), H200) is not None
    assert family.why_not(replace(strided, precision="high"), H200) is not None
    assert ZeroInsertion((GatherDirect(),)).why_not(strided, H200) is not None
    assert family.why_not(replace(strided, direction="fwd"), H200) is not None
