"""Locust users: each a way to talk to the server, sending a mix of requests.

    locust -f tests/load/locustfile.py --headless -u 8 -t 30s --host http://127.0.0.1:8000

`--mix` picks what is sent, `--wires` who sends it. One answer of each kind of request is compared
with the first one that came: the server is deterministic, so they are equal to the bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from locust import User, between, events, task
from numpy.typing import NDArray

import convgrad
from convgrad.errors import ConvgradError, Overloaded
from tests.load.mixes import MIXES, Sent, requests_of

# What each request answered first, whoever sent it.
_FIRST: dict[int, list[NDArray[Any]]] = {}


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--mix", choices=sorted(MIXES), default="resnet50")
    parser.add_argument("--retry", action="store_true", help="take 429 for a reason to try again")


@lru_cache
def _sent(mix: str) -> list[Sent]:
    # Drawn once for all users: a network's tensors are a hundred megabytes.
    return requests_of(mix)


class ConvgradUser(User):  # type: ignore[misc]
    """Sends the requests of the mix, in random order, as often as they come in it."""

    abstract = True
    wait_time = between(0, 0.01)
    wire = ""

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.sent = _sent(options.mix)
        self.weights = [one.count for one in self.sent]
        self.client = convgrad.Client(
            self.host, wire=self.wire, retries=2 if options.retry else 0, timeout=120
        )

    def on_stop(self) -> None:
        self.client.close()

    @task
    def send(self) -> None:
        (number,) = random.choices(range(len(self.sent)), self.weights)
        one = self.sent[number]
        started = time.perf_counter()
        error: Exception | None = None
        size = 0
        try:
            answer = self._call(one)
            size = sum(array.nbytes for array in answer)
            self._compare(number, answer)
        except Overloaded as refused:
            error = refused
        except (ConvgradError, AssertionError) as failed:
            error = failed
        self.environment.events.request.fire(
            request_type=self.wire,
            name=f"{one.label} {one.operation}",
            response_time=(time.perf_counter() - started) * 1e3,
            response_length=size,
            exception=error,
            context={},
        )
        if isinstance(error, Overloaded):
            # As every client should: come back when the server says.
            time.sleep(error.retry_after_s or 0.1)

    def _call(self, one: Sent) -> list[NDArray[Any]]:
        call: Callable[..., Any] = getattr(self.client, one.operation)
        result = call(**one.tensors, **one.parameters)
        parts = result if isinstance(result, tuple) else (result,)
        return [np.asarray(part) for part in parts if part is not None]

    def _compare(self, number: int, answer: list[NDArray[Any]]) -> None:
        before = _FIRST.setdefault(number, answer)
        for a, b in zip(before, answer, strict=True):
            assert a.tobytes() == b.tobytes(), f"request {number} was answered differently before"


class SafetensorsUser(ConvgradUser):
    """The SDK's default: binary bodies."""

    wire = "safetensors"
    weight = 3


class JsonUser(ConvgradUser):
    """npy in base64 in JSON."""

    wire = "json"
    weight = 1
