"""What the load tests call missed: they judge servers, so they are judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad.errors import Overloaded
from tests.load import run
from tests.load.figures import Figures
from tests.load.open_loop import Observed, Plan, arrivals, compared, figures
from tests.load.run import MIN_GOODPUT, ramp_verdict, verdict
from tests.load.soak import MAX_GROWTH_BYTES
from tests.load.soak import verdict as soak_verdict


def test_figures_keep_the_answered_the_refused_and_the_failed_apart(tmp_path: Path) -> None:
    figures = Figures(lambda wire: None if wire == "warm" else wire)
    for took_ms in range(1, 201):
        figures.take("grpc", float(took_ms), None, response_length=1)
    figures.take("grpc", 9e9, Overloaded("later"))
    figures.take("grpc", 9e9, ValueError("a wrong answer"))
    figures.take("warm", 9e9, None)
    assert figures.of("grpc") == {
        "answered": 200,
        "refused": 1,
        "failed": 1,
        "first_failure": "ValueError: a wrong answer",
        "p50_s": 0.101,
        "p99_s": 0.199,
    }
    assert figures.keys() == ["grpc"]
    assert figures.of("json")["p99_s"] is None


GOOD: dict[str, Any] = {"answered": 9, "refused": 0, "failed": 0, "p99_s": 0.5}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"answered": 0, "p99_s": None}, "nothing was answered"),
        ({"failed": 1, "first_failure": "ValueError"}, "1 failed, 0 refused; first: ValueError"),
        ({"refused": 2}, "2 refused"),
        ({"p99_s": 1.5}, "p99 is 1.500 s"),
    ],
)
def test_a_wire_keeps_its_objective(change: dict[str, Any], said: str | None) -> None:
    missed = verdict({**GOOD, "objective_p99_s": 1.0, **change}, "small over grpc")
    assert (missed == []) if said is None else (said in missed[0])


def ramped(rates: list[float], refused: float = 5.0, p99_s: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"users": 2**n, "answered_per_s": rate, "refused_per_s": refused, "failed": 0,
         "first_failure": None, "p99_s": p99_s}
        for n, rate in enumerate(rates)
    ]  # fmt: skip


def test_a_ramp_must_meet_the_limit_and_hold() -> None:
    def judged(steps: list[dict[str, Any]]) -> list[str]:
        return ramp_verdict(steps, most_p99_s=0.2)

    assert judged(ramped([50, 100, 95])) == []
    assert "goodput fell" in judged(ramped([50, 100, 100 * MIN_GOODPUT - 1]))[0]
    assert "never met the limit" in judged(ramped([50, 100, 100], refused=0))[0]
    assert "rose to" in judged(ramped([50, 100, 100], p99_s=0.21))[0]
    failing = ramped([50, 100, 100])
    failing[1]["failed"], failing[1]["first_failure"] = 3, "ConnectionFailed"
    assert judged(failing) == ["3 failed at 2 users; first: ConnectionFailed"]


def soaked(held_mib: list[float]) -> list[dict[str, Any]]:
    return [{"at_s": n, "failed": 0, "held_bytes": mib * 2**20} for n, mib in enumerate(held_mib)]


def test_a_soak_must_not_grow() -> None:
    warming = [100, 150, 200, 200, 200, 200, 200, 205]
    assert soak_verdict(soaked(warming)) == []
    growing = [100 + n * (MAX_GROWTH_BYTES / 2**20) / 4 for n in range(8)]
    assert "grew by 40 MiB" in soak_verdict(soaked([value * 1.25 for value in growing]))[0]
    assert "too few" in soak_verdict(soaked([1, 1]))[0]
    failing = soaked(warming)
    failing[3]["failed"] = 2
    assert soak_verdict(failing) == ["2 failed at 3 s"]


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(200.0, 50.0, np.random.default_rng(0))
    assert 9_600 < len(times) < 10_400  # four standard deviations of 10,000
    between = np.diff(times)
    assert (between >= 0).all()
    # Exponential: the standard deviation is the mean.
    assert between.std() == pytest.approx(between.mean(), rel=0.1)


PLAN = Plan("http://server", "small", rate=100.0, seconds=10.0, workers=2)


def test_figures_of_an_open_loop_count_from_when_requests_were_due() -> None:
    first = Observed([0.001 * n for n in range(1, 501)], [0.0001] * 500, {"ok": 500})
    second = Observed(
        [0.001 * n for n in range(501, 1000)], [0.0001] * 500, {"ok": 499, "overloaded": 1}
    )
    row = figures(PLAN, [first, second])
    assert (row["sent"], row["answered"], row["goodput_per_s"]) == (1000, 999, 99.9)
    assert row["p50_s"] == pytest.approx(0.5)
    assert row["p99.9_s"] == pytest.approx(0.999)
    assert compared(row, None) == ["1 of 1000 failed: {'ok': 999, 'overloaded': 1}"]


def test_an_open_loop_is_compared_with_stored_figures() -> None:
    kept = figures(PLAN, [Observed([0.010] * 1000, [0.0] * 1000, {"ok": 1000})])
    slower = figures(PLAN, [Observed([0.019] * 999 + [0.1], [0.0] * 1000, {"ok": 1000})])
    assert compared(kept, kept) == []
    assert compared(slower, kept) == []
    worst = figures(PLAN, [Observed([0.019] * 980 + [0.1] * 20, [0.0] * 1000, {"ok": 1000})])
    assert compared(worst, kept) == [
        "p99_s was 0.0100 and is 0.1000",
        "p99.9_s was 0.0100 and is 0.1000",
    ]
    # Microseconds are the machine's.
    tiny = figures(PLAN, [Observed([0.0001] * 1000, [0.0] * 1000, {"ok": 1000})])
    other = figures(PLAN, [Observed([0.0009] * 1000, [0.0] * 1000, {"ok": 1000})])
    assert compared(other, tiny) == []
    late = figures(PLAN, [Observed([0.01] * 1000, [0.02] * 1000, {"ok": 1000})])
    assert "20.0 ms late" in compared(late, None)[0]


def test_objectives_are_twice_what_was_measured() -> None:
    objectives = run.p99_objectives_s()
    assert objectives.keys() == {(mix, wire) for mix in run.USERS for wire in run.WIRES}
    rows = run.stored_rows()
    for row in rows:
        if row["run"] == "mixes":
            assert objectives[row["mix"], row["wire"]] == 2 * row["p99_s"]
    full = max((row for row in rows if row["run"] == "ramp"), key=lambda row: row["users"])
    assert run.ramp_objective_s() == 2 * full["p99_s"]
