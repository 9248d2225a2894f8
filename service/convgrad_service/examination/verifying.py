"""Verifies a caller's result against a float64 reference, in a worker."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check._verify import Judged, OwnResult, judge
from convgrad.check.philox import fill, spread_indices
from convgrad.check.references import PART_ELEMENTS
from convgrad.contract.again import again
from convgrad.contract.judged_results import judged_results
from convgrad.contract.verification import Inputs
from convgrad.errors import DeadlineExceeded, UnsupportedProblem
from convgrad.wire.strict_json import dumps
from convgrad_service.backends.base import Outcome, ServingBackend
from convgrad_service.problems import MaxUnpoolBwd, MaxUnpoolFwd, Problem
from convgrad_service.problems.examinations import DRAWN, OURS, Examination, Verify
from convgrad_service.process import usable_cores

Array = NDArray[Any]
Arrays = Mapping[str, Any]

# More threads would only share the same memory bandwidth.
_MOST_THREADS = 4


def verify(
    backend: ServingBackend,
    problem: Verify,
    tensors: Arrays,
    cancelled: threading.Event | None,
    out: Arrays,
) -> Outcome:
    """Draw the inputs that were not sent, compute the reference, and judge the caller's results.

    Raises
    ------
    DeadlineExceeded
        ``cancelled`` was set.
    InvalidProblem
        The data contradict the problem.
    """
    began_s = time.perf_counter()
    check = refuse_if(cancelled)
    sent = {name: _on_host(each) for name, each in tensors.items()}
    inputs = {
        **{name: sent[name] for name in problem.given},
        **draw_inputs(problem, out, check),
    }
    inputs = {name: inputs[name] for name in problem.subject.inputs}
    judged = _judged(problem, sent)
    ours = _ours(backend, problem, inputs, cancelled, out)
    found = judge(
        problem.subject.operation,
        judged,
        inputs,
        json.loads(problem.parameters),
        factors=problem.factors,
        sums=problem.sums,
        convolver=backend.convolver(check),
        ours=ours,
        inputs=Inputs(
            dtype=problem.dtype.value,
            seed=problem.seed if problem.drawn else None,
            distribution=problem.distribution if problem.drawn else None,
            drawn=problem.drawn,
            digest=_digest(problem, inputs),
        ),
        # Samples that fill a part by themselves are large: several at a time take too much memory.
        threads=min(usable_cores(), _MOST_THREADS)
        if problem.sample_elements <= PART_ELEMENTS
        else 1,
        check=check,
    )
    found = found.model_copy(
        update={
            "layer": problem.layer,
            "again": again(problem.name, json.loads(problem.asked)),
            "reference": found.reference.model_copy(update={"flops": problem.flops}),
        }
    )
    kernel = "" if ours is None else ours.kernel
    seconds = time.perf_counter() - began_s
    return Outcome({}, kernel, seconds, 1, 0, report_json=dumps(found.json_values()))


def refuse_if(cancelled: threading.Event | None) -> Callable[[], None]:
    """Return a function that raises DeadlineExceeded once ``cancelled`` is set."""

    def check() -> None:
        if cancelled is not None and cancelled.is_set():
            raise DeadlineExceeded("the request was cancelled before its answer was ready")

    return check


def draw_inputs(
    problem: Examination, out: Arrays, check: Callable[[], None] = lambda: None
) -> dict[str, Array]:
    """Fill the tensors that are drawn from the request's seed, in their memory."""
    drawn = {}
    for name in problem.drawn:
        check()
        drawn[name] = out[f"{DRAWN}{name}"]
        if name == "indices":
            drawn[name][...] = _indices(problem.subject)
        else:
            fill(name, drawn[name], problem.seed, problem.distribution)
    return drawn


def _indices(subject: Problem) -> Array:
    """Valid indices for a max unpooling."""
    assert isinstance(subject, MaxUnpoolFwd | MaxUnpoolBwd)  # noqa: S101
    shape = subject.inputs["indices"].shape
    return spread_indices(shape, prod(subject.output_size), subject.layout.name)


def _judged(problem: Verify, sent: Mapping[str, Array]) -> Judged:
    """Return the caller's results by role and output."""
    by_role: defaultdict[tuple[str, str | None], dict[str, Array]] = defaultdict(dict)
    names = {name for name, _ in problem.judged}
    for each in judged_results(problem.subject.operation):
        if each.name in names:
            by_role[each.role, each.tensor][each.output] = sent[each.name]
    tensors = {tensor for _, tensor in by_role if tensor is not None}
    return Judged(
        by_role["result", None],
        by_role["second", None],
        by_role["doubled", None],
        {name: (by_role["addend", name], by_role["sum", name]) for name in sorted(tensors)},
    )


def _on_host(tensor: Any) -> Array:
    """Return a tensor, which may be stored on the device, as an array."""
    if isinstance(tensor, np.ndarray):
        return tensor
    target: Array = np.empty(tensor.spec.shape, tensor.spec.dtype.numpy)
    tensor.read(target)
    return target


def _ours(
    backend: ServingBackend,
    problem: Verify,
    inputs: Mapping[str, Array],
    cancelled: threading.Event | None,
    out: Arrays,
) -> OwnResult | None:
    """Return this server's own result; None if it has no kernel."""
    places = {name: out[f"{OURS}{name}"] for name in problem.subject.outputs}
    try:
        outcome = backend.run(problem.subject, inputs, cancelled, places)
    except UnsupportedProblem:
        return None
    return OwnResult(outcome.kernel, outcome.outputs)


def _digest(problem: Examination, inputs: Mapping[str, Array]) -> str:
    """Return a digest of the problem and its inputs."""
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(repr(problem.subject).encode())
    for name, array in inputs.items():
        hashed.update(name.encode())
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()
