"""Every program in examples/ runs against a real server and prints what it should."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from convgrad_service.backends.cpu import CpuBackend
from tests.support.oip_server import OipServer, serving_oip

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, CLIENT = ROOT / "examples", str(ROOT / "client")


@pytest.fixture(scope="module")
def server() -> Iterator[OipServer]:
    with serving_oip(CpuBackend()) as server:
        yield server


def run(server: OipServer, *command: str | Path, **environment: str) -> str:
    addresses = {"CONVGRAD_URL": f"http://{server.http}", "CONVGRAD_GRPC": server.grpc}
    env = {**os.environ, **addresses, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: OipServer) -> None:
    answer = json.loads(run(server, EXAMPLES / "curl.sh"))
    # grad_output convolved in full with the diagonal (1, -1), by hand
    assert answer["grad_input"]["values"] == [[[[1, 2, 0], [3, 3, -2], [0, -3, -4]]]]


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_node(server: OipServer) -> None:
    assert run(server, "node", EXAMPLES / "node.mjs") == "1x2x8x8 36"


def test_tritonclient(server: OipServer) -> None:
    assert run(server, sys.executable, EXAMPLES / "tritonclient_grpc.py") == "1x2x8x8 36.0"


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_cpp(server: OipServer, tmp_path: Path) -> None:
    program = tmp_path / "http"
    command = ["c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-o", program]
    subprocess.run([*command, EXAMPLES / "http.cpp"], check=True)
    host, _, port = server.http.rpartition(":")
    assert run(server, program, host, port) == "1x2x8x8 36"
    refused = subprocess.run([program, host, "9"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "convgrad serve" in refused.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_torch(server: OipServer) -> None:
    said = run(server, sys.executable, EXAMPLES / "torch_training.py")
    (before, after), *_ = re.findall(r"the loss fell from (.*) to (.*)", said)
    assert float(after) < float(before) / 2
    assert "remote" in said


@pytest.mark.timeout(1200)  # a minute of computing, on a machine that may be busy
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_resnet_losses(server: OipServer, tmp_path: Path) -> None:
    plot = tmp_path / "losses.png"
    said = run(server, sys.executable, EXAMPLES / "resnet_losses.py", plot)
    spread, apart = re.findall(r"\d\.\de[+-]\d+", said)
    assert float(apart) <= float(spread)
    for after in re.findall(r"loss with .*: .* to (.*)", said):
        assert float(after) < 0.5
    assert plot.stat().st_size > 10_000


@pytest.fixture
def python(request: pytest.FixtureRequest) -> Path:
    """That of an environment with JAX and Jupyter's kernel."""
    found = request.config.getoption("--examples-python")
    if found is None:
        pytest.skip("needs --examples-python, see `make test-examples`")
    return Path(found).absolute()


def test_jax(server: OipServer, python: Path) -> None:
    said = run(server, python, EXAMPLES / "jax_gradient.py", PYTHONPATH=CLIENT)
    compared, fell = said.splitlines()
    assert compared == "as JAX's own: True"
    before, after = re.findall(r"\d\.\d\d", fell)
    assert float(after) < float(before) / 2


def test_notebook(server: OipServer, python: Path, tmp_path: Path) -> None:
    run_it = (
        "import nbclient, nbformat, sys; book = nbformat.read(sys.argv[1], 4);"
        "nbclient.NotebookClient(book, timeout=120).execute(); print(nbformat.writes(book))"
    )
    book = EXAMPLES / "notebook.ipynb"
    cells = json.loads(run(server, python, "-c", run_it, book, PYTHONPATH=CLIENT))["cells"]
    shown = json.dumps([cell.get("outputs") for cell in cells])
    assert "<table><caption>Answer</caption>" in shown
    for text in ("weight has shape (5, 8, 3, 3)", "((8, 8, 28, 28),", "(True,"):
        assert text in shown, text
    assert not any(cell.get("outputs") for cell in json.loads(book.read_text())["cells"])


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text()
    for example in EXAMPLES.iterdir():
        assert f'"{example.name}"' in here, example
