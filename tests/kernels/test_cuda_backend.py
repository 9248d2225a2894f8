"""The GPU backend apart from results: pieces, memory, faults and the kernel cache.

Some tests take nearly all of the GPU's memory, so this file runs alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import DeviceOutOfMemory
from convgrad_service.backends.base import Backend
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cuda import compile as compiling
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.problems import Problem, problem_from
from tests.support.kernels.cuda_backends import adds_as_whole
from tests.support.kernels.harness import answers, check
from tests.support.numerics.arrays import DTYPES, Arrays, draw, normals, rng_for
from tests.support.numerics.bounds import assert_same_bits
from tests.support.numerics.cases import (
    FROM_CONV,
    FUSED,
    Case,
    conv_cases,
    maxpool_bwd,
    maxpool_fwd,
    pool_cases,
)
from tests.support.numerics.geometries import Conv, Pool
from tests.support.numerics.large_tensors import LARGE
from tests.support.numerics.oracle import expected

pytestmark = pytest.mark.gpu

CONV = Conv(6, 24, 32, (40, 33), (3, 3), padding=1)
CASES = [
    *(make("conv", CONV) for make in FROM_CONV.values()),
    *(make("2d", Pool(4, 17, (40, 33), 3, 2, 1)) for make in (maxpool_fwd, maxpool_bwd)),
    *(make("3d", Pool(3, 5, (12, 14, 13), 3, 2, 1)) for make in (maxpool_fwd, maxpool_bwd)),
    FUSED[0],
]


@pytest.fixture(scope="module")
def gpu() -> Backend:
    return CudaBackend(poison=True)


def problem_and_tensors(case: Case, seed: int, dtype: str = "float32") -> tuple[Problem, Arrays]:
    tensors = draw(case, rng_for(seed, case.id), DTYPES[dtype], normals)
    request = validate(OPERATIONS[case.operation].request, {**tensors, **case.params})
    return problem_from(case.operation, request), request.tensors()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_larger_than_the_memory(seed: int, gpu: Backend, case: Case) -> None:
    """Run in pieces: equal bits if pieces are concatenated and add in the order of the whole, else
    within the bound."""
    problem, tensors = problem_and_tensors(case, seed)
    small = CudaBackend(memory_limit_bytes=problem.memory_bytes // 2, poison=True)
    outcome = small.run(problem, tensors)
    assert outcome.pieces == small.explain(problem).pieces > 1
    whole = gpu.run(problem, tensors).outputs
    wanted = expected(case.operation, draw_again(case, seed), case.params)
    check(outcome.outputs, wanted, "bounded", case.id)
    for name, array in outcome.outputs.items():
        if name not in ("grad_weight", "grad_bias") and adds_as_whole(gpu, problem, outcome.pieces):
            assert_same_bits(array, whole[name], f"{case.id} {name}")


def draw_again(case: Case, seed: int) -> Arrays:
    return draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)


def test_what_fits_in_no_pieces_is_refused(seed: int) -> None:
    problem, tensors = problem_and_tensors(CASES[0], seed)
    with pytest.raises(DeviceOutOfMemory, match="GPU memory even in"):
        CudaBackend(memory_limit_bytes=2048).run(problem, tensors)


@contextmanager
def held_by_others(left_bytes: int) -> Iterator[None]:
    """Allocate all but about ``left_bytes`` of GPU memory, in blocks because of fragmentation."""
    cupy = pytest.importorskip("cupy")
    runtime = cupy.cuda.runtime
    cupy.get_default_memory_pool().free_all_blocks()
    blocks = []
    try:
        for size in (2**32, 2**30, 2**28, 2**26, 2**24):
            while runtime.memGetInfo()[0] - size >= left_bytes:
                try:
                    blocks.append(runtime.malloc(size))
                except runtime.CUDARuntimeError:
                    break
        yield
    finally:
        for block in blocks:
            runtime.free(block)


def test_memory_that_others_hold(seed: int, gpu: Backend) -> None:
    """Problems run in pieces in the free memory; with almost none, only the request fails."""
    case = FROM_CONV["conv_fwd"]("large", Conv(64, 32, 32, (256, 256), (1, 1)))
    problem, tensors = problem_and_tensors(case, seed)
    whole = gpu.run(problem, tensors)
    with held_by_others(problem.memory_bytes * 3 // 4):
        outcome = gpu.run(problem, tensors)
        assert outcome.pieces > 1
        assert_same_bits(outcome.outputs["output"], whole.outputs["output"], case.id)
    with held_by_others(2**26), pytest.raises(DeviceOutOfMemory):
        gpu.run(problem, tensors)
    again = gpu.run(problem, tensors)
    assert again.pieces == 1
    assert_same_bits(again.outputs["output"], whole.outputs["output"], case.id)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", [*FROM_CONV, "maxpool2d_bwd", "maxpool3d_fwd"])
def test_beside_the_cpu(seed: int, gpu: Backend, operation: str, dtype: str) -> None:
    """The results of both backends are within the same bound of the same reference."""
    cases = pool_cases(operation) if operation.startswith("max") else conv_cases(operation)
    cpu = CpuBackend(threads=2)
    for case in list(cases)[::6]:
        tensors = draw(case, rng_for(seed, case.id), DTYPES[dtype], normals)
        wanted = expected(case.operation, tensors, case.params)
        for backend in (gpu, cpu):
            check(answers(backend, case, tensors), wanted, "bounded", f"{backend.name} {case.id}")


FAULT = """
import dataclasses, sys
import numpy as np
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.arguments import Packed
from convgrad_service.problems import problem_from

