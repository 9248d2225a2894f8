"""The GPU kernels, emulated: results, memory accesses and barriers."""

from __future__ import annotations

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_plan import Schedule
from convgrad_service.backends.cuda.kernels.conv.hopper_gather_tiles import HopperTile
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.fallback.gather_tile import GatherTile
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.fallback.weight_tile import WeightTile
from convgrad_service.plans.cuda.families import Families
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import dense, general, hopper
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.arrays import DTYPES, draw, integers, rng_for
from tests.support.numerics.cases import (
    EPILOGUES,
    FROM_CONV,
    FROM_CONV3D,
    FUSED,
    Case,
    conv_bwd_data,
    conv_cases,
    pool_cases,
)
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import sources

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

SETS: dict[str, Families] = {
    "tiles": general(GatherTile(), WeightTile()),
    "direct": general(GatherDirect(), WeightDirect()),
}
NAMES = (
    "plain",
    "stride_beyond_kernel",
    "stride_beyond_kernel_1x1",
    "stride_shares_factor_with_dilation",
    "rows_past_the_last_window",
    "padding_beyond_the_kernel",
    "channels_67",
    "depthwise_multiplier_2",
    "groups_3_odd",
    "1d_causal",
    "3d_plain",
)
CASES = [
    *(case for op in FROM_CONV for case in conv_cases(op) if case.name in NAMES),
    *(case for op in FROM_CONV3D for case in conv_cases(op) if case.name == "3d_plain"),
    *EPILOGUES[:3],
    *FUSED[:3],
]
POOLS = [
    case for n in (1, 2, 3) for way in ("fwd", "bwd") for case in pool_cases(f"maxpool{n}d_{way}")
]
DTYPE = {"tiles": "float32", "direct": "bfloat16"}
# The tensor-core kernels with whole and partial chunks of channels, in 16 bits, in TF32, and in
# float32 with split factors.
DENSE = [case for case in CASES if case.operation in FROM_CONV]
# Factors are split only if sums are long enough.
LONG_NAMES = ("channels_67", "channels_33_to_130")
LONG = [case for op in FROM_CONV for case in conv_cases(op) if case.name in LONG_NAMES]
TENSOR_CORES = [
    *((case, "bfloat16", "highest") for case in DENSE),
    *((case, "float32", "high") for case in DENSE),
    *((case, "float32", "highest") for case in LONG),
]
TF32 = 2.0**-10  # error of rounding the factors
# Planned kernels for depthwise convolutions and pooling.
DEPTHWISE_NAMES = ("depthwise", "depthwise_strided")
DEPTHWISE = [case for op in FROM_CONV for case in conv_cases(op) if case.name in DEPTHWISE_NAMES]


