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

from tests.load.figures import Figures

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


@events.test_start.add_listener
def start(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    started_s = time.monotonic()

    def step_now(_: str) -> int | None:
        at_s = time.monotonic() - started_s
        step = _step(at_s, options.step)
        return None if step is None or at_s - step * options.step < SETTLING_S else step

    figures = Figures(step_now)
    events.request.add_listener(figures.take)

    @events.test_stop.add_listener
    def stop(**_: Any) -> None:
        seconds = options.step - SETTLING_S
        steps = [
            {"users": users, "seconds": seconds, **figures.of(step)}
            for step, users in enumerate(STEPS)
        ]
        Path(options.ramp_out).write_text(json.dumps(steps, indent=1))


def _step(at_s: float, step_s: float) -> int | None:
    step = int(at_s // step_s)
    return step if step < len(STEPS) else None
