"""The max-pooling kernels below the backend: both of them, tiles, orders, and wrong indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.contract import OPERATIONS, validate
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem, UnsupportedProblem
from convgrad_service.backends.cpu import CpuBackend, max_pool, pool_planes
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans import pooling
from convgrad_service.problems import problem_from
from convgrad_service.problems.formulas import pool_output_size
from convgrad_service.problems.geometry import PoolShape
from tests.support.numerics.arrays import rng_for
from tests.support.numerics.bounds import assert_bounded
from tests.support.numerics.reference_pool import maxpool_bwd, maxpool_fwd

Array = NDArray[Any]
LIBRARY = load()
WORKERS = Workers(2, keep_bytes=1 << 20)


def _pool(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: int = 1,
    channels: int = 19,
) -> PoolShape:
    padding = tuple((min(1, k - 1), min(2, k - 1)) for k in kernel)
    spread = (dilation,) * len(size)
    return PoolShape(
        batch=2, channels=channels, input_size=size, kernel_size=kernel,
        output_size=pool_output_size(size, kernel, stride, padding, spread, ceil_mode=True),
        stride=stride, padding=padding, dilation=spread, ceil_mode=True,
    )  # fmt: skip


POOLS = [
    _pool((17, 22), (3, 3), (2, 2)),
    _pool((17, 22), (2, 3), (3, 4), dilation=2),
    _pool((5, 6), (3, 3), (2, 2), channels=70),
    _pool((13, 41), (4, 2), (1, 1), channels=3),
    _pool((6, 9, 11), (3, 3, 3), (2, 2, 2)),
    _pool((5, 7, 8), (2, 1, 2), (1, 2, 3)),
]


def _ordered(array: Array, last: bool) -> Array:
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1) if last else array


def _values(pool: PoolShape, seed: int) -> Array:
    """Few different values, so that there are ties, with NaN and infinities among them."""
    rng = rng_for(seed, pool)
    x = rng.integers(-2, 3, (pool.batch, pool.channels, *pool.input_size)).astype(np.float32)
    kind = rng.random(x.shape)
    x[kind < 0.05] = np.nan
    x[(kind > 0.05) & (kind < 0.3)] = -np.inf
    x[(kind > 0.9)] = -0.0
    return x


def _reference(pool: PoolShape, x: Array) -> tuple[Array, Array]:
    return maxpool_fwd(
        x, pool.kernel_size, stride=pool.stride, padding=pool.padding, dilation=pool.dilation,
        ceil_mode=True,
    )  # fmt: skip


@pytest.fixture(params=["large tiles", "small tiles", "no planes", "one by one"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole problems in a tile, many tiles, blocks of channels even for channels first; windows."""
    if request.param != "large tiles":
        monkeypatch.setattr(pooling, "BLOCK_BYTES", 6_000)
    if request.param in ("no planes", "one by one"):
        monkeypatch.setattr(pool_planes, "SCRATCH_LIMIT_BYTES", 0)
    if request.param == "one by one":
        monkeypatch.setattr(pooling, "SCRATCH_LIMIT_BYTES", 0)
    pooling.pool_forward_plan.cache_clear()
    pooling.pool_backward_plan.cache_clear()
    pool_planes._described.cache_clear()
    max_pool._prepared_backward.cache_clear()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.geometry_text)
