"""A ramp: more and more users, a step at a time, and what each step's requests got.

    locust -f tests/load/locustfile.py,tests/load/ramp.py --headless --ramp-out steps.json ...

Past the knee a server should refuse what it cannot take (429) and answer the rest as fast as
before; what it answers in a second must not fall.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from locust import LoadTestShape, events

from convgrad.errors import Overloaded

# Users at each step; the last is far past what two cores can take.
STEPS = (1, 2, 4, 8, 16, 32, 64)
# The start of a step, while users come and queues fill, is left out of its figures.
SETTLING_S = 1.0


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--ramp-out", default="ramp.json", help="the steps' figures go here")
    parser.add_argument("--step", type=float, default=6.0, help="seconds at each number of users")


class Ramp(LoadTestShape):  # type: ignore[misc]
    """Locust asks for the number of users every second."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        step = _step(self.get_run_time(), self.runner.environment.parsed_options.step)
        return None if step is None else (STEPS[step], 100.0)


class Figures:
    """Answered, refused and failed requests of each step, and how long the answered took."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._started_s = time.monotonic()
        self._answered_s: list[list[float]] = [[] for _ in STEPS]
        self._refused = [0] * len(STEPS)
        self._failed = [0] * len(STEPS)

    def take(self, response_time: float, exception: Exception | None, **_: Any) -> None:
        """One request, as Locust tells of it."""
        at_s = time.monotonic() - self._started_s
        step = _step(at_s, self._step_s)
        if step is None or at_s - step * self._step_s < SETTLING_S:
            return
        if exception is None:
            self._answered_s[step].append(response_time / 1e3)
        elif isinstance(exception, Overloaded):
            self._refused[step] += 1
        else:
            self._failed[step] += 1

    def steps(self) -> list[dict[str, float]]:
        """A line a step."""
        seconds = self._step_s - SETTLING_S
        return [
            {
                "users": users,
                "answered_per_s": len(took) / seconds,
                "refused_per_s": refused / seconds,
                "failed": failed,
                "p50_s": _quantile(took, 0.5),
                "p99_s": _quantile(took, 0.99),
            }
            for users, took, refused, failed in zip(
                STEPS, self._answered_s, self._refused, self._failed, strict=True
            )
        ]


@events.test_start.add_listener
def start(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    figures = Figures(options.step)
    events.request.add_listener(figures.take)

    @events.test_stop.add_listener
    def stop(**_: Any) -> None:
        Path(options.ramp_out).write_text(json.dumps(figures.steps(), indent=1))


def _step(at_s: float, step_s: float) -> int | None:
    step = int(at_s // step_s)
    return step if step < len(STEPS) else None


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0
