"""Depthwise convolutions with any number of channels, in one to three dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import DEPTHWISE, DEPTHWISE_WEIGHT, FAMILIES
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

DIRECTIONS = ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")
LAYERS = {
    # Partial chunks of channels, in copies of 4 bytes.
    "channels_36": Conv(2, 36, 36, (9, 14), (3, 3), padding=1, groups=36),
    "channels_36_strided": Conv(2, 36, 36, (9, 14), (3, 3), 2, 1, groups=36),
    "channels_10_5x5": Conv(1, 10, 10, (7, 8), (5, 5), padding=2, groups=10),
    "channels_6_7x7_strided": Conv(1, 6, 6, (11, 9), (7, 7), 2, 3, groups=6),
    # Odd numbers of channels.
    "channels_13": Conv(2, 13, 13, (6, 7), (3, 3), padding=1, groups=13),
    "channels_35_5x5": Conv(1, 35, 35, (5, 6), (5, 5), padding=2, groups=35),
    # One dimension, or one row or column of taps.
    "1d_k4_causal": Conv(3, 40, 40, (37,), (4,), padding=((3, 0),), groups=40),
    "1d_k31": Conv(5, 16, 16, (70,), (31,), padding=15, groups=16),
    "1d_k31_channels_5": Conv(2, 5, 5, (33,), (31,), padding=15, groups=5),
    "1d_k11_dilated": Conv(2, 24, 24, (40,), (11,), padding=10, dilation=2, groups=24),
    "1d_k7_strided": Conv(3, 24, 24, (41,), (7,), 2, 3, groups=24),
    "1d_k31_strided": Conv(1, 16, 16, (64,), (31,), 2, 15, groups=16),
    "row_of_taps": Conv(2, 16, 16, (5, 19), (1, 5), padding=((0, 0), (2, 2)), groups=16),
    "column_of_taps": Conv(2, 16, 16, (19, 5), (5, 1), padding=((2, 2), (0, 0)), groups=16),
    # Kernels with several depth slices.
    "3d": Conv(2, 16, 16, (4, 6, 9), (3, 3, 3), padding=1, groups=16),
    "3d_strided": Conv(2, 24, 24, (5, 7, 8), (3, 3, 3), 2, 1, groups=24),
    "3d_strided_planes": Conv(1, 16, 16, (7, 5, 6), (2, 3, 3), (3, 1, 1), 1, groups=16),
    "3d_padding_beyond": Conv(1, 8, 8, (2, 4, 5), (3, 3, 3), padding=4, groups=8),
    "3d_planes_unread": Conv(1, 8, 8, (9, 5, 5), (2, 3, 3), (4, 1, 1), groups=8),
}
CASES = [FROM_CONV[operation](*layer) for operation in DIRECTIONS for layer in LAYERS.items()]
RULE = ("channels_36", "channels_13", "1d_k31", "3d_strided")

emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    """A backend with only the kernels under test, and no fallback."""
    families = replace(FAMILIES, fwd=DEPTHWISE, bwd_data=DEPTHWISE, bwd_weight=DEPTHWISE_WEIGHT)
    return EmulatedBackend(families)


def compare(backend: Backend, seed: int, case: Case, dtype: str, layout: str | None) -> None:
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str) -> None:
    for layout in with_layouts(case.ndim, grouped=False):
        compare(backend, seed, case, dtype, layout)


@emulation
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_emulated(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        compare(emulated, seed, case, dtype, layout)


@emulation
@pytest.mark.parametrize("case", [case for case in CASES if case.name in RULE], ids=lambda c: c.id)
def test_what_is_not_finite_stays_in_its_plane(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1])


@emulation
@pytest.mark.parametrize("stride", [3, 5])
@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data"])
def test_what_is_not_finite_stays_in_its_plane_of_any_stride(
    seed: int, operation: str, stride: int
) -> None:
    """Of all families: products of several groups at once would spread it."""
    conv = Conv(2, 40, 40, (16, 11), (3, 3), stride, 1, groups=40)
    case = FROM_CONV[operation](f"stride_{stride}", conv)
    check_rule(EmulatedBackend(FAMILIES), seed, case, "bfloat16", "NHWC")
