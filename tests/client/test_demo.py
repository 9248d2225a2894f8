"""The demo against a server of its own: a few steps, and every way in which it can end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from convgrad import Client, ConnectionFailed
from convgrad.contract import OPERATIONS
from convgrad.demo import main
from convgrad.demo.cases import CASES
from convgrad.demo.checks import run_checks
from convgrad.demo.data import digits
from convgrad.demo.errors import DemoError
from convgrad.demo.metering import Meter, MeteredTransport
from convgrad.demo.network import Network, cross_entropy
from convgrad.demo.server import Server, local_server
from convgrad.demo.training import Schedule, train
from tests.support.tree_server import alive, until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with local_server() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


def test_a_few_steps_lower_the_loss(client: Client) -> None:
    rng = np.random.default_rng(0)
    training = train(Network(client, rng), digits(), Schedule(epochs=1), rng)
    losses = [next(training).loss for _ in range(15)]
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:3])


def test_the_images_gradient_is_that_of_the_loss(client: Client) -> None:
    """Finite differences through every layer, in the direction of the gradient itself."""
    data, rng = digits(), np.random.default_rng(1)
    network = Network(client, rng)
    images, labels = data.test_images[:4], data.test_labels[:4]

    def loss(at: np.ndarray) -> float:
        losses, _ = cross_entropy(network.forward(at.astype(np.float32)), labels)
        return float(losses.astype(np.float64).mean())

    _, grad_logits = cross_entropy(network.forward(images), labels)
    gradient = network.backward(grad_logits).astype(np.float64)
    direction = gradient / np.linalg.norm(gradient)
    step = 1e-3
    slope = (loss(images + step * direction) - loss(images - step * direction)) / (2 * step)
    assert slope == pytest.approx(np.linalg.norm(gradient), rel=0.02)


def test_a_step_leaves_on_the_server_what_only_the_server_needs(client: Client) -> None:
    meter = Meter()
    transport = MeteredTransport(httpx.HTTPTransport(), meter)
    rng = np.random.default_rng(0)
    with (
        httpx.Client(transport=transport, timeout=60) as http_client,
        Client(str(client._options.base_url), http_client=http_client) as metered,
    ):
        network = Network(metered, rng)
        before = set(client.stored())
        images = rng.random((32, 1, 8, 8), dtype=np.float32)
        _, grad_logits = cross_entropy(network.forward(images), np.arange(32) % 10)
        network.backward(grad_logits)
        kept = {name: tensor for name, tensor in client.stored().items() if name not in before}
        # With all of it sent both ways, 3.26 MB; the least of these would go twice.
        assert meter.sent_bytes + meter.received_bytes < 1_600_000
        assert len(kept) == 6
        assert sum(tensor.nbytes for tensor in kept.values()) > 800_000
        network.forget()
        assert set(client.stored()) == before


def test_every_operation_passes_its_checks(client: Client, seed: int) -> None:
    results = list(run_checks(client, OPERATIONS, np.random.default_rng(seed)))
    assert [result.operation for result in results] == list(OPERATIONS)
    assert [result for result in results if not result.passed] == []


def test_an_operation_without_a_check_is_an_error() -> None:
    rng, client = np.random.default_rng(0), Client("http://127.0.0.1:9", max_retries=0)
    with pytest.raises(DemoError, match="without a check: conv_of_tomorrow;"):
        run_checks(client, [*OPERATIONS, "conv_of_tomorrow"], rng)
    stray = replace(CASES[0], operation="conv_of_yesterday")
    with pytest.raises(DemoError, match="without an operation: conv_of_yesterday"):
        run_checks(client, OPERATIONS, rng, [*CASES, stray])


def test_the_meter_counts_what_goes_over_the_wire(server: Server) -> None:
    meter = Meter()
    transport = MeteredTransport(httpx.HTTPTransport(), meter)
    with (
        httpx.Client(transport=transport) as http_client,
        Client(server.url, http_client=http_client) as client,
    ):
        for _ in range(3):
            client.conv_fwd(np.ones((1, 1, 64), np.float32), np.ones((2, 1, 3), np.float32))
    assert meter.requests == 3
    assert meter.sent_bytes > 3 * 4 * 64
    assert meter.received_bytes > 3 * 4 * 2 * 62
    assert 0 < meter.median_s < 60


def test_its_server_ends_with_its_block_even_on_an_error() -> None:
    with pytest.raises(ZeroDivisionError), local_server() as server:
        raise ZeroDivisionError
    assert server.process is not None
    assert server.process.returncode is not None


def test_a_server_that_dies_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with local_server() as server, Client(server.url, max_retries=0) as client:
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        with pytest.raises(ConnectionFailed):
            client.conv_fwd(np.ones((1, 1, 4), np.float32), np.ones((1, 1, 1), np.float32))
        assert "ended on its own (signal 9)" in server.epitaph()


def test_too_low_an_accuracy_fails_the_demo(
    tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    """One epoch does not learn enough; everything up to the verdict is there all the same."""
    assert main(["--url", server.url, "--epochs", "1", "--output", str(tmp_path)]) == 1
    shown = capfd.readouterr().out
    assert re.search(r"The demo failed: the network reads \d\d\.\d\d% of .* expected 97%", shown)
    assert "epoch  1 of 1" in shown
    assert all(operation in shown for operation in OPERATIONS)
    assert (tmp_path / "convgrad-demo.png").stat().st_size > 10_000


def test_a_folder_that_cannot_be_made_ends_the_demo_before_training(
    tmp_path: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "a-file"
    taken.touch()
    assert main(["--url", server.url, "--output", str(taken)]) == 1
    shown = capfd.readouterr().out
    assert "cannot be written to" in shown
    assert "epoch" not in shown


def test_no_server_at_the_url(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers at http://127.0.0.1:9" in capfd.readouterr().out


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Processes that a shell runs in the background ignore SIGINT, and so would their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "convgrad", "demo", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            while (line := demo.stdout.readline()) and "the server at" not in line:
                pass
            assert line, "the demo ended before its training"
            children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
            assert children
            demo.send_signal(number)
            assert demo.wait(timeout=60) == 128 + number
        finally:
            demo.terminate()
    until(lambda: not any(alive(int(child)) for child in children))
