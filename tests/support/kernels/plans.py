"""Problems of cases, and what must hold for every plan."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from convgrad.contract import OPERATIONS
from convgrad.contract.base import validate
from convgrad_service.backends.cuda.arguments import Packed
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.core.tensor_maps import MappedArguments
from convgrad_service.backends.cuda.kernels.layout.transpose import (
    RowCopyArgs,
    RowPackArgs,
    TransposeArgs,
)
from convgrad_service.backends.cuda.memory import arena_of
from convgrad_service.backends.cuda.sources import KERNELS, included
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import (
    ALIGNMENT,
    ZEROS,
    Arguments,
    Clear,
    CudaPlan,
    Instance,
    Launch,
)
from convgrad_service.problems import Problem, problem_from
from tests.emulator.maps import encode
from tests.support.kernels.harness import problem_and_tensors
from tests.support.numerics.arrays import DTYPES, LAYOUTS
from tests.support.numerics.cases import (
    Case,
)
from tests.support.numerics.strategies import zeros


def problem_of(case: Case, dtype: str = "float32", layout: str | None = None) -> Problem:
    problem, _ = problem_and_tensors(case, zeros(case, DTYPES[dtype]), layout)
    return problem


def large_problem_of(case: Case, dtype: str, *, last: bool) -> Problem:
    """A problem whose arrays take no memory, with its channels first or last."""
    arrays = {
        name: np.broadcast_to(np.zeros((), DTYPES[dtype]), shape)
        for name, shape in case.shapes.items()
    }
    params = dict(case.params)
    if last:
        params["layout"] = LAYOUTS[case.ndim][1]
        arrays = {
            name: np.moveaxis(array, 1, -1) if array.ndim > 1 else array
            for name, array in arrays.items()
        }
    request = validate(OPERATIONS[case.operation].request, {**arrays, **params})
    return problem_from(case.operation, request)


@lru_cache(maxsize=1)
def every_instance() -> frozenset[Instance]:
    return frozenset(FAMILIES.instances())


def check_plan(plan: CudaPlan, problem: Problem, device: CudaDevice) -> None:
    """Buffers are named once, lie apart, and every launch is one that the device can take."""
    arena = arena_of(problem, plan)
    names = [*problem.inputs, *problem.outputs, *(w.name for w in plan.workspace)]
    assert sorted(arena.offsets) == sorted(names)
    assert len(set(names)) == len(names)
    sizes = {name: spec.size_bytes for name, spec in (*problem.inputs.items(),)}
    sizes |= {name: spec.size_bytes for name, spec in problem.outputs.items()}
    sizes |= {item.name: item.size_bytes for item in plan.workspace}
    places = sorted((offset, offset + sizes[name]) for name, offset in arena.offsets.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert all(start % ALIGNMENT == 0 for start, _ in places)
    assert places[-1][1] <= arena.size_bytes
    checks = [arena.offsets[check.buffer] for check in plan.checks]
    assert all(arena.input_bytes <= offset < arena.returned_bytes for offset in checks)

    _check_overlaps(plan, problem)
    compiled = every_instance()
    names = (*arena.offsets, ZEROS)
    addresses = {name: (index + 1) << 40 for index, name in enumerate(names)}
    assert plan.steps
    for step in plan.steps:
        if isinstance(step, Clear):
            assert step.size_bytes <= sizes[step.buffer]
            continue
        assert step.instance in compiled
        assert step.instance.runs_on(device)
        x, y, z = step.grid
        assert 0 < x < 2**31
        assert 0 < y < 2**16
        assert 0 < z < 2**16
        assert 0 < np.prod(step.block) <= 1024
        assert step.shared_bytes <= device.shared_bytes_per_block
        assert 0 < len(_filled(step.arguments, addresses)) <= 4096


PDL = "ptx/pdl.cuh"
COPIES = {
    "row_copy": RowCopyArgs,
    "row_pack": RowPackArgs,
    **dict.fromkeys(("transpose", "transpose_planes", "transpose_runs"), TransposeArgs),
}


def _check_overlaps(plan: CudaPlan, problem: Problem) -> None:
    """A launch that overlaps others waits for them, unless it is a copy of what they do not use."""
    # The buffers of launches that may be running; they may all read an input.
    used: set[str] = set()
    for index, step in enumerate(plan.steps):
        if isinstance(step, Clear):
            used = {step.buffer}
            continue
        buffers = set(step.arguments.buffers) - set(problem.inputs) - {ZEROS}
        if not step.overlaps:
            used = set()
        else:
            assert index > 0
            assert _can_wait(step.instance.source), step.instance
            early = set() if _waits(step) else buffers & used
            assert not early, f"{step.instance.name} does not wait for {early}"
        used |= buffers


@lru_cache(maxsize=256)
def _can_wait(source: str) -> bool:
    texts = ((KERNELS / name).read_text() for name in included(source) if name != PDL)
    return any("wait_on_dependent_grids()" in text for text in texts)


def _waits(step: Launch) -> bool:
    """Whether a launch that overlaps others waits for them before it reads anything."""
    structure = COPIES.get(step.instance.entry)
    if structure is None:
        return True
    assert isinstance(step.arguments, Packed)
    return bool(structure.from_buffer_copy(step.arguments.template).follows)


def _filled(arguments: Arguments, addresses: dict[str, int]) -> bytearray:
    """Without a driver, which would encode tensor maps."""
    if isinstance(arguments, MappedArguments):
        return arguments.fill_by(encode, addresses)
    return arguments.fill(addresses)
