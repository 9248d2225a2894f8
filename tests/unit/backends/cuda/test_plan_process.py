"""Plans made in another process equal those made in this one; that process may be killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.plan_process import PlanProcess
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.planner import plan_for
from convgrad_service.problems import Problem, problem_from
from tests.support.numerics.cases import FUSED, PASSES, Case, pool_cases
from tests.support.tree_server import alive, until


def problem_of(case: Case) -> Problem:
    tensors = {name: np.ones(shape, np.float16) for name, shape in case.shapes.items()}
    fields = {**tensors, **case.params}
    return problem_from(case.operation, validate(OPERATIONS[case.operation].request, fields))


PROBLEMS = [problem_of(case) for case in (*PASSES, *FUSED, *pool_cases("maxpool2d_fwd"))]


@pytest.fixture
def planner() -> PlanProcess:
    return PlanProcess(H200)


def process_of(planner: PlanProcess) -> int:
    return planner._running[0].pid


def test_plans_are_those_made_here(planner: PlanProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        for problem, plan in zip(PROBLEMS, pool.map(planner.plan, PROBLEMS), strict=True):
            assert plan == plan_for(problem, H200, FAMILIES)


def test_plans_are_for_the_device() -> None:
    small = replace(H200, multiprocessors=20)
    planner = PlanProcess(small)
    plans = [planner.plan(one) for one in PROBLEMS]
    assert plans == [plan_for(one, small, FAMILIES) for one in PROBLEMS]
    assert plans != [plan_for(one, H200, FAMILIES) for one in PROBLEMS]


def test_errors_are_raised_here(planner: PlanProcess) -> None:
    with pytest.raises(AttributeError):
        planner.plan("no problem")  # type: ignore[arg-type]
    assert planner.plan(PROBLEMS[0]) == plan_for(PROBLEMS[0], H200, FAMILIES)


def test_a_killed_process_is_replaced(planner: PlanProcess) -> None:
    first = process_of(planner)
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first))
    assert planner.plan(PROBLEMS[0]) == plan_for(PROBLEMS[0], H200, FAMILIES)
    assert process_of(planner) != first


def test_signals_to_a_whole_service_do_not_end_it(planner: PlanProcess) -> None:
    planner.plan(PROBLEMS[0])
    process = process_of(planner)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(process, number)
    assert planner.plan(PROBLEMS[1]) == plan_for(PROBLEMS[1], H200, FAMILIES)
    assert process_of(planner) == process


def test_it_ends_with_its_owner() -> None:
    made = PlanProcess(H200)
    process = process_of(made)
    assert alive(process)
    del made
    gc.collect()
    until(lambda: not alive(process))


def test_it_ends_with_its_parent() -> None:
    code = (
        "import os, signal\n"
        "from convgrad_service.backends.cuda.plan_process import PlanProcess\n"
        "from convgrad_service.plans.cuda.device import H200\n"
        "made = PlanProcess(H200)\n"
        "print(made._running[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -signal.SIGKILL
    until(lambda: not alive(int(ended.stdout)))
