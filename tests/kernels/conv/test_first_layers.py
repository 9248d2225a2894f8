"""Layers with few input channels: on every backend, and their GPU kernels in the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import DENSE, DENSE_WEIGHT, FAMILIES
from convgrad_service.backends.cuda.kernels.conv.first_forward import FirstForward
from convgrad_service.backends.cuda.kernels.conv.first_weight import FirstWeight
from convgrad_service.backends.cuda.kernels.conv.hopper_first_data import HopperFirstData
from convgrad_service.backends.cuda.kernels.conv.hopper_first_taps import HopperFirstTaps
from convgrad_service.backends.cuda.kernels.conv.patch_products import PatchProducts
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.problems import problem_from
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.arrays import request_arrays, rng_for
from tests.support.numerics.cases import Case
from tests.support.numerics.first_layers import FIRST_LAYERS, first_cases
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected

# Of these layers, most of which are small, predicted times would leave many to other families.
FIRST = replace(
    FAMILIES,
    fwd=(PatchProducts(DENSE), FirstForward(), *FAMILIES.fwd),
    bwd_data=(PatchProducts(DENSE), HopperFirstData(), *FAMILIES.bwd_data),
    bwd_weight=(
        PatchProducts(DENSE_WEIGHT),
        HopperFirstTaps(),
        FirstWeight(),
        *FAMILIES.bwd_weight,
    ),
)
KERNELS = {
    "conv_fwd": ("first_forward",),
    "conv_bwd_data": ("hopper_first_data",),
    "grouped_conv_bwd_weight": ("hopper_first_taps", "first_weight"),
}
# Too few or too many channels of grad_output, steps along W, or columns for hopper_first_data.
OTHERS = (
    "two_rows_in_three",
    "stride_beyond_kernel",
    "many_channels_out",
    "1d_stereo",
    "patches_of_16",
    "patches_that_overlap_along_h",
)
PATCHES = ("patches", "patches_of_16", "patches_of_8_in_3d")
TF32 = 2.0**-10  # error of rounding the factors
EPILOGUES = [
    case.with_tensor("accumulate", FIRST_LAYERS[case.name].input_shape).with_params(
        "bilinear", alpha=2.0, beta=-0.25
    )
    for case in first_cases()
    if case.operation == "conv_bwd_data" and case.name in ("resnet", "mobilenet", "1d")
]
CASES = [*first_cases(), *EPILOGUES]
EMULATED = ("resnet", "mobilenet", "six_rows_in_seven", "padding_beyond_the_kernel", "wide", "3d")
EMULATED += ("rows_in_whole_chunks", "short_rows_in_whole_chunks")
EMULATED += ("alexnet", "every_third", "wide_kernel", "unet_5x5", "channels_1")
emulated = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


def _compare(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    high = dtype == "float32"
    tensors, wanted = drawn(seed, case, dtype, gate)
    if high:
        case = case.with_params("high", precision="high")
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(backend, case, tensors, layout)
        what = f"seed {seed}, {case.id} {dtype} {layout}"
        check(found, wanted, gate, what, TF32 if high else 0.0)


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str, gate: str) -> None:
    _compare(backend, seed, case, dtype, gate)


# A subset of both dtypes; the rest are marked slow.
@emulated
@pytest.mark.parametrize(
    ("case", "dtype", "gate"),
    [
        pytest.param(
            case,
            dtype,
            gate,
            id=f"{case.id}-{dtype}-{gate}",
            marks=[pytest.mark.slow] if slow else [],
        )
        for case in CASES
        for name in [case.name.split("-")[0]]
        if name in EMULATED
        for dtype in ("bfloat16", "float32")
        for gate in ("exact", "bounded")
        for slow in [
            (dtype, gate) != ("bfloat16", "exact")
            and ((dtype, gate) != ("float32", "bounded") or name not in EMULATED[:6])
        ]
    ],
)
def test_emulated(seed: int, case: Case, dtype: str, gate: str) -> None:
    _compare(EmulatedBackend(FIRST), seed, case, dtype, gate)


# True float32 with few channels: backward as products of bfloat16, forward by FMA.
EXACT = [
    case.with_params("highest", precision="highest")
    for case in CASES
    if case.operation in ("conv_bwd_data", "conv_fwd")
    and case.name.split("-")[0]
    in (
        "resnet",
        "mobilenet",
        "vgg",
        "yolo_6x6",
        "alexnet",
        "every_third",
        "wide_kernel",
    )
]


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_true_float32_on_every_backend(backend: Backend, seed: int, case: Case) -> None:
    _compare_exact(backend, seed, case)


@emulated
@pytest.mark.parametrize(
    "case",
    [
        # The other cases run the same code.
        pytest.param(case, id=case.id, marks=[pytest.mark.slow] if slow else [])
        for case in EXACT
        for slow in [case.name.split("-")[0] not in ("resnet", "mobilenet", "every_third")]
    ],
)
def test_true_float32_emulated(seed: int, case: Case) -> None:
    _compare_exact(EmulatedBackend(FIRST), seed, case)


def _compare_exact(backend: Backend, seed: int, case: Case) -> None:
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, "float32", gate)
        for layout in with_layouts(case.ndim, grouped=False)[-2:]:
            found = answers(backend, case, tensors, layout)
            check(found, wanted, gate, f"seed {seed}, {case.id} {layout}")


@emulated
@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-95, 2.0**100])
@pytest.mark.parametrize("of", ["grad_output", "weight"])
def test_true_float32_of_any_magnitude(seed: int, of: str, scale: float) -> None:
    """Numbers whose parts underflow in bfloat16, mixed with zeros, and numbers that overflow."""
    case = next(one for one in EXACT if one.operation == "conv_bwd_data")
    tensors, _ = drawn(seed, case, "float32", "bounded")
    rng = rng_for(seed, case.id)
    other = "weight" if of == "grad_output" else "grad_output"
    for name, factor in ((of, scale), (other, 1 / scale)):
        tensors[name] = (tensors[name] * factor).astype(np.float32)
        tensors[name].flat[rng.integers(tensors[name].size, size=9)] = 0
    wanted = expected(case.operation, tensors, case.params)
    found = answers(EmulatedBackend(FIRST), case, tensors, "NHWC")
    check(found, wanted, "bounded", f"seed {seed}, {of} x {scale}")


@emulated
@pytest.mark.parametrize(
    "case", [case for case in first_cases() if case.name in EMULATED[:2]], ids=lambda case: case.id
)
def test_emulated_nonfinite(seed: int, case: Case) -> None:
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        check_rule(EmulatedBackend(FIRST), seed, case, "bfloat16", layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", first_cases(), ids=lambda case: case.id)
def test_a_plan_takes_the_kernels_that_are_made_for_it(case: Case, dtype: str) -> None:
    params = {**case.params, "precision": "high"} if dtype == "float32" else case.params
    tensors, _ = drawn(0, case, dtype, "exact")
    layout = with_layouts(case.ndim, grouped=False)[-1]
    arrays = request_arrays(case, tensors, layout)
    request = validate(OPERATIONS[case.operation].request, {**arrays, **params, "layout": layout})
    plan = plan_for(problem_from(case.operation, request), H200, FIRST)
    if case.operation == "conv_bwd_data" and case.name in OTHERS:
        return
    kernels = ("patch_products",) if case.name in PATCHES else KERNELS[case.operation]
    assert plan.kernel.startswith(kernels), plan.kernel
