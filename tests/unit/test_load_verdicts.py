"""What the load tests call missed: they judge servers, so they are judged here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convgrad.errors import Overloaded
from tests.load.figures import Figures
from tests.load.run import LEAST_GOODPUT, RAMP_P99_S, ramp_verdict, verdict
from tests.load.soak import MOST_GROWTH_BYTES
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
    assert ramp_verdict(ramped([50, 100, 95])) == []
    assert "goodput fell" in ramp_verdict(ramped([50, 100, 100 * LEAST_GOODPUT - 1]))[0]
    assert "never met the limit" in ramp_verdict(ramped([50, 100, 100], refused=0))[0]
    assert "rose to" in ramp_verdict(ramped([50, 100, 100], p99_s=RAMP_P99_S + 0.1))[0]
    failing = ramped([50, 100, 100])
    failing[1]["failed"], failing[1]["first_failure"] = 3, "ConnectionFailed"
    assert ramp_verdict(failing) == ["3 failed at 2 users; first: ConnectionFailed"]


def soaked(held_mib: list[float]) -> list[dict[str, Any]]:
    return [{"at_s": n, "failed": 0, "held_bytes": mib * 2**20} for n, mib in enumerate(held_mib)]


def test_a_soak_must_not_grow() -> None:
    warming = [100, 150, 200, 200, 200, 200, 200, 205]
    assert soak_verdict(soaked(warming)) == []
    growing = [100 + n * (MOST_GROWTH_BYTES / 2**20) / 4 for n in range(8)]
    assert "grew by 40 MiB" in soak_verdict(soaked([value * 1.25 for value in growing]))[0]
    assert "too few" in soak_verdict(soaked([1, 1]))[0]
    failing = soaked(warming)
    failing[3]["failed"] = 2
    assert soak_verdict(failing) == ["2 failed at 3 s"]
