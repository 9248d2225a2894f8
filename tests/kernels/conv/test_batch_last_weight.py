"""batch_last_weight in the emulator and on a GPU."""

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
from convgrad_service.backends.cuda.kernels.conv.batch_last_weight import BatchLastWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.plans.cuda.device import H200
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.conv_work import work_of
from tests.support.kernels.harness import ROUNDED, gates, with_layouts
from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "3x3": Conv(8, 32, 40, (5, 9), (3, 3), 1, 1),
    "strided": Conv(32, 16, 24, (6, 8), (4, 4), 2, 1),
    "wide_strides": Conv(12, 16, 24, (9, 12), (2, 5), 3, 2),
    "dilated": Conv(8, 16, 16, (9, 12), (3, 3), 2, 3, 2),
    "few_images": Conv(4, 16, 20, (5, 10), (3, 3), 1, 1),
    # Pixels are images.
    "pointwise": Conv(3, 40, 72, (4, 5), (1, 1)),
    "pointwise_strided": Conv(8, 40, 24, (9, 18), (1, 1), 2),
    "1d": Conv(40, 24, 32, (14,), (3,), 2, 1),
    "3d": Conv(8, 16, 24, (3, 4, 4), (2, 3, 2), 2, 1),
}
CASES = {
    name: FROM_CONV[OPERATION](name, conv).with_params("high", precision="high")
    for name, conv in GEOMETRIES.items()
}

ACCUMULATED = (
    FROM_CONV[OPERATION]("3x3", GEOMETRIES["3x3"])
    .with_params("", outputs=("grad_weight",))
    .with_tensor("accumulate", GEOMETRIES["3x3"].weight_shape)
    .with_params("bilinear", precision="high", alpha=2.0, beta=-0.25)
)
Place = Callable[..., Backend]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            EmulatedBackend,
            marks=pytest.mark.skipif(not works_here(), reason="the emulator is for x86-64"),
            id="emulated",
        ),
        pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
    ],
)
def batch_last(request: pytest.FixtureRequest) -> Backend:
    place: Place = request.param
    family = BatchLastWeight(HopperWeight(1))
    return place(families=replace(FAMILIES, bwd_weight=(family,)))


@pytest.mark.parametrize("last", [False, True], ids=["channels_first", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_gates(batch_last: Backend, seed: int, name: str, last: bool) -> None:
    case = CASES[name]
    gates(batch_last, seed, case, "tf32", [with_layouts(case.ndim, grouped=False)[-last]])


def test_epilogue(batch_last: Backend, seed: int) -> None:
    layout = with_layouts(ACCUMULATED.ndim, grouped=False)[-1]
    gates(batch_last, seed, ACCUMULATED, "tf32", [layout])


@pytest.mark.parametrize("name", ["3x3", "strided"])
def test_nonfinite(batch_last: Backend, seed: int, name: str) -> None:
    case = CASES[name]
    layout = with_layouts(case.ndim, grouped=False)[-1]
    check_rule(batch_last, seed, case, "float32", layout, ROUNDED)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"dtype": DType.BFLOAT16}, "bfloat16 is not float32"),
        ({"precision": "highest"}, "TF32"),
        ({"groups": 2}, "groups"),
        ({"batch": 6}, "6 images"),
        ({"size": 15, "stride": 2}, "15 are not whole strides"),
    ],
)
def test_refusals(given: dict[str, Any], reason: str) -> None:
    own: dict[str, Any] = {"kernel": 3, "pad": 1, "size": 16, "batch": 8}
    own |= {"dtype": DType.FLOAT32, "precision": "high"}
    family = BatchLastWeight()
    assert reason in str(family.why_not(work_of("bwd_weight", **own | given), H200))
