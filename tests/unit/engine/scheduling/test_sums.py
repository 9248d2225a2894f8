"""Sums over parts: partial sums in any order give the same bits."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.engine.memory import tensor_layout as parts
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import (
    TensorLayout,
    tensor_layout_of,
)
from convgrad_service.engine.scheduling.job import Job, count_tasks
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.workers.worker import run_job
from convgrad_service.problems import Problem, problem_from, run_in_pieces
from tests.support.numerics import strategies
from tests.support.numerics.arrays import DTYPES, Arrays, draw, integers, normals, rng_for
from tests.support.numerics.bounds import assert_bounded, assert_exact, assert_same_bits
from tests.support.numerics.cases import EPILOGUES, FROM_CONV, Case
from tests.support.numerics.oracle import expected
from tests.support.numerics.reference import Reference
from tests.support.split_sums import BACKWARD, FIELDS, GRAD, IMAGES, problem

BACKEND = CpuBackend(threads=1)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
WEIGHT_EPILOGUES = [case for case in EPILOGUES if "bwd_weight" in case.operation]


def stated(case: Case, tensors: Arrays, **more: Any) -> Problem:
    request = validate(OPERATIONS[case.operation].request, {**tensors, **case.params, **more})
    return problem_from(case.operation, request)


def computed(layout: TensorLayout, tensors: Arrays, order: list[int] | None) -> Arrays:
    """Run a job's parts in this order and add them up; with None, run it as a single task."""
    arena = Arena.create(max(4096, layout.size_bytes))
    segments = RegionMappings(BACKEND)
    try:
        for name, spec, offset, _ in layout.inputs:
            assert offset is not None
            arena.array(offset, spec)[...] = tensors[name]
        job = Job(layout, 0, (), count_tasks(layout, ()))
        last = [job.tasks] if job.sums else []
        for part in [None] if order is None else [*order, *last]:
            run_job(BACKEND, arena, segments, job, threading.Event(), part)
        return {
            name: arena.array(offset, spec).copy()
            for name, spec, offset, _ in layout.outputs
            if offset is not None
        }
    finally:
        arena.close()


@given(
    strategies.convs(),
    st.sampled_from(["grouped_conv_bwd_weight", "conv_backward"]),
    st.integers(2, 9),
    st.sampled_from(sorted(DTYPES)),
    st.randoms(use_true_random=False),
)
@QUICK
def test_partial_sums_match_the_reference_in_any_order(
    conv: Any, operation: str, count: int, dtype: str, shuffled: random.Random
) -> None:
    case = FROM_CONV[operation]("random", conv)
    for numbers, gate in ((normals, assert_bounded), (integers, assert_exact)):
        tensors = draw(case, rng_for(0, case.id), DTYPES[dtype], numbers)
        cut = stated(case, tensors)
        layout = tensor_layout_of(cut, (), count)
        pieces = parts.pieces_of(cut, count)
        if len(pieces) == 1:
            return
        order = list(range(len(pieces)))
        shuffled.shuffle(order)
        found = computed(layout, tensors, order)
        wanted = run_in_pieces(cut, tensors, count, lambda p, t: BACKEND.run(p, t).outputs)
        alone = computed(layout, tensors, None)
        answer = expected(operation, tensors, case.params)
        assert found.keys() == cut.outputs.keys() == alone.keys()
        for name, array in found.items():
            reference = answer[name]
            assert isinstance(reference, Reference)
            longer = Reference(reference.value, reference.magnitude, reference.terms + count)
            gate(array, longer, name)
            assert_same_bits(array, wanted[name], name)
            assert_same_bits(array, alone[name], name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WEIGHT_EPILOGUES, ids=lambda case: case.id)