x = np.ones((1, 8, 8, 8), np.float32)
fields = {"input": x, "weight": np.ones((8, 8, 1, 1), np.float32)}
request = validate(OPERATIONS["conv_fwd"].request, fields)
problem = problem_from("conv_fwd", request)
backend = CudaBackend()
backend.run(problem, request.tensors())
assert backend.fault is None
fill = Packed.fill
Packed.fill = lambda self, addresses: fill(self, {name: 64 for name in addresses})
for _ in range(2):
    try:
        backend.run(problem, request.tensors())
    except DeviceUnavailable as error:
        print(error)
    Packed.fill = fill
print(backend.fault)
backend.close()
"""


def test_a_fault_is_told_and_remembered() -> None:
    """After an illegal address, every further request in the process fails with that error."""
    ran = subprocess.run(
        [sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120, check=False
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 3, ran.stdout + ran.stderr
    assert "failed: an illegal address" in lines[0]
    assert "failed before: an illegal address" in lines[1]
    assert lines[2].startswith("an illegal address")


def test_kernels_are_compiled_once(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds complete cubins, and a second backend loads them."""
    cache = tmp_path / "cubins"
    # Kernels that ship with the package would not be compiled at all.
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "ahead")
    problem, tensors = problem_and_tensors(CASES[0], seed)
    first = CudaBackend(cache=cache).run(problem, tensors).outputs
    files = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.cubin")}
    assert files
    second = CudaBackend(cache=cache).run(problem, tensors).outputs
    assert {path.name: path.stat().st_mtime_ns for path in cache.glob("*.cubin")} == files
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_a_cache_that_cannot_be_written_is_done_without(seed: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    problem, tensors = problem_and_tensors(CASES[0], seed)
    assert CudaBackend(cache=file / "cubins").run(problem, tensors).outputs


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data", "maxpool2d_fwd"])
def test_more_than_2_to_the_31_elements(gpu: Backend, operation: str) -> None:
    """Offsets are 64-bit: every element of a tensor with 2.2e9 elements is checked."""
    rng = np.random.default_rng(0)
    # Its rows repeat, but not with a period that is a power of two.
    rows = rng.integers(-2, 3, (480, 46_000), np.int8).astype(np.float16)
    plane = np.tile(rows, (100, 1))[None, None]
    weight = np.full((1, 1, 1, 1), 3, np.float16)
    tensors: Arrays = {"input": plane, "weight": weight, "grad_output": plane}
    params = {"kernel_size": 1}
    model = OPERATIONS[operation].request
    given = {k: v for k, v in {**tensors, **params}.items() if k in model.model_fields}
    request = validate(model, given)
    problem = problem_from(operation, request)
    (found,) = gpu.run(problem, request.tensors()).outputs.values()
    factor = np.float16(1 if "pool" in operation else 3)
    for row in range(0, plane.shape[2], len(rows)):
        assert (found[0, 0, row : row + len(rows)] == rows * factor).all(), row


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_kernels_of_few_layers_on_more_than_2_to_the_31_elements(
    seed: int, gpu: Backend, name: str
) -> None:
    """Each layer runs in one piece on its planned kernel; every element is checked."""
    large = LARGE[name]
    small = large.small(seed)
    wanted = expected(large.operation, small, large.case(large.conv).params)
    outcome = gpu.run(*large.problem_and_tensors(large.large(small)))
    assert outcome.pieces == 1
    assert large.kernel in outcome.kernel
    large.check(outcome.outputs, wanted)