@pytest.fixture(scope="module", params=SETS)
def emulated(request: pytest.FixtureRequest) -> tuple[EmulatedBackend, str]:
    return EmulatedBackend(SETS[request.param]), DTYPE[request.param]


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_convolution(
    emulated: tuple[EmulatedBackend, str], seed: int, case: Case, gate: str
) -> None:
    backend, dtype = emulated
    tensors, wanted = drawn(seed, case, dtype, gate)
    layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
    for layout in layouts[-2:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize(
    ("case", "dtype", "precision"),
    TENSOR_CORES,
    ids=[f"{case.id}-{dtype}-{precision}" for case, dtype, precision in TENSOR_CORES],
)
def test_tensor_cores(seed: int, case: Case, dtype: str, precision: str, gate: str) -> None:
    high = precision == "high"
    tensors, wanted = drawn(seed, case, dtype, gate)
    if high:
        case = case.with_params("high", precision="high")
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(EmulatedBackend(dense()), case, tensors, layout)
        what = f"seed {seed}, {case.id} {dtype} {layout}"
        check(found, wanted, gate, what, TF32 if high else 0.0)


# A single block, a cluster that shares operands, one that shares a reduction; phases at once and in
# turn; both orders of pixels.
HOPPER = {
    "block": ("float32", Schedule(HopperTile(128, 96))),
    "sharing": ("bfloat16", Schedule(HopperTile(128, 192, sharing=2), True, 2)),
    "single": ("bfloat16", Schedule(HopperTile(128, 64, 1, single=True, blocks=2), True)),
    "single_row": ("bfloat16", Schedule(HopperTile(64, 64, 1, single=True, taps=3))),
    "single_float32": ("float32", Schedule(HopperTile(64, 96, 1, single=True, split=3))),
    "split": ("bfloat16", Schedule(HopperTile(64, 64, 1, split=2, single=True))),
    "split_in_5": ("bfloat16", Schedule(HopperTile(128, 128, split=5, single=True))),
    "split_row": ("bfloat16", Schedule(HopperTile(128, 64, split=3, single=True, taps=3))),
    "turns": ("bfloat16", Schedule(HopperTile(192, 128, pingpong=True), True, 2)),
    "turns_shared": ("float32", Schedule(HopperTile(128, 64, sharing=2, pingpong=True))),
}


GATHERED = [case for case in DENSE if case.operation in ("conv_fwd", "conv_bwd_data")]


@pytest.mark.parametrize(
    "way",
    [
        # These are similar to others, so they are marked slow.
        pytest.param(way, marks=[pytest.mark.slow] if way in ("split", "turns_shared") else [])
        for way in HOPPER
    ],
)
@pytest.mark.parametrize("case", GATHERED, ids=lambda case: case.id)
def test_hopper(seed: int, case: Case, way: str) -> None:
    dtype, schedule = HOPPER[way]
    backend = EmulatedBackend(hopper(schedule))
    high = dtype == "float32"
    gate = "bounded" if high else "exact"
    tensors, wanted = drawn(seed, case, dtype, gate)
    if high:
        case = case.with_params("high", precision="high")
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(backend, case, tensors, layout)
        what = f"seed {seed}, {case.id} {dtype} {layout}"
        check(found, wanted, gate, what, TF32 if high else 0.0)


NONFINITE_NAMES = ("plain", "padding_beyond_the_kernel", "channels_67")
NONFINITE = [case for case in DENSE if case.name in NONFINITE_NAMES]


@pytest.mark.parametrize("case", CASES[:-3], ids=lambda case: case.id)
def test_nonfinite(emulated: tuple[EmulatedBackend, str], seed: int, case: Case) -> None:
    backend, dtype = emulated
    check_rule(backend, seed, case, dtype)


@pytest.mark.parametrize("case", NONFINITE, ids=lambda case: case.id)
def test_nonfinite_on_tensor_cores(seed: int, case: Case) -> None:
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        check_rule(EmulatedBackend(dense()), seed, case, "bfloat16", layout)


@pytest.mark.parametrize("way", ["sharing", "split", "turns"])
@pytest.mark.parametrize("case", NONFINITE, ids=lambda case: case.id)
def test_nonfinite_on_hopper(seed: int, case: Case, way: str) -> None:
    dtype, schedule = HOPPER[way]
    check_rule(EmulatedBackend(hopper(schedule)), seed, case, dtype, "NHWC")


@pytest.mark.parametrize("split", [2, 3, 5, 8])
def test_parts_of_a_reduction_that_begin_behind_every_kept_tap(seed: int, split: int) -> None:
    """A tile uses few of the taps; each chunk of channels starts at the first one again."""
    conv = Conv(1, 72, 136, (10, 11), (5, 5), 1, ((2, 3), (3, 2)), 3)
    case = conv_bwd_data("far_apart", conv)
    tensors, wanted = drawn(seed, case, "bfloat16", "exact")
    backend = EmulatedBackend(hopper(Schedule(HopperTile(128, 64, split=split, single=split > 1))))
    check(answers(backend, case, tensors, "NHWC"), wanted, "exact", f"seed {seed}")


@pytest.mark.parametrize("case", DEPTHWISE, ids=lambda case: case.id)
def test_depthwise(seed: int, case: Case) -> None:
    tensors, wanted = drawn(seed, case, "bfloat16", "bounded")
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(EmulatedBackend(FAMILIES), case, tensors, layout)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {layout}")


@pytest.mark.parametrize("case", POOLS[::3], ids=lambda case: case.id)
def test_pooling(emulated: tuple[EmulatedBackend, str], seed: int, case: Case) -> None:
    _pools(*emulated, seed, case)


@pytest.mark.parametrize("case", POOLS[1::3], ids=lambda case: case.id)
def test_pooling_by_lines_and_cells(seed: int, case: Case) -> None:
    _pools(EmulatedBackend(FAMILIES), "bfloat16", seed, case)


def _pools(backend: EmulatedBackend, dtype: str, seed: int, case: Case) -> None:
    tensors = draw(case, rng_for(seed, case.id), DTYPES[dtype], integers)
    wanted = expected(case.operation, tensors, case.params)
    given = sources(case, tensors) if "bwd" in case.operation else {"": (case, tensors)}
    for asked, arrays in given.values():
        for layout in with_layouts(case.ndim, grouped=False)[-2:]:
            check(
                answers(backend, asked, arrays, layout), wanted, "exact", f"seed {seed} {case.id}"
            )
