"""A request enters only files that docs/architecture.md lists, as far as the hub's process goes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.support.fake_backends import Zeros
from tests.support.http_server import EXAMPLE, JSON, SAFETENSORS, binary_example
from tests.support.tree_server import TreeServer, serving_tree

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "service" / "convgrad_service"
# The process tree, and what is called by timers rather than by a request.
OTHERS = ("server/", "problems/", "engine/workers/supervisor.py")

Asking = Callable[[TreeServer], AbstractContextManager[Callable[[], object]]]


class Entered:
    """The files of the service whose functions are entered while ``on``, in that order."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.on = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if self.on and event == "call" and path.startswith(f"{PACKAGE}/"):
            found = path.removeprefix(f"{PACKAGE}/")
            if not found.startswith(OTHERS):
                self.files[found] = None


@pytest.fixture(scope="module")
def entered() -> Iterator[Entered]:
    found = Entered()
    threading.setprofile(found)
    yield found
    threading.setprofile(None)


@pytest.fixture(scope="module")
def server(entered: Entered) -> Iterator[TreeServer]:
    with serving_tree(zeros) as running:
        yield running


def zeros(_: int) -> Zeros:
    return Zeros()


def documented() -> set[str]:
    """The names of files in the section about a request's path."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition("## The path of a request")[2].partition("\n## ")[0]
    return {name.rpartition("/")[2] for name in re.findall(r"`([a-z_/]+\.py)`", section)}


def over_http(content: bytes, media_type: str) -> Asking:
    @contextmanager
    def asking(server: TreeServer) -> Iterator[Callable[[], object]]:
        headers = {"Content-Type": media_type}
        with httpx.Client(base_url=server.url, headers=headers) as client:
            yield lambda: client.post("/conv_bwd_data", content=content).raise_for_status()

    return asking


@contextmanager
def over_grpc(server: TreeServer) -> Iterator[Callable[[], object]]:
    arrays = {name: np.ones((1, 1, 2, 2), np.float32) for name in ("grad_output", "weight")}
    inputs = [
        triton.InferInput(name, array.shape, "FP32").set_data_from_numpy(array)
        for name, array in arrays.items()
    ]
    with triton.InferenceServerClient(server.grpc) as client:
        yield lambda: client.infer("conv_bwd_data", inputs)


@pytest.mark.parametrize(
    ("asking", "most"),
    [
        pytest.param(over_http(binary_example(), SAFETENSORS), 15, id="binary"),
        pytest.param(over_http(EXAMPLE, JSON), 15, id="JSON"),
        pytest.param(over_grpc, 13, id="gRPC"),
    ],
)
def test_a_request_enters_only_documented_files(
    server: TreeServer, entered: Entered, asking: Asking, most: int
) -> None:
    """The second of its kind; the worker's process has ``workers/worker.py`` in addition."""
    with asking(server) as ask:
        ask()
        entered.files.clear()
        entered.on = True
        try:
            ask()
        finally:
            entered.on = False
    found = list(entered.files)
    assert {file.rpartition("/")[2] for file in found} <= documented(), found
    assert len(found) <= most, found
