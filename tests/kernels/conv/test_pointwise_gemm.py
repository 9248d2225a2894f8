"""pointwise_gemm, emulated: every operation, and each way to share and to store a tile."""

from __future__ import annotations

import pytest

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import pointwise_gemm
from tests.support.kernels.harness import ROUNDED, answers, check, drawn, gates
from tests.support.numerics.cases import Case, conv_bwd_data, conv_fwd, grouped_conv_bwd_weight
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

# Partial tiles and boxes, and a partial last step of the reduction.
USUAL = Conv(2, 72, 136, (9, 11), (1, 1))
SHALLOW = Conv(3, 40, 24, (5, 9, 4), (1, 1, 1))
FWD, DATA, WEIGHT = (
    [make(name, conv) for name, conv in (("usual", USUAL), ("shallow", SHALLOW))]
    for make in (conv_fwd, conv_bwd_data, grouped_conv_bwd_weight)
)
# Blocks that store, with one or several tiles; with b resident; splits over clusters whose size is
# not a power of two, some of which have no step; also through a workspace.
GATHER = (
    (FWD[0], Config(64, 96)),
    (FWD[0], Config(128, 40, 128)),
    (FWD[0], Config(64, 144, resident=True)),
    (FWD[1], Config(128, 24, 64, resident=True)),
    (DATA[0], Config(256, 64)),
    (DATA[0], Config(64, 80, 128)),
    (DATA[0], Config(128, 64, cluster=3)),
    (DATA[0], Config(64, 24, cluster=8)),
    (DATA[1], Config(128, 48, 32, resident=True)),
    (DATA[1], Config(64, 16, 32)),
)
# One or two wgmma tiles per warpgroup, an odd number of fragments, more rows than channels; last,
# more column tiles than blocks.
TRANSPOSED = (
    (FWD[0], Config(128, 96)),
    (FWD[1], Config(64, 40, 128)),
    (DATA[0], Config(128, 104)),
    (DATA[0], Config(192, 64)),
    (DATA[0], Config(256, 24)),
    (DATA[0], Config(64, 24, 128)),
    (DATA[1], Config(64, 56)),
    (conv_bwd_data("long", Conv(4, 16, 8, (29, 31), (1, 1))), Config(64, 24)),
)
SUMMED = (
    (WEIGHT[0], Config(64, 80, 128), False),
    (WEIGHT[0], Config(128, 64, 64, cluster=2, parts=2), False),
    (WEIGHT[0], Config(64, 64, 128, cluster=1), True),
    (WEIGHT[1], Config(64, 40, 128, cluster=2, parts=2), False),
    (WEIGHT[1], Config(64, 16, 128, cluster=3, parts=1), True),
    (WEIGHT[0], Config(128, 80, 64, parts=3), False),
    (WEIGHT[0], Config(64, 144, 64, parts=2), True),
    (WEIGHT[1], Config(64, 24, 128, parts=4), False),
)

# In TF32: B in boxes of a row or of several, a partial one among them.
TF32 = (
    (WEIGHT[0], Config(64, 128, 32, cluster=1)),
    (WEIGHT[0], Config(64, 96, 32, parts=3)),
    (WEIGHT[0], Config(64, 64, cluster=2, parts=2)),
    (WEIGHT[1], Config(64, 16, parts=2)),
    (WEIGHT[1], Config(64, 32, cluster=3)),
    # Stored from registers; the weight in registers, an odd and an even number of k-tiles.
    (FWD[0], Config(64, 96, 32)),
    (FWD[1], Config(128, 32, 32)),
    (FWD[0], Config(64, 32, 32, cluster=2)),
    (DATA[0], Config(64, 48, 32)),
    (DATA[0], Config(128, 64)),
    (DATA[1], Config(192, 64, 32)),
    (DATA[1], Config(256, 32, 32)),
    (DATA[0], Config(64, 32, 32, cluster=3)),
    (DATA[1], Config(128, 64, 32, cluster=2)),
    (conv_bwd_data("long", Conv(4, 16, 8, (29, 31), (1, 1))), Config(64, 32, 32)),
)

