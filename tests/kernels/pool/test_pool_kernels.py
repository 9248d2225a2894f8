"""Poolings at the limits of the GPU's fast kernels: on every backend, and emulated."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.pool import window_box
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.plans.cuda.program import CudaPlan, Launch
from convgrad_service.problems import problem_from
from convgrad_service.problems.pieces import run_in_pieces
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.harness import answers, check, problem_and_tensors, with_layouts
from tests.support.numerics.arrays import DTYPES, draw, integers, normals, request_arrays, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case, maxpool_bwd, maxpool_fwd
from tests.support.numerics.geometries import Pool
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import with_nans

POOLS = {
    # adjacent 2x2 windows, in rows of whole vectors or not
    "cells": Pool(2, 5, (8, 16), 2),
    "cells_odd_rows": Pool(1, 3, (7, 8), 2),
    "cells_ceil": Pool(1, 3, (7, 24), 2, ceil_mode=True),
    "cells_half_vectors": Pool(1, 2, (6, 20), 2),
    "cells_no_vectors": Pool(1, 2, (4, 6), 2),
    "cells_3d": Pool(1, 3, (5, 6, 16), 2),
    "cells_smaller": Pool(1, 6, (9, 13), 2, 3, 1),
    "cells_of_5": Pool(1, 8, (17, 21), 5, 5, 2),
    "cells_uneven": Pool(1, 10, (5, 9, 13), (2, 1, 5), (3, 2, 6), (1, 0, 2)),
    "cells_1d": Pool(2, 6, (41,), 3, 4, 1),
    # overlapping windows, channels in pairs
    "strips_stride_2": Pool(2, 64, (23, 30), 3, 2, 1),
    "strips_odd_pairs": Pool(1, 34, (12, 13), 3, 2, 1),
    "strips_ceil": Pool(1, 8, (16, 20), 3, 2, 1, ceil_mode=True),
    "strips_one_window": Pool(1, 8, (1, 2), 3, 2, 1),
    "strips_stride_1": Pool(1, 64, (17, 19), 3, 1, 1),
    "strips_wide": Pool(1, 2, (5, 90), 3, 2, 1),
    "strips_of_planes": Pool(1, 4, (3, 9, 8), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "strips_no_padding": Pool(1, 34, (21, 19), 3, 2, 0),
    "strips_uneven_padding": Pool(1, 6, (15, 22), 3, 2, ((0, 1), (1, 0))),
    "strips_odd_channels": Pool(1, 5, (12, 17), 3, 2, 1),
    "strips_odd_channels_stride_1": Pool(2, 3, (9, 8), 2, 1, 0),
    "other_padding": Pool(1, 16, (19, 21), 3, 2, 0),
    # stride 1, whole planes or tiles
    "lines_28": Pool(1, 16, (28, 27), 3, 1, 1),
    "lines_20": Pool(2, 32, (17, 20), 5, 1, 2),
    "lines_7": Pool(3, 16, (7, 5), 3, 1, 1),
    "lines_14_of_planes": Pool(1, 16, (2, 13, 14), (1, 3, 3), 1, (0, 1, 1)),
    "lines_tiles": Pool(1, 16, (30, 53), 3, 1, 1),
    "lines_tiles_5": Pool(1, 16, (43, 25), 5, 1, (2, 1)),
    "lines_tiles_2": Pool(1, 16, (29, 31), 2, 1, 1),
    # cubic windows with stride 1, stacks of planes
    "stacks": Pool(2, 64, (5, 9, 11), 3, 1, 1),
    "stacks_of_8": Pool(1, 32, (8, 7, 28), 3, 1, 1),
    "stacks_with_halo": Pool(1, 34, (11, 6, 5), 3, 1, 1),
    "stacks_of_1": Pool(1, 32, (1, 5, 4), 3, 1, 1),
    "stacks_stride_2": Pool(1, 64, (7, 14, 15), 3, 2, 1),
    "stacks_stride_2_with_halo": Pool(1, 34, (13, 9, 10), 3, 2, 1),
    "stacks_no_padding": Pool(1, 33, (9, 8, 9), 3, 2, 0),
    "stacks_stride_along_d": Pool(1, 64, (10, 6, 7), 3, (3, 1, 1), (1, 0, 1)),
    "stacks_ceil": Pool(1, 32, (6, 12, 12), 3, 2, 0, ceil_mode=True),
    "stacks_ceil_with_halo": Pool(1, 32, (12, 6, 6), 3, 2, 0, ceil_mode=True),
    # any other windows
    "any_9": Pool(1, 16, (21, 33), 9, 1, 4),
    "any_13_beyond_the_input": Pool(2, 5, (9, 7), 13, 1, 6),
    "any_7_stride_2": Pool(1, 18, (40, 23), 7, 2, 3),
    "any_rectangles": Pool(1, 16, (19, 60), (3, 11), (2, 1), (1, 3)),
    "any_dilated": Pool(1, 8, (25, 26), (5, 3), 2, (2, 1), (2, 3)),
    "any_stride_beyond": Pool(1, 8, (25, 26), 3, 5, 1),
    "any_3d_5": Pool(1, 16, (7, 9, 12), 5, 1, 2),
    "any_3d_uneven": Pool(2, 12, (8, 10, 9), (2, 7, 3), (2, 1, 3), (1, 3, 0)),
    "any_ceil": Pool(1, 8, (22, 21), 6, 4, 1, ceil_mode=True),
    # vectors of channels
    "channels_16": Pool(2, 16, (9, 11), 3, 2, 1),
    "channels_24_dilated": Pool(1, 24, (12, 11), 3, 1, 0, 2),
    "channels_32_3d": Pool(1, 32, (4, 5, 6), 3, 2, 1),
}
CASES = [make(name, pool) for name, pool in POOLS.items() for make in (maxpool_fwd, maxpool_bwd)]
IN_PIECES = (
    "strips_stride_2",
    "strips_no_padding",
    "lines_28",
    "lines_tiles_5",
    "stacks_with_halo",
    "stacks_stride_2",
    "stacks_ceil",
    "any_9",
    "any_7_stride_2",
    "any_3d_5",
)
TAKEN = {  # kernels, channels first and last
    "cells": ("pool_cells", "pool_cells"),
    "cells_3d": ("pool_cells", "pool_cells"),
    "cells_no_vectors": ("pool_through_indices", "pool_cells"),
    "cells_smaller": ("pool_through_indices", "pool_cells"),
    "strips_stride_2": ("pool_through_indices", "pool_strips"),
    "strips_wide": ("pool_through_indices", "pool_strips"),
    "strips_of_planes": ("pool_through_indices", "pool_strips"),
    "strips_odd_channels": ("pool_through_indices", "pool_strips"),
    "other_padding": ("pool_through_indices", "pool_strips"),
    "lines_28": ("pool_tiles_through_channels_last", "pool_tiles"),
    "lines_tiles_5": ("pool_tiles_through_channels_last", "pool_tiles"),
    "stacks": ("pool_strips_through_channels_last", "pool_strips"),
    "stacks_stride_2": ("pool_strips_through_channels_last", "pool_strips"),
    "stacks_ceil": ("pool_through_indices", "pool_strips"),
    "any_9": ("pool_through_indices", "pool_through_indices"),
    "any_dilated": ("pool_through_indices", "pool_through_indices"),
    "any_3d_5": ("pool_through_indices", "pool_through_indices"),
}
# In float32, whose copies have twice as many bytes, and vectors half as many elements.
IN_FLOAT32 = TAKEN | {
    "cells_no_vectors": ("pool_cells", "pool_cells"),
    "lines_28": ("pool_through_indices", "pool_tiles"),
    "stacks_stride_2": ("pool_through_indices", "pool_strips"),
}


def _compare(backend: Backend, seed: int, case: Case, dtype: str, *, odd: bool) -> None:
    """Compare with many ties and, if ``odd``, with non-finite values and zeros of both signs."""
    rng = rng_for(seed, case.id, dtype)
    tensors = draw(case, rng, DTYPES[dtype], integers)
    if odd:
        for value in (np.nan, np.nan, np.inf, -np.inf, -0.0):
            places = rng.integers(tensors["input"].size, size=3 + tensors["input"].size // 40)
            tensors["input"].flat[places] = value
    wanted = expected(case.operation, tensors, case.params)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        found = answers(backend, case, tensors, layout)
        check(found, wanted, "exact", f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_backend(backend: Backend, seed: int, case: Case, dtype: str, odd: bool) -> None:
    _compare(backend, seed, case, dtype, odd=odd)


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize("bytes", [1500, 3000], ids="shared memory {}".format)
@pytest.mark.parametrize("name", ["lines_28", "lines_20", "strips_stride_2", "stacks", "any_9"])
def test_emulated_maxima_of_parts_of_planes(
    seed: int, monkeypatch: pytest.MonkeyPatch, name: str, bytes: int
) -> None:
    monkeypatch.setattr(window_box, "MOST_BYTES", bytes)
    case = maxpool_fwd(name, POOLS[name])
    tensors = draw(case, rng_for(seed, name), DTYPES["bfloat16"], with_nans)
    wanted = expected(case.operation, tensors, case.params)
    layout = with_layouts(case.ndim, grouped=False)[-2]
    found = answers(EmulatedBackend(FAMILIES), case, tensors, layout)
    check(found, wanted, "exact", f"seed {seed}, {case.id}")


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_emulated(seed: int, case: Case, odd: bool) -> None:
    _compare(EmulatedBackend(FAMILIES), seed, case, "bfloat16", odd=odd)


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize("name", IN_PIECES)
def test_emulated_pieces_are_the_whole(seed: int, name: str) -> None:
    """Rows of a gradient do not depend on what is computed with them."""
    backend, case = EmulatedBackend(FAMILIES), maxpool_bwd(name, POOLS[name])
    tensors = draw(case, rng_for(seed, name), DTYPES["float32"], normals)
    for layout in with_layouts(case.ndim, grouped=False)[-2:]:
        problem, arrays = problem_and_tensors(case, tensors, layout)
        whole = backend.run(problem, arrays).outputs
        found = run_in_pieces(problem, arrays, 5, lambda p, t: backend.run(p, t).outputs)
        assert_same_bits(found["grad_input"], whole["grad_input"], f"seed {seed}, {name} {layout}")


def _plan(name: str, dtype: str, layout: str) -> CudaPlan:
    case = maxpool_bwd(name, POOLS[name])
    arrays = request_arrays(case, draw(case, rng_for(0), DTYPES[dtype], integers), layout)
    asked = OPERATIONS[case.operation].request
    request = validate(asked, {**arrays, **case.params, "layout": layout})
    return plan_for(problem_from(case.operation, request), H200, FAMILIES)


@pytest.mark.parametrize(("dtype", "taken"), [("bfloat16", TAKEN), ("float32", IN_FLOAT32)])
@pytest.mark.parametrize("name", TAKEN)
def test_a_plan_takes_the_kernel_that_is_made_for_it(
    name: str, dtype: str, taken: dict[str, tuple[str, str]]
) -> None:
    layouts = with_layouts(len(POOLS[name].size), grouped=False)[1:]
    assert tuple(_plan(name, dtype, layout).kernel for layout in layouts) == taken[name]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["any_9", "any_13_beyond_the_input", "any_dilated", "any_3d_5"])
def test_gradients_from_indices_of_stages_are_scattered(name: str, dtype: str) -> None:
    """Channels first, whatever the type of the sums between stages."""
    plan = _plan(name, dtype, with_layouts(len(POOLS[name].size), grouped=False)[1])
    sources = [step.instance.source for step in plan.steps if isinstance(step, Launch)]
    half = len(sources) // 2
    assert sources[half:] == ["pool/window_scatter.cu"] * half
    assert "pool/window_scatter.cu" not in sources[:half]
