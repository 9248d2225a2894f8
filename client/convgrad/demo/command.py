"""Runs the steps of the demo in order."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.markup import escape

from convgrad import Client
from convgrad.contract import OPERATIONS
from convgrad.demo.checks import CheckResult, run_checks
from convgrad.demo.console import Display, Summary
from convgrad.demo.data import digits
from convgrad.demo.errors import DemoError
from convgrad.demo.metering import Meter, MeteredTransport
from convgrad.demo.network import Network
from convgrad.demo.picture import draw_picture
from convgrad.demo.server import Server, local_server, running_server
from convgrad.demo.training import Schedule, train
from convgrad.errors import ConvgradError

__all__ = ["TARGET_ACCURACY", "run"]

TARGET_ACCURACY = 0.97
_PICTURE = "convgrad-demo.png"
_SEED = 0
_TIMEOUT_S = 60.0


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0 if every check passed, 1 if not, 130 on Ctrl-C."""
    console = Console(highlight=False)
    try:
        with running_server(arguments.url) if arguments.url else local_server() as server:
            try:
                _demonstrate(server, Schedule(epochs=arguments.epochs), arguments.output, console)
            except ConvgradError as error:
                raise DemoError(server.epitaph() or f"a request failed: {error}") from error
    except DemoError as error:
        sentence = escape(str(error))
        console.print(f"\n[bold red]The demo failed:[/bold red] {sentence}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted.")
        return 130
    return 0


def _demonstrate(server: Server, schedule: Schedule, folder: Path, console: Console) -> None:
    started = time.perf_counter()
    picture = _writable(folder) / _PICTURE
    meter = Meter()
    display = Display(console, meter)
    transport = MeteredTransport(httpx.HTTPTransport(), meter)
    with (
        httpx.Client(transport=transport, timeout=_TIMEOUT_S) as http_client,
        Client(server.url, http_client=http_client) as client,
    ):
        data = digits()
        display.title("Learning to read handwritten digits")
        display.say(
            f"{len(data.train_labels):,} images to learn from. Every convolution and pooling, "
            f"forward and backward,\nis computed by the server at {server.url}."
        )
        # Made now and run later, so that a missing case is reported before the training.
        checks_to_run = run_checks(client, OPERATIONS, np.random.default_rng(_SEED))
        rng = np.random.default_rng(_SEED)
        network = Network(client, rng)
        training_started = time.perf_counter()
        steps = display.training(
            train(network, data, schedule, rng), schedule.steps(len(data.train_labels))
        )
        training_s = time.perf_counter() - training_started
        training_requests = meter.requests
        accuracy = steps[-1].test_accuracy or 0.0

        display.title("Every operation against a float64 reference")
        checks = display.checks(checks_to_run)

        draw_picture(picture, network, data, steps, TARGET_ACCURACY)
        network.forget()

    display.title("The demo in numbers")
    display.summary(
        Summary(
            test_accuracy=accuracy,
            test_images=len(data.test_labels),
            steps=len(steps),
            training_requests=training_requests,
            training_s=training_s,
            checks=checks,
            meter=meter,
            total_s=time.perf_counter() - started,
        )
    )
    display.say(f"\nThe picture is {escape(str(picture))}")
    _judge(accuracy, checks)


def _writable(folder: Path) -> Path:
    """Create the folder if needed, so that an error appears before the training, not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"the picture cannot be written to {folder}: {error}") from error
    return folder


def _judge(accuracy: float, checks: Sequence[CheckResult]) -> None:
    complaints = [
        f"{check.operation} is wrong by {check.worst_share:.3g} times the allowed error "
        f"in the case '{check.worst_case}'"
        for check in checks
        if not check.passed
    ]
    if accuracy < TARGET_ACCURACY:
        complaints.append(
            f"the network reads {accuracy:.2%} of the test images, expected "
            f"{TARGET_ACCURACY:.0%} or more"
        )
    if complaints:
        raise DemoError("\n".join(complaints))