# Blocks of a cluster share an operand: of the last cluster, some have a tile beyond the result.
SHARED = (
    (DATA[0], Config(64, 80, multicast=2), False),
    (DATA[0], Config(128, 48, 128, multicast=4), False),
    (DATA[1], Config(64, 64, multicast=4), False),
    (FWD[0], Config(64, 96, multicast=2), False),
    (DATA[0], Config(128, 104, multicast=2), True),
    (conv_bwd_data("long", Conv(4, 16, 8, (29, 31), (1, 1))), Config(64, 24, multicast=4), False),
    (WEIGHT[0], Config(64, 80, multicast=3, parts=3), False),
)

# Warpgroups that take tiles in turn: several each, fewer and more k-tiles than stages.
LONG = conv_bwd_data("long", Conv(4, 72, 72, (59, 61), (1, 1)))
DEEP = conv_bwd_data("deep", Conv(4, 72, 1032, (19, 21), (1, 1)))
ALTERNATE = (
    (LONG, Config(64, 80, alternate=True), False),
    (LONG, Config(128, 64, multicast=2, alternate=True), False),
    (DEEP, Config(128, 128, alternate=True), False),
    (DEEP, Config(64, 64, alternate=True), True),
    (FWD[0], Config(128, 64, alternate=True), False),
)

# Several images, with partial tiles of pixels and channels; fwd has a bias. Last, more row tiles
# than blocks.
IMAGES = Conv(3, 72, 136, (9, 16), (1, 1))
_LONG_PLANES = conv_bwd_data("long", Conv(40, 16, 8, (16, 20), (1, 1)))
PLANES = (
    (conv_fwd("images", IMAGES), Config(64, 128), False),
    (conv_fwd("images", IMAGES), Config(128, 32, resident=True), False),
    (conv_fwd("images", IMAGES), Config(256, 96), False),
    (conv_bwd_data("images", IMAGES), Config(128, 192), False),
    (conv_bwd_data("images", IMAGES).with_params("alpha", alpha=-0.5), Config(128, 96), False),
    (_LONG_PLANES, Config(64, 64), False),
    (conv_bwd_data("images", IMAGES), Config(64, 128, multicast=2), False),
    (conv_bwd_data("images", IMAGES), Config(128, 64, alternate=True), False),
    (_LONG_PLANES, Config(64, 128, alternate=True), False),
    (conv_bwd_data("seven", Conv(5, 72, 136, (7, 7), (1, 1))), Config(128, 56), True),
    (conv_bwd_data("even", Conv(7, 40, 200, (14, 10), (1, 1))), Config(64, 112), True),
    (conv_bwd_data("single", Conv(1, 24, 72, (13, 13), (1, 1))), Config(192, 56), True),
    (conv_bwd_data("odd", Conv(40, 264, 8, (3, 2, 9), (1, 1, 1))), Config(256, 56), True),
    (
        conv_bwd_data("even", Conv(7, 40, 200, (14, 10), (1, 1))),
        Config(64, 56, alternate=True),
        True,
    ),
)

