"""Equal bits for any concurrent load, number of threads, and alignment of arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cpu import CpuBackend
from tests.support.kernels.harness import answers, check, drawn, run
from tests.support.numerics.arrays import DTYPES, Arrays, draw, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import (
    Case,
    maxpool_fwd,
)
from tests.support.numerics.geometries import POOLS
from tests.support.numerics.larger_cases import LARGER


def assert_same(found: Arrays, wanted: Arrays, what: str) -> None:
    for name, array in wanted.items():
        assert_same_bits(found[name], array, f"{what} {name}")


def tensors_of(seed: int, case: Case, dtype: str) -> Arrays:
    return draw(case, rng_for(seed, case.id, dtype), DTYPES[dtype], normals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.id)
def test_ten_runs_and_other_thread_counts(
    backend: Backend, seed: int, case: Case, dtype: str
) -> None:
    tensors = tensors_of(seed, case, dtype)
    first = answers(backend, case, tensors)
    for again in range(9):
        assert_same(answers(backend, case, tensors), first, f"seed {seed}, run {again + 2}")
    if isinstance(backend, CpuBackend):
        for threads in (1, 3):
            found = answers(CpuBackend(threads=threads), case, tensors)
            assert_same(found, first, f"seed {seed}, {threads} threads")


def test_requests_side_by_side_do_not_touch_each_other(backend: Backend, seed: int) -> None:
    """Eight threads, each with its own case, share a backend."""
    work = [(case, tensors_of(seed, case, "float32")) for case in LARGER[::4][:8]]
    alone = [answers(backend, case, tensors) for case, tensors in work]
    failures: list[str] = []

    def repeat(index: int) -> None:
        case, tensors = work[index]
        for _ in range(5):
            try:
                assert_same(answers(backend, case, tensors), alone[index], case.id)
            except AssertionError as error:
                failures.append(str(error))

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def at_odd_address(array: NDArray[Any]) -> NDArray[Any]:
    """Copy to an address that is not aligned to the item size, as in a request body."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = (1 - room.ctypes.data) % 64
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert view.ctypes.data % 64 == 1
    return view


def at_item_address(array: NDArray[Any]) -> NDArray[Any]:
    """Copy to an address that is aligned to the item size only."""
    room = np.empty(array.nbytes + 128, np.uint8)
    start = (array.itemsize - room.ctypes.data) % 64
    view = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def every_second(array: NDArray[Any]) -> NDArray[Any]:
    """Return an equal view with gaps in its last dimension."""
    room = np.empty((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    room[..., ::2] = array
    return room[..., ::2]


PLACES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "odd address": at_odd_address,
    "item address": at_item_address,
    "read-only": read_only,
}
# With other strides, a kernel may sum in another order.
STRIDES: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "column-major": np.asfortranarray,
    "with gaps": every_second,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wherever_the_arrays_lie(backend: Backend, seed: int, dtype: str, place: str) -> None:
    """The results have the same bits, and the inputs are not modified."""
    for case in LARGER:
        tensors = tensors_of(seed, case, dtype)
        wanted = run(backend, case.operation, tensors, case.params).outputs
        moved = {name: PLACES[place](array) for name, array in tensors.items()}
        found = run(backend, case.operation, moved, case.params).outputs
        assert_same(found, wanted, f"seed {seed}, {case.id}")
        assert_same(moved, tensors, f"seed {seed}, {case.id}: the input")


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_with_other_strides(backend: Backend, seed: int, dtype: str, strides: str) -> None:
    for case in LARGER[::2]:
        tensors, wanted = drawn(seed, case, dtype, "bounded")
        moved = {name: STRIDES[strides](array) for name, array in tensors.items()}
        found = run(backend, case.operation, moved, case.params).outputs
        check(found, wanted, "bounded", f"seed {seed}, {case.id} {dtype}")
        assert_same(moved, tensors, f"seed {seed}, {case.id}: the input")


def test_pooling_reads_odd_indices(backend: Backend, seed: int) -> None:
    """Indices may be at an unaligned address."""
    pool = POOLS["overlapping"]
    tensors = tensors_of(seed, maxpool_fwd("", pool), "float32")
    found = answers(backend, maxpool_fwd("", pool), tensors)
    given = {"grad_output": found["output"], "indices": at_odd_address(found["indices"])}
    params = {**pool.params, "input_size": pool.size}
    odd = run(backend, "maxpool2d_bwd", given, params).outputs
    given["indices"] = found["indices"]
    assert_same(odd, run(backend, "maxpool2d_bwd", given, params).outputs, "grad_input")
