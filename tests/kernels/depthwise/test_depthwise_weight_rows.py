"""depthwise_weight_rows, emulated: one block, clusters and grids of blocks; rows of taps in one
block or in several.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise import depthwise_weight_rows
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_rows import (
    WHOLE_COLUMNS,
    DepthwiseWeightRows,
    RowsLayout,
    RowsTile,
    expected_s,
    layouts_of,
)
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, layer
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "3x3": layer(2, 40, (9, 14), (3, 3), 1, 1),
    "channels_36": layer(2, 36, (5, 6), (3, 3), 1, 1),
    "channels_13": layer(2, 13, (5, 6), (3, 3), 1, 1),
    "many_images": layer(70, 16, (5, 6), (3, 3), 1, 1),
    "padding_beyond_the_kernel": layer(2, 16, (5, 6), (3, 3), 1, 4),
    "5x5_stride_2": layer(2, 24, (12, 15), (5, 5), 2, 2),
    "stride_2_unread_column": layer(1, 16, (9, 20), (3, 3), 2, 0),
    "7x7": layer(1, 72, (7, 7), (7, 7), 1, 3),
    "rows_dilated": layer(1, 16, (14, 9), (3, 3), 1, (2, 1), (2, 1)),
    "dilated": layer(2, 8, (9, 13), (3, 3), 1, 2, 2),
    "dilated_by_two_steps": layer(2, 8, (9, 13), (3, 2), 2, 3, (2, 3)),
    "dilated_by_more_than_a_row": layer(1, 8, (3, 4), (3, 3), 1, 5, 5),
    "1d_k11_dilated": Conv(2, 24, 24, (40,), (11,), padding=10, dilation=2, groups=24),
    "multiplier_2": layer(2, 16, (7, 9), (3, 3), 1, 1, 1, 2),
    "multiplier_3": layer(2, 13, (7, 9), (5, 5), 2, 2, 1, 3),
    "11x11": layer(1, 16, (12, 13), (11, 11), 1, 5),
    "13x9_two_strides": Conv(1, 16, 16, (14, 13), (13, 9), (3, 2), (6, 4), groups=16),
    "1d_k31": Conv(5, 16, 16, (70,), (31,), padding=15, groups=16),
    "3d": Conv(2, 16, 16, (4, 6, 9), (3, 3, 3), padding=1, groups=16),
    "3d_strided": Conv(2, 24, 24, (5, 7, 8), (3, 3, 3), 2, 1, groups=24),
    "3d_strided_planes": Conv(1, 16, 16, (7, 5, 6), (2, 3, 3), (3, 1, 1), 1, groups=16),
}
CASES = [FROM_CONV["grouped_conv_bwd_weight"](*one) for one in LAYERS.items()]


def only(family: DepthwiseWeightRows) -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=[family]))


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return only(DepthwiseWeightRows())


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
    emulated = only(DepthwiseWeightRows(in_planes=True))
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(emulated, case, tensors, with_layouts(case.ndim, grouped=False)[1])
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_turned_planes(monkeypatch: pytest.MonkeyPatch, seed: int, case: Case, dtype: str) -> None:
    """With H and W exchanged, whether or not that should be faster."""

    def best_turned(work: ConvWork, device: CudaDevice) -> RowsLayout:
        every = list(layouts_of(work, device))
        turned = [one for one in every if one.turned]
        return min(turned or every, key=lambda one: expected_s(work, device, one))

    monkeypatch.setattr(depthwise_weight_rows, "_best", best_turned)
    tensors, wanted = drawn(seed, case, dtype, "exact")
    layout = with_layouts(case.ndim, grouped=False)[1]
    found = answers(only(DepthwiseWeightRows(in_planes=True)), case, tensors, layout)
    check(found, wanted, "exact", f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (7, 1), (3, 2), (5, 2), (7, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_rows_of_a_thread(
    seed: int, kernel: int, stride: int, turned: bool, dtype: str
) -> None:
    tile = RowsTile(kernel, stride, WHOLE_COLUMNS[stride], 1, kernel)
    family = DepthwiseWeightRows(RowsLayout(tile, 8, 1, 3, turned), in_planes=True)
    conv = layer(3, 11, (19, 10), (kernel, kernel), stride, kernel // 2)
    case = FROM_CONV["grouped_conv_bwd_weight"]("square", conv)
    tensors, wanted = drawn(seed, case, dtype, "exact")
    check(answers(only(family), case, tensors, "NCHW"), wanted, "exact", f"seed {seed}, {case.id}")
    check_rule(only(family), seed, case, dtype, "NCHW")


@pytest.mark.parametrize("blocks", [1, 2, 3, 8, 11])
@pytest.mark.parametrize(("vectors", "tap_rows"), [(12, 3), (24, 5), (8, 1)])
def test_every_reduction(seed: int, blocks: int, vectors: int, tap_rows: int) -> None:
    case = FROM_CONV["grouped_conv_bwd_weight"]("wide", layer(3, 40, (10, 11), (5, 5), 1, 2))
    family = DepthwiseWeightRows(RowsLayout(RowsTile(5, 1, 4, 2), vectors, tap_rows, blocks))
    compare(only(family), seed, case, "bfloat16", "exact")


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("3x3", "5x5_stride_2")], ids=lambda c: c.id
)
def test_what_is_not_finite_stays_in_its_channel(seed: int, case: Case, layout: str) -> None:
    backend = only(DepthwiseWeightRows(in_planes=layout == "NCHW"))
    check_rule(backend, seed, case, "bfloat16", layout)
