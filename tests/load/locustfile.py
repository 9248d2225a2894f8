"""Locust users, one class per wire format, that send a mix of requests.

    locust -f tests/load/locustfile.py --headless -u 8 -t 30s --host http://127.0.0.1:8000

`--mix` selects the requests, `--grpc-host` the gRPC address. Every response is compared with the
first one to the same request, over any wire format: they must be bitwise identical.
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

# Locust's users are greenlets.
grpc.experimental.gevent.init_gevent()

_BACKOFF = Backoff()

# The first response to each request.
_FIRST: dict[int, list[NDArray[Any]]] = {}


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--mix", choices=sorted(MIXES), default="resnet50")
    parser.add_argument("--grpc-host", default="127.0.0.1:8001", help="host and port for gRPC")
    parser.add_argument("--retry", action="store_true", help="retry on 429")
    parser.add_argument(
        "--pause", type=float, default=0.005, help="mean seconds between two requests of a user"
    )
    parser.add_argument("--api-key", default="", help="API key, if the server requires one")
    parser.add_argument("--figures-out", default="", help="file for the figures by wire format")


@events.test_start.add_listener
def start(environment: Any, **_: Any) -> None:
    out = environment.parsed_options.figures_out
    if not out:
        return
    figures = Figures(lambda wire: wire)
    events.request.add_listener(figures.take)
    events.test_stop.add_listener(lambda **_: figures.write(Path(out)))


@lru_cache
def _requests(mix: str) -> list[Sent]:
    # Shared by all users: a network's tensors take a hundred megabytes.
    return requests_of(mix)


@lru_cache
def _shuffled(mix: str) -> Iterator[int]:
    """Yield indices of a mix's requests for all users: shuffled lists of all of them, endlessly.

    Independent draws would make the size of a few hundred requests vary by a tenth.
    """
    deck = [number for number, one in enumerate(_requests(mix)) for _ in range(one.count)]
    while True:
        random.shuffle(deck)
        yield from deck


class Sender(User):  # type: ignore[misc]
    """Sends the requests of the mix in random order, each with its frequency."""

    abstract = True
    wire = ""

    def on_start(self) -> None:
        self.options = self.environment.parsed_options
        self.sent = _requests(self.options.mix)
        self.order = _shuffled(self.options.mix)
        key = self.options.api_key
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.open()

    def wait_time(self) -> float:
        return random.uniform(0, 2 * self.options.pause)

    def open(self) -> None:
        """Make the client."""
        raise NotImplementedError

    def call(self, one: Sent) -> list[NDArray[Any]]:
        """Send one request; return the tensors of the response. Raises ConvgradError."""
        raise NotImplementedError

    @task
    def send(self) -> None:
        number = next(self.order)
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
            # Wait as the SDK does before a retry.
            time.sleep(_BACKOFF.delay_s(1, error.retry_after_s))

    def _compare(self, number: int, answer: list[NDArray[Any]]) -> None:
        before = _FIRST.setdefault(number, answer)
        for a, b in zip(before, answer, strict=True):
            bits = f"u{a.itemsize}"  # so that NaN equals NaN
            same = np.array_equal(a.view(bits), b.view(bits))
            assert same, f"request {number} had a different response before"


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
    """The SDK's default wire format: binary bodies."""

    wire = "safetensors"
    weight = 2


class JsonUser(SdkUser):
    """JSON with npy in base64."""

    wire = "json"
    weight = 1


class GrpcUser(Sender):
    """Triton's gRPC client."""

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
    """Return the Overloaded error that a call ended with, if any."""
    # Triton's client exposes only the status; the trailers are in the exception's context.
    call = error.__context__
    if not isinstance(call, grpc.Call):
        return None
    trailers = dict(call.trailing_metadata() or ())
    if trailers.get("convgrad-code") != Overloaded.code:
        return None
    return Overloaded(str(error), retry_after_s=float(trailers.get("retry-after", 1)))
