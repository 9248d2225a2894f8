"""Problems of cases, and what must hold for every plan."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.core.tensor_maps import MappedArguments
from convgrad_service.backends.cuda.memory import arena_of
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import (
    ALIGNMENT,
    ZEROS,
    Arguments,
    Clear,
    CudaPlan,
    Instance,
)
from convgrad_service.problems import Problem
from tests.emulator.maps import encode
from tests.support.kernels.harness import problem_and_tensors
from tests.support.numerics.arrays import DTYPES
from tests.support.numerics.cases import (
    Case,
)
from tests.support.numerics.strategies import zeros


def problem_of(case: Case, dtype: str = "float32", layout: str | None = None) -> Problem:
    problem, _ = problem_and_tensors(case, zeros(case, DTYPES[dtype]), layout)
    return problem


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


def _filled(arguments: Arguments, addresses: dict[str, int]) -> bytearray:
    """Without a driver, which would encode tensor maps."""
    if isinstance(arguments, MappedArguments):
        return arguments.fill_by(encode, addresses)
    return arguments.fill(addresses)
