"""implicit_gemm, emulated: every operation, in single blocks, clusters and through a workspace."""

from __future__ import annotations

import pytest

from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import TILES, Config, Tile
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import implicit_gemm
from tests.support.kernels.harness import answers, check, drawn, with_layouts
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case, conv_cases
from tests.support.numerics.geometries import Conv
from tests.support.numerics.nonfinite import check_rule

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

NAMES = (
    "plain",
    "stride_beyond_kernel",
    "stride_shares_factor_with_dilation",
    "padding_beyond_the_kernel",
    "channels_67",
    "channels_33_to_130",
    "groups_3_odd",
    "1d_causal",
    "3d_plain",
)
# Channels first, planes of 1x1 layers are copied by chunk, or only the weight's channels are.
POINTWISE = {
    "flat_planes": Conv(3, 68, 36, (6, 10), (1, 1)),
    "odd_planes": Conv(2, 40, 36, (7, 7), (1, 1)),
    "strided_planes": Conv(2, 40, 36, (9, 8), (1, 1), stride=2),
}
CASES = [case for op in FROM_CONV for case in conv_cases(op) if case.name in NAMES]
CASES += [FROM_CONV[op](name, conv) for op in FROM_CONV for name, conv in POINTWISE.items()]
TILE = {(tile.m, tile.n): tile for tile in reversed(TILES)}
WAYS = {
    "alone": Config(TILE[64, 64]),
    "cluster": Config(TILE[64, 64], 4),
    "workspace": Config(TILE[128, 32], 1, 3),
    "both": Config(TILE[64, 32], 2, 2),
}
OF_FLOAT32 = ("128x16", "128x32s3", "128x64s3", "32x128s3")
FLOAT32_TILES = [tile for tile in TILES if str(tile) in OF_FLOAT32]
TF32 = 2.0**-10  # error of rounding the factors


@pytest.mark.parametrize("gate", ["exact", "bounded"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_right(seed: int, case: Case, way: str, gate: str) -> None:
    kinds = [("bfloat16", "highest"), ("float32", "highest")]
    if way in ("alone", "both"):
        kinds.append(("float32", "high"))
    backend = EmulatedBackend(implicit_gemm(WAYS[way]))
    for dtype, precision in kinds:
        tensors, wanted = drawn(seed, case, dtype, gate)
        posed = case.with_params(precision, precision=precision)
        for layout in with_layouts(case.ndim, grouped=False)[-2:]:
            found = answers(backend, posed, tensors, layout)
            what = f"seed {seed}, {case.id} {dtype} {precision} {layout}"
            check(found, wanted, gate, what, TF32 if precision == "high" else 0.0)


@pytest.mark.parametrize("tile", FLOAT32_TILES, ids=str)
@pytest.mark.parametrize("op", FROM_CONV)
def test_tiles_of_float32(seed: int, op: str, tile: Tile) -> None:
    """Rows of operands that are contiguous along M or N have 64 to 512 bytes in shared memory."""
    (case,) = (case for case in conv_cases(op) if case.name == "channels_67")
    tensors, wanted = drawn(seed, case, "float32", "bounded")
    backend = EmulatedBackend(implicit_gemm(Config(tile, 2)))
    for precision, rounded in (("high", TF32), ("highest", 0.0)):
        posed = case.with_params(precision, precision=precision)
        for layout in ("NCHW", "NHWC"):
            found = answers(backend, posed, tensors, layout)
            check(found, wanted, "bounded", f"seed {seed}, {case.id} {layout}", rounded)


NONFINITE_NAMES = ("plain", "padding_beyond_the_kernel", "channels_67", "groups_3_odd")
NONFINITE = [case for case in CASES if case.name in NONFINITE_NAMES]


@pytest.mark.parametrize("way", ["alone", "both"])
@pytest.mark.parametrize("case", NONFINITE, ids=lambda case: case.id)
def test_nonfinite(seed: int, case: Case, way: str) -> None:
    check_rule(EmulatedBackend(implicit_gemm(WAYS[way])), seed, case, "bfloat16", "NHWC")


@pytest.mark.parametrize("case", EPILOGUES, ids=lambda case: case.id)
def test_epilogues(seed: int, case: Case) -> None:
    for way in ("cluster", "workspace"):
        tensors, wanted = drawn(seed, case, "bfloat16", "bounded")
        backend = EmulatedBackend(implicit_gemm(WAYS[way]))
        found = answers(backend, case, tensors)
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {way}")
