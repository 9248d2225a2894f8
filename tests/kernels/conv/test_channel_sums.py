"""The bias gradient kernel, emulated: exact results for all layouts, vectors and splits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from convgrad_service.backends.cuda.families import FAMILIES
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import run
from tests.support.numerics.arrays import DTYPES, rng_for

pytestmark = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")

# Batch, groups, channels of a group, height, width.
SHAPES = (
    (2, 1, 24, 5, 7),
    (3, 4, 8, 4, 4),
    (1, 6, 1, 9, 3),  # one channel per group
    (40, 2, 40, 8, 8),  # several splits
    (5, 3, 3, 1, 1),  # one position
    (2, 1, 300, 16, 16),  # several tiles of columns
)


@pytest.fixture(scope="module")
def emulated() -> EmulatedBackend:
    return EmulatedBackend(FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "NGCHW", "NHWGC", "GNHWC"])
def test_every_layout_is_summed_exactly(
    emulated: EmulatedBackend, seed: int, layout: str, dtype: str
) -> None:
    for shape, wide in product(SHAPES, (False, True)):
        n, g, k, h, w = shape
        sizes = {"N": n, "G": g, "C": k if "G" in layout else g * k, "H": h, "W": w}
        own = tuple(sizes[letter] for letter in layout)
        rng = rng_for(seed, layout, dtype, str(shape))
        grad = rng.integers(-2, 3, own).astype(DTYPES[dtype])
        params = {"groups": g, "outputs": ["grad_bias"], "weight_size": [1, 1], "layout": layout}
        if wide and dtype == "bfloat16":
            params["weight_dtype"] = "float32"
        arrays = {"input": grad, "grad_output": grad}
        found = run(emulated, "grouped_conv_bwd_weight", arrays, params).outputs["grad_bias"]
        summed = tuple(i for i, letter in enumerate(layout) if letter not in "GC")
        wanted = grad.astype(np.float64).sum(summed).reshape(found.shape).astype(found.dtype)
        assert np.array_equal(found, wanted), (layout, dtype, shape, wide)
