"""The same request over every transport, cold and warm, in every topology: one answer.

What a client gets, what is counted and what is logged must not depend on the way that a request
takes through the server: embedded, through workers' processes or through one of two front ends, as
the first of its kind or as one like those before it. See `tests.support.differential`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from convgrad.contract import OPERATIONS, validate
from convgrad_service.problems import problem_from
from tests.support.differential import (
    BREAK,
    HANG,
    TOPOLOGIES,
    Running,
    Seen,
    running,
)
from tests.support.senders import TRANSPORTS, Asked

pytestmark = pytest.mark.processes

# Of each, the first two meet two front ends cold, the rest find the same request known. What is
# refused is remembered nowhere.
_TIMES, _TIMES_REFUSED = 4, 2
_QUICK = ("conv_bwd_data", "maxpool2d_fwd")
_MAX_BYTES = 64 * 1024


def example(operation: str) -> Asked:
    """The operation's own example, as a request."""
    given = dict(OPERATIONS[operation].example)
    tensors = {
        name: np.array(value["values"], value["dtype"])
        for name, value in given.items()
        if isinstance(value, dict) and "values" in value
    }
    parameters = {
        name: value for name, value in given.items() if name not in (*tensors, "response")
    }
    request = validate(OPERATIONS[operation].request, {**tensors, **parameters})
    outputs = {
        name: (spec.dtype.numpy.name, spec.shape)
        for name, spec in problem_from(operation, request).outputs.items()
    }
    return Asked(operation, tensors, parameters, outputs=outputs)


def commanded(command: float, batch: int) -> Asked:
    """A request whose first element is a command; ``batch`` tells it from those of other tests."""
    tensor = np.zeros((batch, 1, 4, 4), np.float32)
    tensor.flat[0] = command
    outputs = {"output": ("float32", (batch, 1, 2, 2))}
    return Asked("maxpool2d_fwd", {"input": tensor}, {"kernel_size": 2}, outputs=outputs)


def _refused() -> Mapping[str, Asked]:
    pool, conv = example("maxpool2d_fwd"), example("conv_bwd_data")
    large = np.zeros((1, 1, 8, 1100), np.float32)
    outputs = {"output": ("float32", (1, 1, 4, 550))}
    return {
        "an impossible geometry": replace(pool, parameters={"kernel_size": 9}),
        "a parameter of the wrong type": replace(pool, parameters={"kernel_size": "two"}),
        "an unknown parameter": replace(pool, parameters={"kernel_size": 2, "colour": 1}),
        "a missing parameter": replace(pool, parameters={}),
        "a missing tensor": replace(conv, tensors={"weight": conv.tensors["weight"]}),
        "shapes that do not match": replace(
            conv, tensors={**conv.tensors, "weight": np.zeros((3, 1, 2, 2), np.float32)}
        ),
        "too large a problem": Asked(
            "maxpool2d_fwd", {"input": large}, {"kernel_size": 2}, outputs=outputs
        ),
        "no such stored tensor": Asked(
            "conv_bwd_data",
            {"grad_output": conv.tensors["grad_output"]},
            {"stored": {"weight": "nothing"}},
            outputs=conv.outputs,
        ),
        "a backend that fails": commanded(BREAK, 2),
    }


REFUSED = _refused()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Running]]:
    """One of each topology, with one slot and a queue of one."""
    limits: dict[str, Any] = {"compute_slots": 1, "max_queue": 1}
    with contextlib.ExitStack() as held:
        directory = tmp_path_factory.mktemp("logs")
        yield {
            topology: held.enter_context(
                running(topology, directory, max_problem_bytes=_MAX_BYTES // 2, **limits)
            )
            for topology in TOPOLOGIES
        }


def compare(
    servers: Mapping[str, Running],
    ask: Callable[[Running, str], Seen],
    times: int = _TIMES,
    *,
    early: bool = False,
) -> Seen:
    """Assert that all answers are the same; return what they have in common."""
    first: Seen | None = None
    differences: dict[str, None] = {}
    for transport in TRANSPORTS:
        same: Seen | None = None
        for topology, server in servers.items():
            for time in range(times):
                seen = ask(server, transport)
                same, first = same or seen, first or seen
                where = f"{transport}, {topology}, time {time + 1}"
                beside = f"{where}, beside {TRANSPORTS[0]}"
                differences.update(_different(where, vars(same), vars(seen)))
                shared = first.shared(early=early), seen.shared(early=early)
                differences.update(_different(beside, *shared))
    assert not differences, "\n" + "\n".join(differences)
    assert first is not None
    return first


def _different(
    where: str, expected: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, None]:
    return {
        f"{where}: {name} is {found[name]!r}; expected {value!r}": None
        for name, value in expected.items()
        if found[name] != value
    }


@pytest.mark.parametrize(
    "operation",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in OPERATIONS],
)
def test_every_way_computes_the_same(servers: Mapping[str, Running], operation: str) -> None:
    asked = example(operation)
    seen = compare(servers, lambda server, transport: server.ask(transport, asked))
    assert seen.code == "ok"
    assert seen.outputs.keys() == asked.outputs.keys()
    assert seen.stages == ("receive", "decode", "queue", "compute", "encode")


@pytest.mark.parametrize("refused", REFUSED)
def test_every_way_refuses_the_same(servers: Mapping[str, Running], refused: str) -> None:
    seen = compare(
        servers,
        lambda server, transport: server.ask(transport, REFUSED[refused]),
        _TIMES_REFUSED,
    )
    assert seen.code != "ok"


def test_every_way_keeps_the_deadline(servers: Mapping[str, Running]) -> None:
    asked = replace(commanded(HANG, 3), timeout_s=0.2)
    seen = compare(servers, lambda server, transport: server.ask(transport, asked))
    assert seen.code == "deadline-exceeded"


def test_every_way_notices_that_its_client_has_gone(servers: Mapping[str, Running]) -> None:
    asked = commanded(HANG, 4)
    seen = compare(servers, lambda server, transport: server.ask(transport, asked, leave=True))
    assert seen.code == "client-gone"


def test_every_way_refuses_overload_the_same(servers: Mapping[str, Running]) -> None:
    asked = example("conv_bwd_data")
    # Those that wait are counted as cancelled once they have gone, so they are held throughout.
    with contextlib.ExitStack() as busy:
        for server in servers.values():
            busy.enter_context(server.busy(commanded(HANG, 5), 2))
        seen = compare(
            servers,
            lambda server, transport: server.ask(transport, asked),
            _TIMES_REFUSED,
            early=True,
        )
    assert (seen.code, seen.comes_again) == ("overloaded", True)
