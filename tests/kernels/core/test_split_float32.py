"""True float32 on tensor cores at both ends of its range: splitting factors loses no precision.

Dense kernels split a factor into two TF32 numbers, or it is split beforehand into three bfloat16;
those of first layers split it into three bfloat16. `implicit_gemm` reads channels last and first;
sums are split among blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.float_parts import PARTS
from convgrad_service.backends.cuda.kernels.conv.hopper_gather import HopperGather
from convgrad_service.backends.cuda.kernels.conv.hopper_weight import HopperWeight
from convgrad_service.backends.cuda.kernels.conv.implicit_gemm_tiles import TILES, Config
from convgrad_service.backends.cuda.kernels.conv.split_gather import SplitGather
from convgrad_service.backends.cuda.kernels.conv.split_weight import SplitWeight
from convgrad_service.plans.cuda.families import Families
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import dense, implicit_gemm
from tests.support.kernels.harness import answers, check
from tests.support.numerics.arrays import DTYPES, Arrays, draw, normals, rng_for
from tests.support.numerics.cases import FROM_CONV, Case
from tests.support.numerics.geometries import CONVS, Conv
from tests.support.numerics.nonfinite import check_rule
from tests.support.numerics.oracle import expected

Place = Callable[..., Backend]
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
PLACES = [
    pytest.param(EmulatedBackend, marks=emulation, id="emulated"),
    pytest.param(partial(CudaBackend, poison=True), marks=pytest.mark.gpu, id="gpu"),
]
GEOMETRIES = {
    "channels_67": CONVS["channels_67"],
    # Several reduction steps per tap, and several images.
    "deep": Conv(3, 72, 40, (7, 6), (3, 3), padding=1),
    "pointwise": Conv(3, 72, 40, (6, 6), (1, 1)),
}
FIRST = {
    "first": Conv(2, 3, 32, (13, 16), (7, 7), 2, 3),
    "first_wide": Conv(1, 3, 64, (9, 48), (3, 3), 2, 1),
}
OPERATIONS = ("conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight")
IMPLICIT = Config(next(tile for tile in TILES if (tile.m, tile.n) == (64, 32)), 2, 2)
# Sums of elements near the maximum, as in grad_bias, would overflow.
ALONE = {"grouped_conv_bwd_weight": {"outputs": ("grad_weight",)}}
CASES = [
    FROM_CONV[operation](name, conv).with_params("", **ALONE.get(operation, {}))
    for operation in OPERATIONS
    for name, conv in (GEOMETRIES | FIRST).items()
    if name in GEOMETRIES or operation != "conv_fwd"
]


GATHER = (SplitGather(HopperGather(True, parts=PARTS["highest"])),)
BY_PARTS = replace(
    FAMILIES, fwd=GATHER, bwd_data=GATHER, bwd_weight=(SplitWeight(HopperWeight(1)),)
)
# Families by name, and a layout.
WAYS = {
    "dense": (dense(), "NHWC"),
    "implicit_gemm": (implicit_gemm(IMPLICIT), "NHWC"),
    "planes": (implicit_gemm(IMPLICIT), "NCHW"),
    "by_parts": (BY_PARTS, "NHWC"),
    "first": (FAMILIES, "NHWC"),
}
POSED = [
    pytest.param(case, *WAYS[way], id=f"{case.id}-{way}")
    for case in CASES
    for way in (
        ["first"] if case.name in FIRST else ["dense", "implicit_gemm", "planes", "by_parts"]
    )
]


def factors(tensors: Arrays) -> list[np.ndarray]:
    """Return the two tensors that are multiplied."""
    return [tensors[name] for name in ("grad_output", "input", "weight") if name in tensors]


def scaled(array: np.ndarray, rng: np.random.Generator, least: int, most: int) -> None:
    array[...] = np.ldexp(array, rng.integers(least, most, array.shape)).astype(np.float32)


def tiny(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> None:
    scaled(a, rng, -144, -110)


def tiny_by_large(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> None:
    scaled(a, rng, -125, -105)
    scaled(b, rng, 95, 115)


def tiny_image(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> None:
    scaled(a[-1], rng, -140, -120)


def tiny_here_and_there(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> None:
    for array in (a, b):
        chosen = rng.random(array.shape) < 0.2
        array[chosen] = np.ldexp(array[chosen], -130)


def near_the_largest(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> None:
    chosen = rng.random(a.shape) < 0.05
    a[chosen] = np.copysign(np.finfo(np.float32).max, a[chosen])
    b[...] = np.ldexp(b, -20)


KINDS = (tiny, tiny_by_large, tiny_image, tiny_here_and_there, near_the_largest)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("swapped", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("case", "families", "layout"), POSED)
def test_ends_of_the_range(
    place: Place,
    seed: int,
    case: Case,
    families: Families,
    layout: str,
    kind: Callable[..., None],
    swapped: bool,
) -> None:
    rng = rng_for(seed, case.id, kind.__name__)
    tensors = draw(case, rng, DTYPES["float32"], normals)
    a, b = factors(tensors)[::-1] if swapped else factors(tensors)
    kind(a, b, rng)
    wanted = expected(case.operation, tensors, case.params)
    found = answers(place(families=families), case, tensors, layout)
    check(found, wanted, "bounded", f"seed {seed}, {case.id} {layout}")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("case", "families", "layout"), POSED)
def test_nonfinite(place: Place, seed: int, case: Case, families: Families, layout: str) -> None:
    check_rule(place(families=families), seed, case, "float32", layout)
