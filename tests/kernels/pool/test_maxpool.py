"""Max pooling forward and backward: maxima, ties, NaNs, valid and invalid indices."""

from __future__ import annotations

import numpy as np
import pytest

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check, run, with_layouts
from tests.support.numerics.arrays import (
    DTYPES,
    draw,
    integers,
    normals,
    request_arrays,
    rng_for,
)
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import Case, maxpool_bwd, pool_cases
from tests.support.numerics.geometries import POOLS
from tests.support.numerics.oracle import expected
from tests.support.numerics.pool_inputs import bad_indices, sources, with_nans

FORWARD = [case for n in (1, 2, 3) for case in pool_cases(f"maxpool{n}d_fwd")]
BACKWARD = [case for n in (1, 2, 3) for case in pool_cases(f"maxpool{n}d_bwd")]


INPUTS = {"ties": integers, "normals": normals, "nans": with_nans}


@pytest.mark.parametrize("numbers", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case.id)
def test_forward(backend: Backend, seed: int, case: Case, dtype: str, numbers: str) -> None:
    tensors = draw(case, rng_for(seed, case.id, numbers), DTYPES[dtype], INPUTS[numbers])
    wanted = expected(case.operation, tensors, case.params)
    for layout in with_layouts(case.ndim, grouped=False):
        found = answers(backend, case, tensors, layout)
        assert found["indices"].dtype == np.int64
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype} {layout}")


@pytest.mark.parametrize("numbers", INPUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", BACKWARD, ids=lambda case: case.id)
def test_backward(backend: Backend, seed: int, case: Case, dtype: str, numbers: str) -> None:
    rng = rng_for(seed, case.id, numbers)
    tensors = draw(case, rng, DTYPES[dtype], INPUTS[numbers])
    for gate, grads in (("exact", integers), ("bounded", normals)):
        tensors["grad_output"] = grads(rng, case.shapes["grad_output"], DTYPES[dtype])
        wanted = expected(case.operation, tensors, case.params)
        for source, (asked, given) in sources(case, tensors).items():
            for layout in with_layouts(case.ndim, grouped=False):
                what = f"seed {seed}, {case.id} {dtype} {layout} from {source}"
                check(answers(backend, asked, given, layout), wanted, gate, what)


def test_a_maximum_keeps_its_bits(backend: Backend, seed: int) -> None:
    """The output is the element at the index, with its sign of zero and NaN payload."""
    for case in FORWARD:
        for dtype in DTYPES.values():
            rng = rng_for(seed, case.id, dtype.name)
            bits = rng.integers(0, 256, (*case.shapes["input"], dtype.itemsize), np.uint8)
            array = bits.view(dtype).reshape(case.shapes["input"])
            # Kernels may quieten a signalling NaN. Zeros of both signs remain, as ties.
            with np.errstate(invalid="ignore"):
                array[np.isnan(array)] = np.nan
            array[rng.random(array.shape) < 0.5] = -0.0
            array[rng.random(array.shape) < 0.3] = 0.0
            found = answers(backend, case, {"input": array})
            planes = array.reshape(*array.shape[:2], -1)
            flat = found["indices"].reshape(*array.shape[:2], -1)
            named = np.take_along_axis(planes, flat, axis=2).reshape(found["output"].shape)
            assert_same_bits(found["output"], named, f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("return_indices", [False, True])
def test_forward_with_narrow_indices_or_none(
    backend: Backend, seed: int, return_indices: bool
) -> None:
    for case in FORWARD[::4]:
        tensors = draw(case, rng_for(seed, case.id), DTYPES["bfloat16"], integers)
        wanted = expected(case.operation, tensors, case.params)
        if not return_indices:
            del wanted["indices"]
        asked = case.with_params("n", index_dtype="int32", return_indices=return_indices)
        found = answers(backend, asked, tensors)
        assert not return_indices or found["indices"].dtype == np.int32
        check(found, wanted, "bounded", asked.id)


def test_a_nan_gradient_reaches_its_maximum_alone(backend: Backend, seed: int) -> None:
    case = maxpool_bwd("overlapping", POOLS["overlapping"])
    rng = rng_for(seed, "nan gradients")
    for dtype in DTYPES.values():
        tensors = draw(case, rng, dtype, normals)
        tensors["grad_output"] = with_nans(rng, case.shapes["grad_output"], dtype)
        wanted = expected(case.operation, tensors, case.params)
        for asked, given in sources(case, tensors).values():
            check(answers(backend, asked, given), wanted, "bounded", f"seed {seed}")


@pytest.mark.parametrize("width", [np.int32, np.int64])
@pytest.mark.parametrize("layout", [None, "last"])
@pytest.mark.parametrize("name", ["overlapping", "plain", "gaps", "3d_overlapping", "3d_plain"])
def test_indices_that_point_elsewhere_are_refused(
    backend: Backend, seed: int, name: str, layout: str | None, width: type[np.generic]
) -> None:
    case = maxpool_bwd(name, POOLS[name])
    rng = rng_for(seed, name)
    tensors = draw(case, rng, DTYPES["float32"], normals)
    (asked, given) = sources(case, tensors)[np.dtype(width).name]
    used = layout and with_layouts(case.ndim, grouped=False)[-1]
    params = asked.params if used is None else {**asked.params, "layout": used}
    for indices in bad_indices(rng, case, given["indices"]).values():
        arrays = request_arrays(asked, {**given, "indices": indices.astype(width)}, used)
        with pytest.raises(InvalidProblem, match=r"(?i)ind(ex|ices)"):
            run(backend, case.operation, arrays, params)


def test_an_index_between_the_taps_of_a_dilated_window_is_refused(backend: Backend) -> None:
    grad = np.ones((1, 1, 1, 1), np.float32)
    params = {"kernel_size": 2, "dilation": 2, "input_size": (3, 3)}
    for index in range(9):
        arrays = {"grad_output": grad, "indices": np.full(grad.shape, index)}
        if index in (0, 2, 6, 8):
            out = run(backend, "maxpool2d_bwd", arrays, params).outputs["grad_input"]
            assert out.sum() == out.flat[index] == 1
        else:
            with pytest.raises(InvalidProblem):
                run(backend, "maxpool2d_bwd", arrays, params)
