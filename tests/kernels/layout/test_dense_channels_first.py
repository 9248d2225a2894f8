"""Dense layers, channels first: results as runs of pixels or through channels-last copies.

Each way runs in the emulator, and the planned one on every backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import COPIES, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.dense_gather import DenseGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import PointwiseGemm
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config
from convgrad_service.backends.cuda.kernels.layout.dense_channels_first import (
    ResultThroughChannelsLast,
)
from convgrad_service.plans.cuda.families import Families, Family
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import hopper
from tests.support.kernels.harness import answers, check, drawn
from tests.support.numerics.cases import (
    Case,
    conv_backward,
    conv_bwd_data,
    conv_fwd,
    grouped_conv_bwd_weight,
)
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

LAYERS: dict[str, Conv] = {
    "whole_chunks": Conv(2, 64, 72, (8, 12), (3, 3), 1, 1),
    "halves_of_chunks": Conv(2, 64, 64, (14, 14), (3, 3), 1, 1),
    "odd_planes": Conv(3, 48, 64, (7, 7), (3, 3), 1, 1),
    "odd_rows": Conv(1, 64, 40, (6, 9), (3, 3), 1, 1),
    "pointwise": Conv(2, 72, 136, (8, 11), (1, 1)),
    "pointwise_few": Conv(3, 96, 48, (5, 8), (1, 1)),
    "pointwise_many": Conv(1, 264, 320, (16, 17), (1, 1)),
    "long_pointwise": Conv(1, 200, 64, (12, 14), (1, 1)),
    "strided": Conv(2, 64, 64, (9, 11), (3, 3), 2, 1),
    "1d": Conv(2, 48, 64, (157,), (3,), 1, ((2, 0),)),
    "3d": Conv(1, 32, 32, (3, 6, 7), (3, 3, 3), 1, 1),
    "rows_of_chunks": Conv(1, 64, 64, (15, 56), (3, 3), 1, 1),
    "wide_rows_of_chunks": Conv(1, 32, 72, (5, 304), (3, 3), 1, 1),
    "3d_rows_of_chunks": Conv(1, 32, 32, (3, 9, 16), (3, 3, 3), 1, 1),
    "up": Conv(2, 40, 72, (12, 32), (3, 2), (3, 2)),
    "3d_up_whole": Conv(2, 24, 64, (4, 6, 16), (2, 2, 2), 2),
    "3d_up": Conv(1, 64, 48, (4, 6, 6), (2, 2, 2), 2),
    "odd_channels": Conv(1, 67, 51, (5, 6), (3, 3), 1, 1),
}
DATA = [conv_bwd_data(name, conv) for name, conv in LAYERS.items()]
FORWARD = [
    replace(case, shapes={name: case.shapes[name] for name in ("input", "weight")})
    for case in (conv_fwd(name, conv) for name, conv in LAYERS.items())
]
WEIGHT = [grouped_conv_bwd_weight(name, conv) for name, conv in LAYERS.items()]
BOTH = [conv_backward(name, conv) for name, conv in LAYERS.items()]
ADDED = [
    case.with_tensor("accumulate", LAYERS[case.name].input_shape).with_params(
        "bilinear", alpha=2.0, beta=-0.25
    )
    for case in DATA
    if case.name in ("whole_chunks", "strided")
]
FIRST = {1: "NCW", 2: "NCHW", 3: "NCDHW"}
TF32 = 2.0**-10
emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


def data(*families: Family[Any]) -> Families:
    return replace(
        FAMILIES, fwd=[*families, *FAMILIES.fwd], bwd_data=[*families, *FAMILIES.bwd_data]
    )


def gather(tile: HopperTile) -> HopperGather:
    return HopperGather(True, Schedule(tile))


SETS = {
    "gather_128x64": data(gather(HopperTile(128, 64))),
    "gather_256x160": data(gather(HopperTile(256, 160))),
    "gather_192x128": data(gather(HopperTile(192, 128, 3))),
    "halo": data(HopperHalo(anything=True)),
    "copied": data(ResultThroughChannelsLast(gather(HopperTile(128, 64)), COPIES, anywhere=True)),
    "pointwise": data(PointwiseGemm(Config(128, 64, resident=True))),
    "pointwise_256x96": data(PointwiseGemm(Config(256, 96))),
    "pointwise_64x128": data(PointwiseGemm(Config(64, 128))),
    "halo_copied": data(
        ResultThroughChannelsLast(HopperHalo(anything=True), COPIES, anywhere=True)
    ),
    "dense_copied": data(ResultThroughChannelsLast(DenseGather(1, 1), COPIES, anywhere=True)),
}
WEIGHTS = HopperWeight(1)
WEIGHT_SETS = {
    "planes": replace(FAMILIES, bwd_weight=[WEIGHTS]),
    "copied": replace(
        FAMILIES, bwd_weight=[ResultThroughChannelsLast(WEIGHTS, COPIES, anywhere=True), WEIGHTS]
    ),
}


def compare(
    backend: Backend, seed: int, case: Case, dtype: str, gates: Iterable[str] = ("exact", "bounded")
) -> None:
    high = dtype == "float32"
    for gate in gates:
        tensors, wanted = drawn(seed, case, dtype, gate)
        asked = case.with_params("high", precision="high") if high else case
        layout = FIRST[case.ndim]
        found = answers(backend, asked, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}", TF32 if high else 0.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "case", [*DATA, *FORWARD, *WEIGHT, *BOTH, *ADDED], ids=lambda case: case.id
)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    compare(backend, seed, case, dtype)


# One kernel computes both directions, so most forward tests are marked slow, as are large tiles and
# copies of most layers.
FEW = ("whole_chunks", "odd_planes", "strided", "3d_up")
MOST_WAYS = ("gather_128x64", "halo", "pointwise")


@emulated
@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, id=f"{case.id}-{way}", marks=[pytest.mark.slow] if slow else [])
        for case in [*DATA, *FORWARD, *ADDED]
        for way in SETS
        for slow in [
            way not in MOST_WAYS
            and (case in FORWARD or case.name not in FEW)
            and not ("pointwise" in way and "pointwise" in case.name)
        ]
    ],
)
def test_data(seed: int, case: Case, way: str) -> None:
    compare(EmulatedBackend(SETS[way]), seed, case, "bfloat16", ["exact"])


@emulated
@pytest.mark.parametrize("way", ["gather_128x64", "copied"])
@pytest.mark.parametrize("case", DATA, ids=lambda case: case.id)
def test_float32(seed: int, case: Case, way: str) -> None:
    compare(EmulatedBackend(SETS[way]), seed, case, "float32", ["exact"])


@emulated
@pytest.mark.parametrize("way", WEIGHT_SETS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "bfloat16") for case in WEIGHT),
        *((case, "float32") for case in WEIGHT if "pointwise" in case.name),
    ],
    ids=lambda param: getattr(param, "id", param),
)
def test_weight(seed: int, case: Case, dtype: str, way: str) -> None:
    compare(EmulatedBackend(WEIGHT_SETS[way]), seed, case, dtype)


@emulated
@pytest.mark.parametrize("name", ["whole_chunks", "odd_planes", "rows_of_chunks", "pointwise"])
def test_nonfinite(seed: int, name: str) -> None:
    for case, families in (
        *((conv_bwd_data(name, LAYERS[name]), SETS[way]) for way in MOST_WAYS),
        (grouped_conv_bwd_weight(name, LAYERS[name]), WEIGHT_SETS["planes"]),
    ):
        check_rule(EmulatedBackend(families), seed, case, "bfloat16", FIRST[case.ndim])


@emulated
def test_both_gradients_by_parts(seed: int) -> None:
    """Copies of the parts of grad_output are not the copy that both gradients share."""
    (case,) = (case for case in BOTH if case.name == "odd_channels")
    compare(EmulatedBackend(hopper()), seed, case, "float32", ["exact"])