def test_the_epilogue_applies_once_to_the_whole_sum(seed: int, case: Case, dtype: str) -> None:
    for numbers, gate in ((normals, assert_bounded), (integers, assert_exact)):
        tensors = draw(case, rng_for(seed, case.id), DTYPES[dtype], numbers)
        cut = stated(case, tensors)
        layout = tensor_layout_of(cut, (), 3)
        order = list(range(len(parts.pieces_of(cut, 3))))
        found = computed(layout, tensors, order)
        reference = expected(case.operation, tensors, case.params)["grad_weight"]
        assert isinstance(reference, Reference)
        longer = Reference(reference.value, reference.magnitude, reference.terms + 4)
        gate(found["grad_weight"], longer, case.id)


def test_sums_of_16_bit_outputs_round_once() -> None:
    """Adding ones to 256 in bfloat16 one at a time would stay at 256."""
    bf16 = DTYPES["bfloat16"]
    fields = {
        "input": np.ones((4, 1, 1), bf16),
        "grad_output": np.array([256, 1, 1, 1]).astype(bf16).reshape(4, 1, 1),
        "weight_size": (1,),
    }
    cut = problem("grouped_conv_bwd_weight", **fields)
    tensors = {name: fields[name] for name in ("input", "grad_output")}
    found = computed(tensor_layout_of(cut, (), 4), tensors, [3, 1, 0, 2])  # type: ignore[arg-type]
    assert float(found["grad_weight"].item()) == 260  # 259, rounded to even


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_non_finite_values_propagate(dtype: str) -> None:
    images, grad = IMAGES.astype(dtype), np.abs(GRAD).astype(dtype) + DTYPES[dtype].type(0.1)
    images[:, 0] = 1
    images[0, 0, 7, 7], images[23, 0, 7, 7] = np.inf, -np.inf  # in different parts
    images[:, 1] = 0
    images[5, 1, 7, 7] = np.inf
    cut = problem(
        "grouped_conv_bwd_weight", input=images, grad_output=grad, weight_size=(3, 3), padding=1
    )
    tensors = {"input": images, "grad_output": grad}
    found = computed(tensor_layout_of(cut, (), 3), tensors, [2, 0, 1])["grad_weight"]
    assert np.isnan(found[:, 0]).all()
    assert np.isposinf(found[:, 1]).all()
    assert np.isfinite(found[:, 2]).all()


def test_float16_overflow_is_infinity() -> None:
    ones = np.full((8, 1, 16, 16), 8, np.float16)
    cut = problem("grouped_conv_bwd_weight", input=ones, grad_output=ones, weight_size=(1, 1))
    tensors = {"input": ones, "grad_output": ones}
    found = computed(tensor_layout_of(cut, (), 8), tensors, list(range(8)))["grad_weight"]
    assert np.isposinf(found).all()  # 131,072, from parts of at most 16,384


@pytest.mark.usefixtures("small_parts")
def test_sums_are_split_only_if_it_saves_time() -> None:
    assert parts.count_parts(problem()) == 4
    assert parts.count_parts(problem("conv_backward", **BACKWARD)) > 2
    wide = {**FIELDS, "grad_output": np.zeros((24, 4, 8, 8), np.float32), "weight_size": (9, 9)}
    few = {**FIELDS, "input": IMAGES[:2], "grad_output": GRAD[:2]}
    split_k = {**FIELDS, "split_k": 2}
    for fields in ({**wide, "stride": 1}, few, split_k):
        assert parts.count_parts(problem("grouped_conv_bwd_weight", **fields)) == 1


@pytest.mark.usefixtures("small_parts")
def test_other_processes_use_the_layouts_number_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = tensor_layout_of(problem())
    monkeypatch.setattr(parts, "PART_BYTES", 2**30)
    tensor_layout_of.cache_clear()
    found = original.packed
    assert tensor_layout_of(problem()).parts == 1
    from convgrad_service.engine.memory.tensor_layout import unpack_layout

    unpacked = unpack_layout(found)
    assert unpacked.parts == original.parts == 4
    assert unpacked.partial_sums == original.partial_sums
    assert unpacked.size_bytes == original.size_bytes
