"""Splitting a problem does not change its result, and bounds memory beyond inputs and outputs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.plans import cpu_dense_parts
from convgrad_service.plans.cpu import choose
from convgrad_service.problems import run_in_pieces
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.cuda_backends import adds_as_whole
from tests.support.kernels.harness import (
    answers,
    check,
    drawn,
    problem_and_tensors,
    run,
    with_layouts,
)
from tests.support.numerics.arrays import DTYPES, draw, normals, rng_for
from tests.support.numerics.bounds import assert_bounded, assert_same_bits
from tests.support.numerics.cases import (
    EPILOGUES,
    FROM_CONV,
    FROM_CONV3D,
    FUSED,
    Case,
    conv_cases,
    maxpool_bwd,
    maxpool_fwd,
    pool_cases,
)
from tests.support.numerics.geometries import POOLS, Conv
from tests.support.numerics.larger_cases import LARGER
from tests.support.numerics.oracle import expected
from tests.support.numerics.reference import Reference

NAMES = (
    "plain",
    "batch_5",
    "stride_beyond_kernel",
    "stride_shares_factor_with_dilation",
    "rows_past_the_last_window",
    "asymmetric_padding",
    "padding_beyond_the_kernel",
    "output_extent_1",
    "channels_67",
    "depthwise",
    "groups_4",
    "1d_causal",
    "1d_stride_shares_factor_with_dilation",
    "3d_plain",
    "3d_rows_past_the_last_window",
)
OPERATIONS_OF_CONV = (*FROM_CONV, *FROM_CONV3D)
CASES = [
    *(case for op in OPERATIONS_OF_CONV for case in conv_cases(op) if case.name in NAMES),
    *(
        case
        for n in (1, 2, 3)
        for way in ("fwd", "bwd")
        for case in pool_cases(f"maxpool{n}d_{way}")
    ),
    *FUSED,
    *(case for case in EPILOGUES if case.name.endswith("bilinear")),
]
# Pieces of these are partial sums over the batch, so their total may differ from the whole.
SUMMED = ("grad_weight", "grad_bias")


def check_sum(found: NDArray[Any], reference: Reference, parts: int, what: str) -> None:
    """Check a sum of pieces, whose bound includes the additions of the pieces."""
    longer = Reference(reference.value, reference.magnitude, reference.terms + parts)
    assert_bounded(found, longer, what)


@pytest.mark.parametrize("parts", [2, 3, 8, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_pieces_are_the_whole(backend: Backend, seed: int, case: Case, parts: int) -> None:
    """Equal bits if pieces are concatenated and add in the order of the whole, else within the
    bound."""
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)
    wanted = expected(case.operation, tensors, case.params)
    layouts = [None] if "backprop" in case.operation else with_layouts(case.ndim, grouped=False)
    for layout in layouts[-2:]:
        problem, arrays = problem_and_tensors(case, tensors, layout)
        whole = backend.run(problem, arrays).outputs
        found = run_in_pieces(problem, arrays, parts, lambda p, t: backend.run(p, t).outputs)
        assert set(found) == set(whole)
        same_order = adds_as_whole(backend, problem, parts)
        for name, array in found.items():
            what = f"seed {seed}, {case.id} {layout} {name} in {parts} parts"
            reference = wanted[name]
            if name in SUMMED and layout is None and isinstance(reference, Reference):
                check_sum(array, reference, parts, what)
            elif name not in SUMMED and same_order:
                assert_same_bits(array, whole[name], what)
        if not same_order and (layout is None or layout.startswith("NC")):
            joined = {name: array for name, array in found.items() if name not in SUMMED}
            within = {name: wanted[name] for name in joined}
            check(joined, within, "bounded", f"seed {seed}, {case.id} in {parts} parts")


@pytest.mark.parametrize("parts", [2, 3, 8, 1000])
@pytest.mark.parametrize("name", POOLS)
def test_pieces_of_a_pooling_from_indices(
    backend: Backend, seed: int, name: str, parts: int
) -> None:
    check_pieces_from_indices(backend, seed, name, parts)


@pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")
@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("name", ["overlapping", "stride_1", "ceil_padded", "1d_overlapping"])
def test_emulated_pieces_from_indices(seed: int, name: str, parts: int) -> None:
    check_pieces_from_indices(EmulatedBackend(FAMILIES), seed, name, parts)


def check_pieces_from_indices(backend: Backend, seed: int, name: str, parts: int) -> None:
    """The indices of a piece are relative to its own rows."""
    pool = POOLS[name]
    tensors = draw(maxpool_bwd(name, pool), rng_for(seed, name), DTYPES["float32"], normals)
    forward, arrays = problem_and_tensors(
        maxpool_fwd(name, pool), {"input": tensors["input"]}, None
    )
    indices = backend.run(forward, arrays).outputs["indices"]
    case = maxpool_bwd(name, pool).with_params("indices", input_size=pool.size)
    for width in (np.int32, np.int64):
        given = {"grad_output": tensors["grad_output"], "indices": indices.astype(width)}
        problem, arrays = problem_and_tensors(case, given, None)
        whole = backend.run(problem, arrays).outputs["grad_input"]
        found = run_in_pieces(problem, arrays, parts, lambda p, t: backend.run(p, t).outputs)
        assert_same_bits(found["grad_input"], whole, f"seed {seed}, {name} in {parts} parts")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_pieces_cover_every_output_once(case: Case) -> None:
    """Every element once, even if more parts are requested than the problem can have."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in case.shapes.items()}
    problem, _ = problem_and_tensors(case, tensors, None)
    for parts in (1, 2, 5, 10_000):
        pieces = problem.split(parts)
        for name, spec in problem.outputs.items():
            count = np.zeros(spec.shape, np.int64)
            # With several outputs, a piece may compute only one of them.
            computing = [piece for piece in pieces if name in piece.outputs]
            for piece in computing:
                if piece.combine[name] == "sum":
                    assert count[piece.outputs[name]].shape == spec.shape
                    continue
                count[piece.outputs[name]] += 1
            summed = {piece.combine[name] == "sum" for piece in computing}
            assert summed == {True} or (count == 1).all(), f"{case.id} {name} {parts}"


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[CpuBackend]:
    """A backend for which all tiles of the dense kernels are too large."""
    choose.cache_clear()
    monkeypatch.setattr(cpu_dense_parts, "PANEL_LIMIT_BYTES", 0)
    yield CpuBackend(threads=2)
    choose.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGER, ids=lambda case: case.id)
