"""Pieces whose plans report the same order of summation have the bits of the whole problem.

Plans choose other tiles for other batches; these tests, in the emulator, check the reported order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm import ImplicitGemm
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import Family
from convgrad_service.plans.cuda.works import ConvWork
from convgrad_service.problems import problem_from
from convgrad_service.problems.pieces import run_in_pieces
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.numerics.arrays import DTYPES, draw, normals, request_arrays, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import FROM_CONV, FUSED, Case
from tests.support.numerics.geometries import Conv

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

LAYERS = {
    "dense": Conv(6, 64, 128, (9, 11), (3, 3), padding=1),
    "depthwise": Conv(5, 32, 32, (9, 24), (3, 3), padding=1, groups=32),
    "grouped": Conv(5, 64, 64, (9, 11), (3, 3), padding=1, groups=8),
    "first": Conv(4, 3, 64, (17, 19), (7, 7), 2, 3),
}
MOVED = ("conv_fwd", "conv_bwd_data")
CASES = [FROM_CONV[operation](name, conv) for name, conv in LAYERS.items() for operation in MOVED]
# With few multiprocessors, even small problems have more tiles than multiprocessors.
FEW = replace(H200, multiprocessors=2)


def alike(
    seed: int, case: Case, dtype: str, layout: str, parts: int, precision: str = "high"
) -> bool | None:
    """Whether the pieces' orders are the whole's; then the bits must agree. None if not split.

    Both are planned for few multiprocessors, so that small layers have several waves of tiles.
    """
    backend = EmulatedBackend(FAMILIES, FEW)
    tensors = draw(case, rng_for(seed, case.id, dtype), DTYPES[dtype], normals)
    params = {**case.params, "layout": layout}
    if dtype == "float32":
        params["precision"] = precision
    arrays = request_arrays(case, tensors, layout)
    request = validate(OPERATIONS[case.operation].request, {**arrays, **params})
    problem = problem_from(case.operation, request)
    pieces = problem.split(parts)
    if len(pieces) == 1:
        return None
    orders = {backend.explain(piece.problem).orders for piece in pieces}
    if orders != {backend.explain(problem).orders}:
        return False
    whole = backend.run(problem, request.tensors()).outputs
    found = run_in_pieces(problem, request.tensors(), parts, lambda p, t: backend.run(p, t).outputs)
    for name, array in found.items():
        what = f"seed {seed}, {case.id} {dtype} {layout} in {parts}: {orders}"
        assert_same_bits(array, whole[name], what)
    return True


@pytest.mark.parametrize("case", [*CASES, FUSED[1]], ids=lambda case: case.id)
def test_layers(seed: int, case: Case) -> None:
    layout = "NHWC" if case.ndim == 2 else "NWC"
    assert alike(seed, case, "bfloat16", layout, 2) is not False


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_random_layers(seed: int, number: int) -> None:
    rng = rng_for(seed, "pieces", number)
    kind = rng.choice(["dense", "dense", "depthwise", "grouped", "first"])
    kernel = int(rng.choice([1, 2, 3, 5]))
    size = tuple(int(n) for n in rng.integers(kernel, 24, 2))
    stride, dilation = int(rng.choice([1, 1, 2, 3])), 1 if min(size) < 2 * kernel else 2
    channels = int(rng.choice([32, 48, 64, 96, 136]))
    groups = {"depthwise": channels, "grouped": channels // 8}.get(str(kind), 1)
    read = int(rng.integers(1, 5)) if kind == "first" else channels
    written = int(rng.choice([32, 64, 136, 200])) if kind == "dense" else channels
    conv = Conv(
        int(rng.integers(1, 8)), read, written, size, (kernel, kernel), stride,
        int(rng.integers(0, kernel + 1)), int(rng.integers(1, dilation + 1)), groups=groups,
    )  # fmt: skip
    case = FROM_CONV[str(rng.choice(MOVED))](str(kind), conv)
    dtype = str(rng.choice(["bfloat16", "float16", "float32"]))
    layout, parts = str(rng.choice(["NHWC", "NCHW"])), int(rng.choice([2, 3, 7]))
    alike(seed, case, dtype, layout, parts, str(rng.choice(["high", "highest"])))


@pytest.mark.parametrize("family", [HopperGather(), ImplicitGemm()], ids=lambda one: one.name)
def test_a_split_reduction_is_another_order(family: Family[ConvWork]) -> None:
    """The same layer with many images and with one."""
    tensors = {"input": np.zeros((64, 9, 9, 256), np.float16)}
    tensors["weight"] = np.zeros((64, 3, 3, 256), np.float16)
    request = validate(OPERATIONS["conv_fwd"].request, {**tensors, "layout": "NHWC"})
    many = problem_from("conv_fwd", request)
    one = many.split(64)[0].problem
    backend = EmulatedBackend(replace(FAMILIES, fwd=[family]))
    orders = [backend.explain(problem).orders for problem in (many, one)]
    assert orders[0] != orders[1]
    assert all(order[0].startswith(family.name) for order in orders)
