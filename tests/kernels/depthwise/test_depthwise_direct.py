"""depthwise_direct, emulated: every configuration, with results that positions do not divide.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_direct
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct import DepthwiseDirect
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_direct_model import (
    DirectLayout,
    expected_s,
    layouts_of,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, layer
from tests.support.kernels.harness import answers, check, drawn, problem_and_tensors, with_layouts
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "3x3": layer(2, 24, (7, 9), (3, 3), 1, 1),
    "channels_36": layer(1, 36, (5, 6), (3, 3), 1, 1),
    "channels_13": layer(2, 13, (5, 6), (3, 3), 2, 1),
    "padding_beyond_the_kernel": layer(1, 16, (5, 6), (3, 3), 1, 4),
    "5x5": layer(1, 70, (6, 7), (5, 5), 1, 2),
    "5x5_no_padding": layer(1, 8, (8, 9), (5, 5)),
    "7x7": layer(1, 16, (7, 8), (7, 7), 1, 3),
    "stride_2": layer(2, 16, (8, 11), (3, 3), 2, 1),
    "stride_2_uneven_padding": layer(1, 24, (9, 7), (5, 5), 2, ((1, 2), (3, 1))),
    "stride_2_unread_column": layer(1, 16, (8, 8), (3, 3), 2, 0),
    "7x7_stride_2": layer(1, 8, (9, 10), (7, 7), 2, 3),
    "stride_3": layer(2, 16, (11, 16), (3, 3), 3, 1),
    "stride_4_channels_13": layer(2, 13, (13, 18), (5, 5), 4, 2),
    "stride_5_beyond_kernel": layer(2, 16, (12, 23), (3, 3), 5, 1),
    "stride_3_dilated": layer(1, 16, (11, 25), (3, 5), 3, 2, 2),
    "1d_k10_stride_5": Conv(2, 24, 24, (63,), (10,), 5, 3, groups=24),
    "stride_3_multiplier_2": layer(2, 6, (10, 13), (4, 4), 3, 2, 1, 2),
    "11x11_stride_3": layer(1, 16, (13, 25), (11, 11), 3, 5),
    "rows_dilated": layer(1, 16, (14, 9), (3, 3), 1, (2, 1), (2, 1)),
    "11x11": layer(1, 16, (12, 13), (11, 11), 1, 5),
    "9x9_stride_2": layer(1, 16, (11, 13), (9, 9), 2, 4),
    "13x9_two_strides": Conv(1, 16, 16, (14, 13), (13, 9), (3, 2), (6, 4), groups=16),
    "1d_k31": Conv(2, 16, 16, (70,), (31,), padding=15, groups=16),
    "1d_k4_causal": Conv(3, 40, 40, (37,), (4,), padding=((3, 0),), groups=40),
    "1d_k7_strided": Conv(3, 24, 24, (41,), (7,), 2, 3, groups=24),
    "1d_k31_strided": Conv(1, 16, 16, (64,), (31,), 2, 15, groups=16),
    "row_of_taps": layer(2, 16, (5, 19), (1, 5), 1, (0, 2)),
    "row_of_taps_strided": layer(2, 16, (5, 19), (1, 10), 2, (0, 2)),
    "column_of_taps": layer(2, 16, (19, 5), (5, 1), 1, (2, 0)),
    "one_tap": layer(2, 8, (3, 9), (1, 1)),
    "3d": Conv(2, 16, 16, (4, 6, 9), (3, 3, 3), padding=1, groups=16),
    "3d_strided": Conv(2, 24, 24, (5, 7, 8), (3, 3, 3), 2, 1, groups=24),
    "3d_strided_planes": Conv(1, 16, 16, (7, 5, 6), (2, 3, 3), (3, 1, 1), 1, groups=16),
    "3d_planes_unread": Conv(1, 8, 8, (9, 5, 5), (2, 3, 3), (4, 1, 1), groups=8),
    "dilated": layer(2, 8, (9, 13), (3, 3), 1, 2, 2),
    "dilated_by_two_steps": layer(2, 8, (9, 13), (3, 2), 2, 3, (2, 3)),
    "dilated_by_more_than_a_row": layer(1, 8, (3, 4), (3, 3), 1, 5, 5),
    "1d_k11_dilated": Conv(2, 24, 24, (40,), (11,), padding=10, dilation=2, groups=24),
    "multiplier_2": layer(2, 16, (7, 9), (3, 3), 1, 1, 1, 2),
    "multiplier_3": layer(2, 13, (7, 9), (5, 5), 2, 2, 1, 3),
    "multiplier_2_3d": Conv(1, 12, 24, (4, 5, 6), (2, 3, 3), padding=1, groups=12),
    "multiplier_2_of_33_columns": Conv(2, 6, 12, (50,), (33,), padding=16, groups=6),
}


NO_GRADIENT = ("dilated_by_two_steps", "stride_3_dilated", "multiplier_2_3d")
CASES = [
    FROM_CONV[operation](name, conv)
    for operation in ("conv_bwd_data", "conv_fwd")
    for name, conv in LAYERS.items()
    if operation == "conv_fwd" or name not in NO_GRADIENT
]


def only(family: DepthwiseDirect) -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, fwd=[family], bwd_data=[family]))


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return only(DepthwiseDirect(most_summed=8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(emulated, case, tensors, with_layouts(case.ndim, grouped=False)[2])
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_layers_in_planes(seed: int, case: Case, dtype: str) -> None:
    emulated = only(DepthwiseDirect(in_planes=True, most_summed=8))
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(emulated, case, tensors, with_layouts(case.ndim, grouped=False)[1])
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_turned_planes(monkeypatch: pytest.MonkeyPatch, seed: int, case: Case, dtype: str) -> None:
    """With H and W exchanged, whether or not that should be faster."""

    def best_turned(work: ConvWork, device: CudaDevice) -> DirectLayout:
        every = [one for one in layouts_of(work) if one.turned]
        return min(every or layouts_of(work), key=lambda one: expected_s(work, device, one))

    monkeypatch.setattr(depthwise_direct, "best_layout", best_turned)
    emulated = only(DepthwiseDirect(in_planes=True, most_summed=8))
    tensors, wanted = drawn(seed, case, dtype, "exact")
    found = answers(emulated, case, tensors, with_layouts(case.ndim, grouped=False)[1])
    check(found, wanted, "exact", f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize(
    "layout",
    [
        DirectLayout(3, 1, 4, 4, 2, 8),
        DirectLayout(3, 1, 2, 7, 1, 16),
        DirectLayout(3, 1, 0, 7, 2, 24),
    ],
    ids=str,
)
def test_every_shape(seed: int, layout: DirectLayout) -> None:
    case = FROM_CONV["conv_bwd_data"]("wide", layer(2, 40, (9, 17), (3, 3), 1, 1))
    compare(only(DepthwiseDirect(layout)), seed, case, "bfloat16", "exact")


@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data"])
def test_images_that_a_grid_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, seed: int, operation: str
) -> None:
    """Several launches, each of some images, with the bits of one."""
    conv = layer(5, 24, (7, 9), (3, 3), 1, 1)
    case = FROM_CONV[operation]("images", conv)
    if operation == "conv_bwd_data":
        case = case.with_tensor("accumulate", conv.input_shape)
    backend = only(DepthwiseDirect(DirectLayout(3, 1, 4, 4, 2, 16)))
    tensors, _ = drawn(seed, case, "bfloat16", "bounded")
    whole = answers(backend, case, tensors, "NHWC")
    monkeypatch.setattr(depthwise_direct, "MOST_BLOCKS_YZ", 2)
    problem, _ = problem_and_tensors(case, tensors, "NHWC")
    assert [step.grid for step in backend.explain(problem).steps] == [(1, 2, 1)] * 2 + [(1, 1, 1)]
    for name, array in answers(backend, case, tensors, "NHWC").items():
        assert_same_bits(array, whole[name])


@pytest.mark.parametrize("in_planes", [False, True])
@pytest.mark.parametrize("name", ["3x3", "stride_2", "channels_13", "3d", "11x11", "row_of_taps"])
def test_added_to_a_tensor(seed: int, name: str, in_planes: bool) -> None:
    conv = LAYERS[name]
    case = FROM_CONV["conv_bwd_data"](name, conv).with_tensor("accumulate", conv.input_shape)
    added = case.with_params("bilinear", alpha=2.0, beta=-0.25)
    tensors, wanted = drawn(seed, added, "bfloat16", "exact")
    layout = with_layouts(case.ndim, grouped=False)[1 if in_planes else 2]
    found = answers(only(DepthwiseDirect(in_planes=in_planes)), added, tensors, layout)
    check(found, wanted, "exact", f"seed {seed}, {added.id}")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("3x3", "stride_2", "stride_3", "row_of_taps")],
    ids=lambda case: case.id,
)
def test_what_is_not_finite_stays_in_its_channel(seed: int, case: Case, layout: str) -> None:
    check_rule(only(DepthwiseDirect(in_planes=layout == "NCHW")), seed, case, "bfloat16", layout)


def test_what_is_not_finite_stays_in_the_channel_that_sums_it(seed: int) -> None:
    case = FROM_CONV["conv_bwd_data"]("multiplier_2", LAYERS["multiplier_2"])
    check_rule(only(DepthwiseDirect(in_planes=True, most_summed=8)), seed, case, "bfloat16", "NCHW")


@pytest.mark.parametrize(
    ("dtype", "multiplier", "family"),
    [("float32", 8, "depthwise_direct_sums"), ("bfloat16", 8, "grouped_gather")],
)
def test_who_sums_channels_last(dtype: str, multiplier: int, family: str) -> None:
    case = FROM_CONV["conv_bwd_data"]("sums", layer(8, 64, (28, 28), (3, 3), 1, 1, 1, multiplier))
    tensors, _ = drawn(0, case, dtype, "bounded")
    problem, _ = problem_and_tensors(case, tensors, "NHWC")
    assert EmulatedBackend(FAMILIES).explain(problem).kernel == f"{family}_bwd_data"
