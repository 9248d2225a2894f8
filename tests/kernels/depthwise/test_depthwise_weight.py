"""depthwise_weight, emulated: either size of copies, chunks and groups of strips at all edges.

On a GPU, the tests of the `backend` fixture and the random layers of its class cover it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight import DepthwiseWeight
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.depthwise_cases import compare, layer
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS: dict[str, Conv] = {
    "3x3": layer(2, 40, (9, 14), (3, 3), 1, 1),
    "36_channels": layer(2, 36, (9, 14), (3, 3), 1, 1),
    "channels_10_5x5": layer(1, 10, (7, 8), (5, 5), 1, 2),
    "channels_6_7x7_strided": layer(1, 6, (11, 9), (7, 7), 2, 3),
    "many_images": layer(70, 16, (5, 6), (3, 3), 1, 1),
    "wide": layer(1, 16, (3, 290), (3, 3), 1, 1),
    "padding_beyond_the_kernel": layer(2, 16, (5, 6), (3, 3), 1, 4),
    "5x5": layer(2, 24, (12, 15), (5, 5), 1, 2),
    "5x5_stride_2": layer(2, 24, (12, 15), (5, 5), 2, 2),
    "7x7": layer(1, 72, (7, 9), (7, 7), 1, 3),
    "stride_2_uneven_padding": layer(2, 48, (11, 19), (3, 3), 2, ((0, 1), (2, 0))),
    "stride_2_unread_column": layer(1, 16, (9, 20), (3, 3), 2, 0),
    "11x11": layer(1, 16, (12, 13), (11, 11), 1, 5),
    "13x9": layer(1, 16, (14, 13), (13, 9), 2, (6, 4)),
    "3d": Conv(2, 16, 16, (4, 6, 9), (3, 3, 3), padding=1, groups=16),
    "3d_strided": Conv(2, 24, 24, (5, 7, 8), (3, 3, 3), 2, 1, groups=24),
    "3d_dilated_planes": Conv(1, 16, 16, (9, 5, 6), (3, 3, 3), 1, (2, 1, 1), (2, 1, 1), groups=16),
}
CASES = [FROM_CONV["grouped_conv_bwd_weight"](*one) for one in LAYERS.items()]


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=[DepthwiseWeight(always=True)]))


# Pixels of float32 are copied in whole chunks.
IN_DTYPES = [(case, "bfloat16") for case in CASES]
IN_DTYPES += [(case, "float32") for case in CASES if not case.name.startswith("channels_")]


@pytest.mark.parametrize(("case", "dtype"), IN_DTYPES, ids=lambda one: getattr(one, "id", one))
def test_layers(emulated: EmulatedBackend, seed: int, case: Case, dtype: str) -> None:
    for gate in ("exact", "bounded"):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(emulated, case, tensors, with_layouts(case.ndim, grouped=False)[2])
        check(found, wanted, gate, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("name", ["3x3", "5x5_stride_2"])
def test_added_to_a_tensor(emulated: EmulatedBackend, seed: int, name: str) -> None:
    conv = LAYERS[name]
    case = FROM_CONV["grouped_conv_bwd_weight"](name, conv)
    case = case.with_tensor("accumulate", conv.weight_shape)
    compare(
        emulated, seed, case.with_params("bilinear", alpha=2.0, beta=-0.25), "bfloat16", "exact"
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in ("3x3", "5x5_stride_2")], ids=lambda c: c.id
)
def test_what_is_not_finite_stays_in_its_channel(
    emulated: EmulatedBackend, seed: int, case: Case
) -> None:
    check_rule(emulated, seed, case, "bfloat16", "NHWC")
