"""Requests whose kernels must be compiled first, sent together with warm requests.

Kernels are compiled by a GPU's backend alone; here a backend's problems are cold until a file says
that they are compiled.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convgrad import Client
from convgrad.errors import ClientTimeout, DeadlineExceeded, Internal
from convgrad_service.backends.base import Outcome
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.problems import Problem
from convgrad_service.server.warm_up import warm_up
from tests.support.tree_server import TreeServer, serving_tree, until

pytestmark = pytest.mark.processes

WARM = np.ones((1, 3, 8, 8), np.float32)
WEIGHT = np.ones((2, 3, 3, 3), np.float32)
SLOTS = 2
File = Callable[[int, str], Path]


class Cold(CpuBackend):
    """Takes problems of more than one image for cold, until a file says that it is not."""

    def __init__(self, folder: Path) -> None:
        super().__init__(threads=1)
        self._folder = folder
        self._waiting: dict[int, Future[None]] = {}
        threading.Thread(target=self._compile, daemon=True).start()

    def compile_ahead(self, problems: Sequence[Problem]) -> Future[None] | None:
        images = next(iter(problems[0].inputs.values())).shape[0]
        if images == 1 or (self._folder / f"{images}.done").exists():
            return None
        (self._folder / f"{images}.begun").touch()
        compiled = self._waiting[images] = Future()
        compiled.add_done_callback(
            lambda done: (
                (self._folder / f"{images}.cancelled").touch() if done.cancelled() else None
            )
        )
        return compiled

    def _compile(self) -> None:
        while True:
            time.sleep(0.005)
            for images, compiled in list(self._waiting.items()):
                if compiled.done():
                    continue
                if (self._folder / f"{images}.done").exists():
                    compiled.set_result(None)
                elif (self._folder / f"{images}.refused").exists():
                    compiled.set_exception(RuntimeError("the source was refused"))


class Waiting(Cold):
    """Waits for what it compiles, as a GPU's backend does; counts what it has run."""

    def run(self, problem: Problem, *others: Any, **more: Any) -> Outcome:
        compiled = self.compile_ahead([problem])
        if compiled is not None:
            compiled.result(60)
        images = next(iter(problem.inputs.values())).shape[0]
        with (self._folder / f"{images}.ran").open("a") as ran:
            ran.write("1")
        return super().run(problem, *others, **more)


def waiting(folder: Path, device: int) -> Waiting:
    return Waiting(folder)


def cold(folder: Path, device: int) -> Cold:
    return Cold(folder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TreeServer]:
    with serving_tree(partial(cold, tmp_path), slots=SLOTS) as tree:
        yield tree


@pytest.fixture
def file(tmp_path: Path) -> File:
    """The event that the backend or the test sets for the problem with this number of images."""
    return lambda images, what: tmp_path / f"{images}.{what}"


def ask(server: TreeServer, images: int, **options: Any) -> Any:
    with Client(server.url, **options) as client:
        return client.conv_fwd(WARM.repeat(images, 0), WEIGHT)


def test_warm_requests_are_answered_while_cold_ones_wait(server: TreeServer, file: File) -> None:
    numbers = range(2, 2 + 2 * SLOTS)
    with ThreadPoolExecutor(len(numbers)) as pool:
        waiting = {images: pool.submit(ask, server, images) for images in numbers}
        until(lambda: all(file(images, "begun").exists() for images in numbers))
        for _ in range(10):
            assert ask(server, 1).shape == (1, 2, 6, 6)
        assert not any(each.done() for each in waiting.values())
        for images in numbers:
            file(images, "done").touch()
            assert waiting[images].result(60).shape == (images, 2, 6, 6)
    until(lambda: server.held_bytes == server.settled_bytes())


def test_one_that_is_refused_is_an_internal_error_and_no_other_fails(
    server: TreeServer, file: File
) -> None:
    file(2, "refused").touch()
    with pytest.raises(Internal) as failed:
        ask(server, 2, max_retries=0)
    assert "refused" not in str(failed.value)
    assert ask(server, 1).shape == (1, 2, 6, 6)


def test_one_that_nobody_waits_for_any_more_is_given_up(server: TreeServer, file: File) -> None:
    with pytest.raises((DeadlineExceeded, ClientTimeout)):
        ask(server, 2, timeout=1.0, max_retries=0)
    until(file(2, "cancelled").exists)
    assert ask(server, 1).shape == (1, 2, 6, 6)


def test_a_worker_that_dies_meanwhile_costs_no_request(server: TreeServer, file: File) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, server, 2)
        until(file(2, "begun").exists)
        file(2, "begun").unlink()
        server.kill_worker()
        until(file(2, "begun").exists)
        file(2, "done").touch()
        assert waiting.result(60).shape == (2, 2, 6, 6)


def test_what_is_warmed_up_is_compiled_and_computed_before_the_server_is_ready(
    tmp_path: Path, file: File
) -> None:
    path = tmp_path / "requests"
    tensors = {
        "input": {"shape": [2, *WARM.shape[1:]], "dtype": "float32"},
        "weight": {"shape": WEIGHT.shape, "dtype": "float32"},
    }
    path.write_text(json.dumps({"operation": "conv_fwd", **tensors}))
    warm = partial(warm_up, path)
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(lambda: until(file(2, "begun").exists))
        begun.add_done_callback(lambda _: file(2, "done").touch())
        with serving_tree(partial(waiting, tmp_path), slots=SLOTS, warm_up=warm) as tree:
            assert begun.done()
            assert file(2, "ran").read_text() == "1"
            assert ask(tree, 2).shape == (2, 2, 6, 6)
            tree.kill_worker()
            assert file(2, "ran").read_text() == "11", "the next worker is ready without it"