# Weight gradients of planes: k-tiles of one image each, the last of an image partial; channels that
# are no whole chunks; blocks that store, and splits whose steps skip images.
_PLANES = grouped_conv_bwd_weight("images", IMAGES)
_NARROW = grouped_conv_bwd_weight("narrow", Conv(5, 9, 21, (8, 3), (1, 1)))
SUMMED_PLANES = (
    (_PLANES, Config(64, 32), False),
    (_PLANES, Config(128, 64, cluster=2, parts=2), False),
    (_PLANES, Config(64, 64, 128, cluster=3), True),
    (_PLANES, Config(64, 80, parts=7), True),
    (_PLANES, Config(128, 40, 128, parts=4), False),
    (_NARROW, Config(64, 24, 128, parts=3), False),
    (_NARROW, Config(64, 16, cluster=2), True),
)
# The same of planes that do not start at multiples of 16 bytes: one k-tile of an image, or several.
_SEVEN = grouped_conv_bwd_weight("seven", Conv(5, 72, 136, (7, 7), (1, 1)))
_SINGLE = grouped_conv_bwd_weight("single", Conv(1, 24, 72, (13, 13), (1, 1)))
_FOURTEEN = grouped_conv_bwd_weight("fourteen", Conv(3, 72, 136, (14, 14), (1, 1)))
_EVEN = grouped_conv_bwd_weight("even", Conv(3, 40, 72, (14, 10), (1, 1)))
SUMMED_PLANES += (
    (_SEVEN, Config(64, 64), False),
    (_SEVEN, Config(128, 64, parts=3), True),
    (_SEVEN, Config(64, 128, cluster=2), False),
    (_SINGLE, Config(64, 64), False),
    (_FOURTEEN, Config(128, 64, cluster=2), False),
    (_EVEN, Config(64, 64, 128, parts=4), False),
    (_EVEN, Config(64, 64, cluster=3, parts=2), True),
)

# Rows that are no whole chunks: an even number of elements or, of either operand, an odd one;
# partial tiles; fewer and more k-tiles than stages; only one operand's; runs of the result of 1 to
# 8 elements; a bias in fwd.
_EVEN_ROWS, _ODD_ROWS = Conv(2, 162, 38, (9, 11), (1, 1)), Conv(3, 27, 70, (5, 9, 4), (1, 1, 1))
_HALF_ROWS, _DEEP_ROWS = Conv(2, 72, 45, (9, 7), (1, 1)), Conv(2, 20, 1044, (7, 13), (1, 1))
UNALIGNED = (
    (conv_fwd("even", _EVEN_ROWS), Config(64, 32), False),
    (conv_fwd("odd", _ODD_ROWS), Config(128, 48, 32), False),
    (conv_fwd("deep", _DEEP_ROWS), Config(64, 128), False),
    (conv_bwd_data("even", _EVEN_ROWS), Config(128, 176, 32), False),
    (conv_bwd_data("odd", _ODD_ROWS), Config(64, 64, 32), False),
    (conv_bwd_data("half", _HALF_ROWS), Config(128, 64), False),
    (conv_bwd_data("deep", _DEEP_ROWS).with_params("alpha", alpha=-0.5), Config(64, 32), False),
    (grouped_conv_bwd_weight("even", _EVEN_ROWS), Config(128, 48, parts=3), False),
    (grouped_conv_bwd_weight("odd", _ODD_ROWS), Config(64, 96, parts=2), True),
    (grouped_conv_bwd_weight("half", _HALF_ROWS), Config(192, 32, parts=2), False),
    (grouped_conv_bwd_weight("deep", _DEEP_ROWS), Config(64, 32, parts=3), True),
    (conv_fwd("odd", _ODD_ROWS), Config(64, 32, cluster=1), False),
    (conv_bwd_data("deep", _DEEP_ROWS), Config(64, 64, cluster=4), False),
    (grouped_conv_bwd_weight("odd", _ODD_ROWS), Config(64, 32, cluster=2), True),
    (grouped_conv_bwd_weight("even", _EVEN_ROWS), Config(128, 48, cluster=3, parts=2), False),
)

# The same in planes, also where only rows of weights are no whole chunks, and where images start at
# other elements.
_SEVENS, _EIGHTS = Conv(5, 36, 145, (7, 7), (1, 1)), Conv(3, 20, 60, (8, 16), (1, 1))
_PAIRS = Conv(3, 38, 84, (7, 10), (1, 1))
UNALIGNED_PLANES = (
    (conv_fwd("sevens", _SEVENS), Config(64, 64), False),
    (conv_fwd("pairs", _PAIRS), Config(128, 64, 32), False),
    (conv_bwd_data("sevens", _SEVENS), Config(128, 64), False),
    (conv_bwd_data("eights", _EIGHTS), Config(64, 128), False),
    (conv_bwd_data("pairs", _PAIRS), Config(64, 64, 32), False),
    (grouped_conv_bwd_weight("sevens", _SEVENS), Config(192, 48, parts=2), False),
    (grouped_conv_bwd_weight("pairs", _PAIRS), Config(64, 64, parts=3), True),
    (grouped_conv_bwd_weight("sevens", _SEVENS), Config(64, 64, cluster=2), False),
)


