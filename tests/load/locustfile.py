"""Locust users: each a way to talk to the server, sending a mix of requests.

    locust -f tests/load/locustfile.py --headless -u 8 -t 30s --host http://127.0.0.1:8000

`--mix` picks what is sent, `--grpc-host` where gRPC is served. Every answer is compared with the
first that came to the same request, by whatever way: the server is deterministic, so they are equal
to the bit.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
import numpy as np
import tritonclient.grpc as triton
from locust import User, events, task
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

import convgrad
from convgrad._retry import Backoff
from convgrad.errors import ConvgradError, Overloaded
from tests.load.figures import Figures
from tests.load.mixes import MIXES, Sent, requests_of

# Locust's users are greenlets; gRPC's threads must know.
grpc.experimental.gevent.init_gevent()

_BACKOFF = Backoff()

# What each request answered first, whoever sent it.
_FIRST: dict[int, list[NDArray[Any]]] = {}


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--mix", choices=sorted(MIXES), default="resnet50")
    parser.add_argument("--grpc-host", default="127.0.0.1:8001", help="host and port of gRPC")
    parser.add_argument("--retry", action="store_true", help="take 429 for a reason to try again")
    parser.add_argument(
        "--pause", type=float, default=0.005, help="seconds between two requests of a user, mean"
    )
    parser.add_argument("--api-key", default="", help="what to show a server that wants one")
    parser.add_argument("--figures-out", default="", help="figures by way of sending go here")


@events.test_start.add_listener
def start(environment: Any, **_: Any) -> None:
    out = environment.parsed_options.figures_out
    if not out:
        return
    figures = Figures(lambda wire: wire)
    events.request.add_listener(figures.take)
    events.test_stop.add_listener(lambda **_: figures.write(Path(out)))


@lru_cache
def _sent(mix: str) -> list[Sent]:
    # Drawn once for all users: a network's tensors are a hundred megabytes.
    return requests_of(mix)


@lru_cache
def _dealt(mix: str) -> Iterator[int]:
    """Numbers of a mix's requests for all users: shuffled decks of all of them, without end.

    Drawn by lot each for itself, a few hundred requests would hold a tenth more or fewer bytes
    than others do, by chance alone.
    """
    deck = [number for number, one in enumerate(_sent(mix)) for _ in range(one.count)]
    while True:
        random.shuffle(deck)
        yield from deck


class Sender(User):  # type: ignore[misc]
    """Sends the requests of the mix, in random order, as often as they come in it."""

    abstract = True
    wire = ""

    def on_start(self) -> None:
        self.options = self.environment.parsed_options
        self.sent = _sent(self.options.mix)
        self.dealt = _dealt(self.options.mix)
        key = self.options.api_key
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.open()

    def wait_time(self) -> float:
        return random.uniform(0, 2 * self.options.pause)

    def open(self) -> None:
        """Make the client."""
        raise NotImplementedError

    def call(self, one: Sent) -> list[NDArray[Any]]:
        """Send one request; its answer's tensors. Raises the errors of convgrad's table."""
        raise NotImplementedError

    @task
    def send(self) -> None:
        number = next(self.dealt)
        one = self.sent[number]
        started = time.perf_counter()
        error: Exception | None = None
        size = 0
        try:
            answer = self.call(one)
            size = sum(array.nbytes for array in answer)
            self._compare(number, answer)
        except (ConvgradError, InferenceServerException, AssertionError) as failed:
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
            # As the SDK's own retries do: come back when the server says, or a little later.
            time.sleep(_BACKOFF.delay_s(1, error.retry_after_s))

    def _compare(self, number: int, answer: list[NDArray[Any]]) -> None:
        before = _FIRST.setdefault(number, answer)
        for a, b in zip(before, answer, strict=True):
            bits = f"u{a.itemsize}"  # in which a NaN equals itself
            same = np.array_equal(a.view(bits), b.view(bits))
            assert same, f"request {number} was answered differently before"


class SdkUser(Sender):
    """The Python SDK."""

    abstract = True

    def open(self) -> None:
        retries = 2 if self.options.retry else 0
        self.client = convgrad.Client(
            self.host, wire=self.wire, max_retries=retries, timeout=120, headers=self.headers
        )

    def on_stop(self) -> None:
        self.client.close()

    def call(self, one: Sent) -> list[NDArray[Any]]:
        call: Callable[..., Any] = getattr(self.client, one.operation)
        result = call(**one.tensors, **one.parameters)
        parts = result if isinstance(result, tuple) else (result,)
        return [np.asarray(part) for part in parts if part is not None]


class SafetensorsUser(SdkUser):
    """The SDK's default: binary bodies."""

    wire = "safetensors"
    weight = 2


class JsonUser(SdkUser):
    """npy in base64 in JSON."""

    wire = "json"
    weight = 1


class GrpcUser(Sender):
    """Triton's own client, over gRPC."""

    wire = "grpc"
    weight = 1

    def open(self) -> None:
        self.client = triton.InferenceServerClient(self.options.grpc_host)

    def on_stop(self) -> None:
        self.client.close()

    def call(self, one: Sent) -> list[NDArray[Any]]:
        inputs = []
        for name, array in one.tensors.items():
            inputs.append(triton.InferInput(name, list(array.shape), "FP32"))
            inputs[-1].set_data_from_numpy(array)
        parameters = {
            name: str(list(value)) if isinstance(value, tuple) else value
            for name, value in one.parameters.items()
        }
        try:
            result = self.client.infer(
                one.operation,
                inputs,
                parameters=parameters,
                headers=self.headers,
                client_timeout=120,
            )
        except InferenceServerException as error:
            raise _overload_in(error) or error from None
        return [result.as_numpy(output.name) for output in result.get_response().outputs]


def _overload_in(error: InferenceServerException) -> Overloaded | None:
    """The refusal that a call ended with, if it was one."""
    # Triton's client shows a call's status and not its trailers, which are in what it caught.
    call = error.__context__
    if not isinstance(call, grpc.Call):
        return None
    trailers = dict(call.trailing_metadata() or ())
    if trailers.get("convgrad-code") != Overloaded.code:
        return None
    return Overloaded(str(error), retry_after_s=float(trailers.get("retry-after", 1)))
