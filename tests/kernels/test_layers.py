"""Layers of real networks at full size, and sums of hundreds of thousands of terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check, with_layouts
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, rng_for
from tests.support.numerics.cases import FROM_CONV, maxpool_bwd, maxpool_fwd
from tests.support.numerics.geometries import Conv, Pool
from tests.support.numerics.oracle import expected

LAYERS = {
    "64_56": Conv(4, 64, 64, (56, 56), (3, 3), padding=1),
    "128_28": Conv(4, 128, 128, (28, 28), (3, 3), padding=1),
    "128_56_stride_2": Conv(4, 128, 128, (56, 56), (3, 3), 2, 1),
    "1024_256_pointwise": Conv(4, 1024, 256, (14, 14), (1, 1)),
    "depthwise_144": Conv(4, 144, 144, (56, 56), (3, 3), padding=1, groups=144),
    "256_in_32_groups": Conv(4, 256, 256, (28, 28), (3, 3), padding=1, groups=32),
    "3d_64": Conv(1, 64, 64, (8, 28, 28), (3, 3, 3), padding=1),
    "1d_256": Conv(4, 256, 256, (2048,), (3,), padding=1),
    "first_layer": Conv(4, 3, 64, (112, 112), (7, 7), 2, 3),
}
POOL = Pool(4, 64, (112, 112), 3, 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [integers, normals])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(
    backend: Backend, seed: int, name: str, operation: str, dtype: str, numbers: Any
) -> None:
    case = FROM_CONV[operation](name, LAYERS[name])
    tensors = draw(case, rng_for(seed, name), DTYPES[dtype], numbers)
    wanted = expected(operation, tensors, case.params)
    gate = "exact" if numbers is integers else "bounded"
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        what = f"seed {seed}, {case.id} {dtype} {layout}"
        check(answers(backend, case, tensors, layout), wanted, gate, what)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("make", [maxpool_fwd, maxpool_bwd])
def test_pool(backend: Backend, seed: int, make: Any, dtype: str) -> None:
    case = make("112", POOL)
    tensors = draw(case, rng_for(seed, case.id), DTYPES[dtype], integers)
    wanted = expected(case.operation, tensors, case.params)
    for layout in with_layouts(2, grouped=False):
        check(answers(backend, case, tensors, layout), wanted, "bounded", f"seed {seed}, {case.id}")


def positive(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Draw positive numbers: without cancellation, a bias of each addition accumulates."""
    return rng.uniform(0.5, 1.0, shape).astype(np.float32).astype(dtype)


LONG = {
    "pointwise": Conv(2, 3, 5, (230, 240), (1, 1)),
    "3x3": Conv(1, 2, 2, (320, 311), (3, 3), padding=1),
    "depthwise": Conv(1, 2, 2, (330, 310), (3, 3), padding=1, groups=2),
    "1d": Conv(4, 3, 2, (25_000,), (3,), padding=1),
    "deep": Conv(1, 20_000, 3, (3, 2), (3, 2), padding=(1, 0)),
}


@pytest.mark.parametrize("numbers", [positive, normals, integers])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", LONG)
def test_long_sums(backend: Backend, seed: int, name: str, dtype: str, numbers: Any) -> None:
    """A float32 accumulator loses none of a hundred thousand terms."""
    operation = "conv_fwd" if name == "deep" else "grouped_conv_bwd_weight"
    case = FROM_CONV[operation](name, LONG[name])
    tensors = draw(case, rng_for(seed, name), DTYPES[dtype], numbers)
    wanted = expected(case.operation, tensors, case.params)
    gate = "exact" if numbers is integers else "bounded"
    what = f"seed {seed}, {case.id} {dtype}"
    for layout in with_layouts(case.ndim, grouped=False)[1:]:
        check(answers(backend, case, tensors, layout), wanted, gate, what)
    if operation == "grouped_conv_bwd_weight":
        wide = case.with_params("wide", weight_dtype="float32")
        check(answers(backend, wide, tensors), wanted, gate, what)