def name_of(value: object) -> str | None:
    return value.id if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("case", "config"), GATHER, ids=name_of)
def test_gather(seed: int, case: Case, config: Config) -> None:
    for dtype, gate in (("bfloat16", "exact"), ("bfloat16", "bounded")):
        tensors, wanted = drawn(seed, case, dtype, gate)
        backend = EmulatedBackend(pointwise_gemm(config))
        found = answers(backend, case, tensors, _last(case))
        check(found, wanted, gate, f"seed {seed}, {case.id} {config}")


@pytest.mark.parametrize(("case", "config"), TRANSPOSED, ids=name_of)
def test_transposed(seed: int, case: Case, config: Config) -> None:
    for dtype, gate in (("bfloat16", "exact"), ("float16", "bounded")):
        tensors, wanted = drawn(seed, case, dtype, gate)
        backend = EmulatedBackend(pointwise_gemm(config, swapped=True))
        found = answers(backend, case, tensors, _last(case))
        check(found, wanted, gate, f"seed {seed}, {case.id} {config}")


# The same channels first: the pixels of an image in registers, and weight gradients.
_EIGHTEEN = Conv(3, 72, 136, (6, 18), (1, 1))
TF32_PLANES = (
    (conv_fwd("planes", _EIGHTEEN), Config(64, 96, 32), False),
    (conv_fwd("planes", _EIGHTEEN), Config(128, 64, 32), False),
    (conv_fwd("wide", Conv(2, 40, 24, (13, 20), (1, 1))), Config(128, 32, 32), False),
    (conv_bwd_data("planes", _EIGHTEEN), Config(64, 32, 32), False),
    (conv_bwd_data("odd", Conv(2, 40, 21, (13, 20), (1, 1))), Config(128, 128, 32), False),
    (grouped_conv_bwd_weight("planes", _EIGHTEEN), Config(64, 32, 32, cluster=2), False),
    (grouped_conv_bwd_weight("planes", _EIGHTEEN), Config(128, 64, 32, parts=5), True),
    (grouped_conv_bwd_weight("planes", _EIGHTEEN), Config(64, 64, cluster=2, parts=2), False),
)


@pytest.mark.parametrize(("case", "config", "swapped"), TF32_PLANES, ids=name_of)
def test_tf32_planes(seed: int, case: Case, config: Config, swapped: bool) -> None:
    gates(EmulatedBackend(pointwise_gemm(config, swapped=swapped)), seed, case, "tf32", ["NCHW"])


@pytest.mark.parametrize(("case", "config"), TF32, ids=name_of)
def test_tf32(seed: int, case: Case, config: Config) -> None:
    scaled = [case.with_params("scaled", alpha=-0.5)] if case in WEIGHT else []
    for one in (case, *scaled):
        gates(EmulatedBackend(pointwise_gemm(config)), seed, one, "tf32", [_last(case)])


def test_nonfinite_tf32(seed: int) -> None:
    backend = EmulatedBackend(pointwise_gemm(Config(64, 64, cluster=2)))
    case = WEIGHT[0].with_params("high", precision="high")
    check_rule(backend, seed, case, "float32", _last(case), ROUNDED)


