"""Dense float32 weight gradients: as planned, and by bfloat16 parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.split_weight import SplitWeight
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import ROUNDED, answers, check, gates, with_layouts
from tests.support.numerics.arrays import DTYPES, Arrays, draw, normals, rng_for
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected

OPERATION = "grouped_conv_bwd_weight"
GEOMETRIES = {
    "plain": Conv(2, 64, 64, (9, 11), (3, 3), padding=1),
    # Not multiples of 4, and of 4 but not of 8.
    "channels_67_to_131": Conv(1, 67, 131, (7, 6), (3, 3), padding=1),
    "channels_36_to_20": Conv(2, 36, 20, (5, 6), (3, 3), padding=1),
    "strided": Conv(2, 40, 72, (9, 10), (3, 3), 2, 1),
    "strided_pointwise": Conv(2, 40, 32, (9, 8), (1, 1), 2),
    "strided_columns": Conv(2, 24, 64, (7, 9), (3, 1), 2, (1, 0)),
    "pointwise": Conv(3, 64, 128, (7, 7), (1, 1)),
    "1d": Conv(2, 64, 64, (50,), (3,), padding=4, dilation=4),
    "3d": Conv(1, 32, 32, (4, 5, 6), (3, 3, 3), padding=1),
}
CASES = {name: FROM_CONV[OPERATION](name, conv) for name, conv in GEOMETRIES.items()}
HIGH = {name: case.with_params("high", precision="high") for name, case in CASES.items()}
EPILOGUE = [case for case in EPILOGUES if case.operation == OPERATION and case.groups == 1]
# What products of parts cost: the product of the low parts, and the rounding of each.
SPLIT = 3 * 2.0**-16

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def by_parts() -> EmulatedBackend:
    family = SplitWeight(HopperWeight(1))
    return EmulatedBackend(replace(FAMILIES, bwd_weight=(family,)))


def last_layout(case: Case) -> str | None:
    return with_layouts(case.ndim, grouped=False)[-1]


def far_apart(case: Case, seed: int) -> Arrays:
    """Magnitudes beyond the range of float16: channels are scaled by powers of two, and so are the
    elements of every third channel."""
    rng = rng_for(seed, case.id, "far_apart")
    tensors = draw(case, rng, DTYPES["float32"], normals)
    for sign, tensor in zip((1, -1), tensors.values(), strict=True):
        channels = tensor.shape[1]
        powers = np.zeros(tensor.shape, np.int32)
        powers += (sign * (np.arange(channels) * 7 % 81 - 40)).reshape(-1, *[1] * case.ndim)
        powers[:, ::3] -= rng.integers(0, 45, powers[:, ::3].shape, dtype=np.int32)
        tensor[:] = np.ldexp(tensor, powers)
        tensor[:, 1::6] *= rng.random(tensor[:, 1::6].shape) < 0.1
    return tensors


def bounded(backend: Backend, case: Case, tensors: Arrays, c: float, what: str) -> None:
    found = answers(backend, case, tensors, last_layout(case))
    check(found, expected(case.operation, tensors, case.params), "bounded", what, c)


@pytest.mark.parametrize("name", ["plain", "channels_36_to_20", "3d"])
def test_far_apart(backend: Backend, seed: int, name: str) -> None:
    bounded(backend, HIGH[name], far_apart(HIGH[name], seed), ROUNDED, f"seed {seed}, {name}")


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated_high(by_parts: EmulatedBackend, seed: int, name: str) -> None:
    case = CASES[name]
    gates(by_parts, seed, case, "tf32", with_layouts(case.ndim, grouped=False))
    bounded(by_parts, HIGH[name], far_apart(case, seed), SPLIT, f"seed {seed}, {name}")


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated_highest(by_parts: EmulatedBackend, seed: int, name: str) -> None:
    case = CASES[name]
    gates(by_parts, seed, case, "float32", with_layouts(case.ndim, grouped=False))
    bounded(by_parts, case, far_apart(case, seed), 0.0, f"seed {seed}, {name}")


@emulation
@pytest.mark.parametrize("dtype", ["tf32", "float32"])
@pytest.mark.parametrize("case", EPILOGUE, ids=lambda case: case.id)
def test_emulated_epilogues(by_parts: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    gates(by_parts, seed, case, dtype, [last_layout(case)])


@emulation
@pytest.mark.parametrize(("cases", "c"), [(HIGH, SPLIT), (CASES, 0.0)])
def test_emulated_largest(
    by_parts: EmulatedBackend, seed: int, cases: dict[str, Case], c: float
) -> None:
    """Elements that round to infinity in bfloat16 have finite parts."""
    case = cases["pointwise"]
    rng = rng_for(seed, case.id, "largest")
    tensors = draw(case, rng, DTYPES["float32"], normals)
    tensors["input"][:, ::2] = np.finfo(np.float32).max
    tensors["grad_output"] *= np.float32(2.0**-20)
    bounded(by_parts, case, tensors, c, f"seed {seed}")


@emulation
@pytest.mark.parametrize("cases", [HIGH, CASES])
@pytest.mark.parametrize("name", ["plain", "channels_67_to_131"])
def test_emulated_nonfinite(
    by_parts: EmulatedBackend, seed: int, name: str, cases: dict[str, Case]
) -> None:
    case = cases[name]
    check_rule(by_parts, seed, case, "float32", last_layout(case), ROUNDED)