def test_both_ways(seed: int, pool: PoolShape, last: bool) -> None:
    x = _ordered(_values(pool, seed), last)
    wanted, where = _reference(pool, x)
    output = np.full_like(_ordered(np.empty(wanted.shape, np.float32), last), 7)
    indices = np.full_like(output, -7, dtype=np.int64)
    max_pool.forward(LIBRARY, WORKERS, pool, DType.FLOAT32, x, output, indices)
    np.testing.assert_array_equal(output, wanted)
    np.testing.assert_array_equal(indices, where)

    grad = rng_for(seed, pool, "grad").standard_normal(wanted.shape).astype(np.float32)
    ref = maxpool_bwd(grad, where, pool.input_size)
    results = []
    for source in ({"input": x}, {"indices": indices}, {"indices": indices.astype(np.int32)}):
        grad_input = np.full_like(x, np.nan)
        max_pool.backward(
            LIBRARY, WORKERS, pool, DType.FLOAT32, _ordered(grad, last), grad_input, **source
        )
        assert_bounded(grad_input, ref, f"seed {seed}")
        results.append(grad_input)
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("wrong", [-1, 17 * 22, 2**31, 2**40 + 3, -(2**63), "far"])
def test_a_wrong_index_is_named(seed: int, last: bool, wrong: int | str) -> None:
    pool = POOLS[0]
    x = _ordered(_values(pool, seed), last)
    _, where = _reference(pool, x)
    at = tuple(int(rng_for(seed, "at").integers(0, n)) for n in where.shape)
    # Half the plane away: inside the plane, outside the window.
    value = (int(where[at]) + 17 * 11) % (17 * 22) if wrong == "far" else int(wrong)
    where[at] = value
    grad = np.ones(where.shape, np.float32)
    with pytest.raises(InvalidProblem) as refused:
        max_pool.backward(
            LIBRARY, WORKERS, pool, DType.FLOAT32, _ordered(grad, last), np.empty_like(x),
            indices=_ordered(where, last),
        )  # fmt: skip
    assert f"indices{list(at)}" in refused.value.detail
    assert f"is {value}" in refused.value.detail
    assert "expected" in refused.value.detail


def test_windows_that_span_too_much_are_taken_one_by_one() -> None:
    far = _pool((90_000, 90_000), (2, 2), (1, 1), dilation=40_000)
    wide = _pool((300, 2000), (300, 1), (1, 1))
    for pool in (far, wide):
        assert pooling.pool_backward_plan(pool, 64, 16, True, False) is None
    assert pooling.pool_forward_plan(far, 64, 16) is None
    # From indices each row would ask every tap for each phase of its columns.
    one = _pool((3000, 3000), (3000, 3000), (3000, 3000))
    assert pooling.pool_backward_plan(one, 64, 16, False, False) is None
    usual = _pool((112, 112), (3, 3), (2, 2))
    assert pooling.pool_forward_plan(usual, 64, 16) is not None
    assert pooling.pool_backward_plan(usual, 64, 16, True, False) is not None
    assert pooling.pool_backward_plan(usual, 64, 16, False, False) is not None


def test_sums_of_a_plane_that_do_not_fit_are_unsupported() -> None:
    far = _pool((30_000, 30_000), (2, 2), (20_000, 20_000), dilation=20_000)
    x = np.lib.stride_tricks.as_strided(
        np.zeros(1, np.float16), (far.batch, far.channels, *far.input_size), (0, 0, 0, 0)
    )
    grad = np.zeros((far.batch, far.channels, *far.output_size), np.float16)
    with pytest.raises(UnsupportedProblem, match="bytes in sums"):
        max_pool.backward(LIBRARY, WORKERS, far, DType.FLOAT16, grad, x, input=x)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_dry_run_checks_no_indices(layout: str) -> None:
    shape, size = ([1, 3, 3, 16], [5, 6]) if layout == "NHWC" else ([1, 16, 3, 3], [5, 6])
    grad = np.ones(shape, np.float32)
    request = validate(
        OPERATIONS["maxpool2d_bwd"].request,
        {
            "grad_output": grad, "indices": np.zeros(shape, np.int64), "kernel_size": (2, 2),
            "stride": (2, 2), "padding": (1, 0), "layout": layout, "input_size": size,
        },
    )  # fmt: skip
    plan = CpuBackend(threads=1).explain(problem_from("maxpool2d_bwd", request))
    assert plan.kernel.startswith("max_pool_bwd_from_indices")