@pytest.mark.parametrize(("case", "config", "swapped"), SHARED + ALTERNATE, ids=name_of)
def test_shared(seed: int, case: Case, config: Config, swapped: bool) -> None:
    tensors, wanted = drawn(seed, case, "bfloat16", "exact")
    found = answers(
        EmulatedBackend(pointwise_gemm(config, swapped=swapped)), case, tensors, _last(case)
    )
    check(found, wanted, "exact", f"seed {seed}, {case.id} {config}")


@pytest.mark.parametrize(("case", "config", "swapped"), PLANES, ids=name_of)
def test_planes(seed: int, case: Case, config: Config, swapped: bool) -> None:
    backend = EmulatedBackend(pointwise_gemm(config, swapped=swapped))
    for dtype, gate in (("bfloat16", "exact"), ("float16", "bounded")):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(backend, case, tensors, "NCDHW" if case.ndim == 3 else "NCHW")
        check(found, wanted, gate, f"seed {seed}, {case.id} {config}")


@pytest.mark.parametrize(
    ("case", "config", "swapped", "planes"),
    [(*one, False) for one in SUMMED] + [(*one, True) for one in SUMMED_PLANES],
    ids=name_of,
)
def test_weight(seed: int, case: Case, config: Config, swapped: bool, planes: bool) -> None:
    layout = "NCHW" if planes else _last(case)
    backend = EmulatedBackend(pointwise_gemm(config, swapped=swapped))
    for wide in (False, True):
        # Bulk copies store results only if they are as wide as the inputs.
        if wide and not config.reduces:
            continue
        posed = case.with_params("wide", weight_dtype="float32") if wide else case
        tensors, wanted = drawn(seed, posed, "bfloat16", "exact")
        found = answers(backend, posed, tensors, layout)
        check(found, wanted, "exact", f"seed {seed}, {posed.id} {config}")


@pytest.mark.parametrize(
    ("case", "config", "swapped", "planes"),
    [(*one, False) for one in UNALIGNED] + [(*one, True) for one in UNALIGNED_PLANES],
    ids=name_of,
)
def test_unaligned(seed: int, case: Case, config: Config, swapped: bool, planes: bool) -> None:
    layout = "NCHW" if planes else _last(case)
    backend = EmulatedBackend(pointwise_gemm(config, swapped=swapped, unaligned=True))
    for dtype, gate in (("bfloat16", "exact"), ("float16", "bounded")):
        tensors, wanted = drawn(seed, case, dtype, gate)
        found = answers(backend, case, tensors, layout)
        check(found, wanted, gate, f"seed {seed}, {case.id} {config}")
    check_rule(backend, seed, case, "bfloat16", layout)


def test_float16(seed: int) -> None:
    for case, config in ((DATA[0], Config(64, 80)), (WEIGHT[0], Config(64, 80, 128, cluster=2))):
        tensors, wanted = drawn(seed, case, "float16", "bounded")
        found = answers(EmulatedBackend(pointwise_gemm(config)), case, tensors, _last(case))
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {config}")


def test_epilogues(seed: int) -> None:
    shape = USUAL.input_shape
    posed = DATA[0].with_tensor("accumulate", shape).with_params("both", alpha=2.0, beta=-0.25)
    scaled = DATA[0].with_params("alpha", alpha=-0.5)
    for case, config in ((posed, Config(64, 48, cluster=2)), (scaled, Config(64, 96))):
        tensors, wanted = drawn(seed, case, "bfloat16", "exact")
        found = answers(EmulatedBackend(pointwise_gemm(config)), case, tensors, _last(case))
        check(found, wanted, "exact", f"seed {seed}, {case.id} {config}")


@pytest.mark.parametrize(
    ("case", "config"),
    [(DATA[0], Config(64, 80)), (WEIGHT[0], Config(64, 80, 128, cluster=2))],
    ids=name_of,
)
def test_nonfinite(seed: int, case: Case, config: Config) -> None:
    backend = EmulatedBackend(pointwise_gemm(config))
    check_rule(backend, seed, case, "bfloat16", _last(case))


def _last(case: Case) -> str:
    return "NDHWC" if case.ndim == 3 else "NHWC"
