"""A ramp: more and more users, a step at a time, several times, and what each step's requests got.

    locust -f tests/load/locustfile.py,tests/load/ramp.py --headless --ramp-out steps.json ...

Past the knee a server should refuse what it cannot take (429) and answer the rest as fast as
before; what it answers in a second must not fall. A machine's speed drifts within a minute, so the
whole ramp is climbed several times and a step's rates are the medians. Beside them stands what
server and clients used of their cores: a server that its clients are too slow for shows no knee.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gevent
from locust import LoadTestShape, events

from tests.load.figures import Figures
from tests.load.served import busy_s, cpu_s

# Users at each step; the last is far past what two cores can take.
STEPS = (1, 2, 4, 8, 16, 32, 64)
# The start of a step, while users come or go and queues fill, is left out of its figures.
SETTLING_S = 2.0


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--ramp-out", default="ramp.json", help="the steps' figures go here")
    parser.add_argument("--step", type=float, default=12.0, help="seconds at each number of users")
    parser.add_argument("--climbs", type=int, default=3, help="how often the ramp is climbed")
    parser.add_argument("--server-process", type=int, default=0, help="whose use of its cores")


class Ramp(LoadTestShape):  # type: ignore[misc]
    """Locust asks for the number of users every second."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        users = self.climbing.users
        return None if users is None else (users, 100.0)


@events.init.add_listener
def prepare(environment: Any, **_: Any) -> None:
    options = environment.parsed_options
    climbing = Climbing(options.step, options.climbs, options.server_process)
    environment.shape_class.climbing = climbing
    for figures in (climbing.each, climbing.all):
        environment.events.request.add_listener(figures.take)

    @environment.events.test_start.add_listener
    def start(**_: Any) -> None:
        gevent.spawn(climbing.run)

    @environment.events.test_stop.add_listener
    def stop(**_: Any) -> None:
        Path(options.ramp_out).write_text(json.dumps(list(climbing.rows()), indent=1))


class Used(NamedTuple):
    """Seconds of a core that have been used so far: by the server, its clients, everything."""

    server_s: float
    clients_s: float
    all_s: float

    @classmethod
    def now(cls, server: int) -> Used:
        return cls(cpu_s(server) if server else 0.0, time.process_time(), busy_s())


class Climbing:
    """Which step it is, and what its requests got: in each climb, and in all of them together."""

    def __init__(self, step_s: float, climbs: int, server: int) -> None:
        self.each = Figures(lambda _: self._now)
        self.all = Figures(lambda _: None if self._now is None else self._now[1])
        # None after the last step.
        self.users: int | None = STEPS[0]
        self._step_s, self._climbs, self._server = step_s, climbs, server
        # The climb and the step that requests count towards; None while it settles.
        self._now: tuple[int, int] | None = None
        # By climb and step: how long it was measured, and what was used meanwhile.
        self._measured: dict[tuple[int, int], tuple[float, Used]] = {}

    def run(self) -> None:
        """Take the steps, one after another; Locust goes on until it ends."""
        try:
            for climb in range(self._climbs):
                for step, self.users in enumerate(STEPS):
                    gevent.sleep(SETTLING_S)
                    self._measure(climb, step)
        finally:
            self.users = None

    def _measure(self, climb: int, step: int) -> None:
        before, from_s = Used.now(self._server), time.monotonic()
        self._now = climb, step
        gevent.sleep(self._step_s - SETTLING_S)
        self._now = None
        after, seconds = Used.now(self._server), time.monotonic() - from_s
        used = Used(*(now - then for now, then in zip(after, before, strict=True)))
        self._measured[climb, step] = seconds, used

    def rows(self) -> Iterator[dict[str, Any]]:
        """A step's figures: medians of the climbs' rates, quantiles over all of their requests."""
        for step, users in enumerate(STEPS):
            climbs = [self._climb(climb, step) for climb in range(self._climbs)]
            rates = {name: statistics.median(climb[name] for climb in climbs) for name in climbs[0]}
            yield {"users": users, **self.all.of(step), **rates, "climbs": climbs}

    def _climb(self, climb: int, step: int) -> dict[str, float]:
        found = self.each.of((climb, step))
        seconds, used = self._measured[climb, step]
        return {
            "seconds": seconds,
            "answered_per_s": found["answered"] / seconds,
            "refused_per_s": found["refused"] / seconds,
            "server_cores": used.server_s / seconds,
            "clients_cores": used.clients_s / seconds,
            "other_cores": max(0.0, used.all_s - used.server_s - used.clients_s) / seconds,
        }