def test_where_no_tile_is_small_enough(
    seed: int, direct: CpuBackend, case: Case, dtype: str
) -> None:
    """The direct kernels, which need no workspace, give correct results."""
    tensors, wanted = drawn(seed, case, dtype, "bounded")
    check(answers(direct, case, tensors), wanted, "bounded", f"seed {seed}, {case.id} {dtype}")


@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data", "grouped_conv_bwd_weight"])
def test_less_work_memory_means_more_pieces_and_the_same_bits(seed: int, operation: str) -> None:
    wide = Conv(2, 512, 512, (14, 14), (3, 3), padding=1)
    case = FROM_CONV[operation]("wide", wide)
    tensors = draw(case, rng_for(seed, case.id), DTYPES["float32"], normals)
    roomy, tight = CpuBackend(threads=2), CpuBackend(threads=2, workspace_limit_bytes=8 * 2**20)
    whole, found = (run(one, operation, tensors, case.params) for one in (roomy, tight))
    assert whole.pieces == 1
    assert found.pieces > 1
    for name, array in whole.outputs.items():
        assert_same_bits(found.outputs[name], array, f"seed {seed}, {operation} {name}")


PROBE = """
import numpy as np, re, sys
from pathlib import Path
from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.problems import problem_from

def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def problem(n, size):
    x = np.ones((n, 32, size, size), np.float32)
    fields = {"input": x, "grad_output": x, "weight": np.ones((32, 32, 3, 3), np.float32)}
    fields["weight_size"], fields["kernel_size"] = (3, 3), 3
    model = OPERATIONS[sys.argv[1]].request
    fields = {k: v for k, v in fields.items() if k in model.model_fields}
    if "maxpool" in sys.argv[1]:
        fields["stride"] = 1
    request = validate(model, {**fields, "padding": 1})
    return problem_from(sys.argv[1], request), request.tensors()

backend = CpuBackend(threads=2, workspace_limit_bytes=int(sys.argv[2]))
backend.run(*problem(1, 8))
stated, tensors = problem(8, 128)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
outcome = backend.run(stated, tensors)
made = sum(array.nbytes for array in outcome.outputs.values())
print(status("VmHWM") - before - made, outcome.workspace_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "operation",
    [
        "conv_fwd",
        "conv_bwd_data",
        "grouped_conv_bwd_weight",
        "conv_backward",
        "maxpool2d_fwd",
        "maxpool2d_bwd",
    ],
)
def test_memory_beyond_inputs_and_outputs_is_bounded(operation: str) -> None:
    """The im2col matrix of this problem would take 150 MiB; the limit is 16 MiB."""
    limit = 16 * 2**20
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, operation, str(limit)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    beyond, said = map(int, ran.stdout.split())
    # The allowance covers thread stacks and the allocator's rounding.
    assert beyond <= limit + 8 * 2**20, f"{beyond} bytes beyond inputs and outputs"
    assert said <= limit
