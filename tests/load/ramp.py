"""A ramp: the number of users grows step by step; figures are collected per step.

    locust -f tests/load/locustfile.py,tests/load/ramp.py --headless --ramp-out steps.json ...

Beyond the knee a server should refuse excess requests (429) and answer the rest as fast as before;
its throughput must not fall. Because a machine's speed drifts within a minute, the whole ramp is
run several times, and the rates of a step are medians. The CPU use of server and clients is
recorded as well: if the clients are too slow for the server, there is no knee.
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

# Users at each step; the last is far beyond what two cores can handle.
STEPS = (1, 2, 4, 8, 16, 32, 64)
# Not measured: the start of a step, while users start and queues fill.
SETTLING_S = 2.0


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--ramp-out", default="ramp.json", help="file for the steps' figures")
    parser.add_argument("--step", type=float, default=12.0, help="seconds per step")
    parser.add_argument("--climbs", type=int, default=3, help="number of runs of the ramp")
    parser.add_argument("--server-process", type=int, default=0, help="process id of the server")


class Ramp(LoadTestShape):  # type: ignore[misc]
    """Locust's load shape: the number of users over time."""

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
    """CPU time used so far by the server, the clients and the whole machine."""

    server_s: float
    clients_s: float
    all_s: float

    @classmethod
    def now(cls, server: int) -> Used:
        return cls(cpu_s(server) if server else 0.0, time.process_time(), busy_s())


class Climbing:
    """The current step, and the figures of each run of the ramp and of all runs together."""

    def __init__(self, step_s: float, climbs: int, server: int) -> None:
        self.each = Figures(lambda _: self._now)
        self.all = Figures(lambda _: None if self._now is None else self._now[1])
        # None after the last step.
        self.users: int | None = STEPS[0]
        self._step_s, self._climbs, self._server = step_s, climbs, server
        # The run and step that requests count towards; None while settling.
        self._now: tuple[int, int] | None = None
        # By run and step: the seconds measured, and the CPU time used.
        self._measured: dict[tuple[int, int], tuple[float, Used]] = {}

    def run(self) -> None:
        """Run the steps one after another, then end the test."""
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
        """Yield the figures of each step: median rates, quantiles over the requests of all runs."""
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
