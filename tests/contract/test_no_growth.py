"""Thousands of requests leave every process as they found it: its memory and its files."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad import Client
from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.base import Outcome
from convgrad_service.problems import Problem
from tests.support.fake_backends import Sums, Zeros
from tests.support.tree_server import TreeServer, descriptors, serving_tree

pytestmark = pytest.mark.processes

# What allocators and caches of a process may gain after they are warm; a leaked request of the
# mean size here would be more than twice this after three hundred of them.
MOST_GROWTH_BYTES = 24 * 2**20


class Failing(Zeros):
    """Allocates 32 MiB for every problem, and fails."""

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        workspace = np.ones(2**22)
        raise DeadlineExceeded(f"{workspace.nbytes} bytes were not enough")


def sums(device: int) -> Sums:
    """See `Sums`."""
    return Sums()


def failing(device: int) -> Failing:
    """See `Failing`."""
    return Failing()


def resident_bytes(process: int) -> int:
    """A process's own memory, the arena that all share not counted."""
    fields = Path(f"/proc/{process}/status").read_text().splitlines()
    kib = {line.split(":")[0]: line.split()[1] for line in fields if line.startswith("Rss")}
    return (int(kib["RssAnon"]) + int(kib["RssFile"])) * 1024


def ask(url: str, requests: int, seed: int) -> None:
    """Mixed sizes, forms and layers, from one client."""
    rng = random.Random(seed)
    with Client(url, timeout=60) as client:
        for _ in range(requests):
            wire = rng.choice(("safetensors", "safetensors", "safetensors", "json"))
            shape = (1, rng.choice((1, 2, 3)), rng.choice((4, 32, 256)), rng.choice((4, 33, 250)))
            grad = np.full(shape, rng.randrange(3), np.float32)
            weight = np.ones((shape[1], 1, 1, 1), np.float32)
            found = client.with_options(wire=wire).conv_bwd_data(grad, weight)
            assert (found == grad.sum(dtype=np.float64) + weight.sum()).all()


def asked(server: TreeServer, requests: int) -> dict[int, tuple[int, int]]:
    """Memory and files of every process after so many requests from four clients."""
    with ThreadPoolExecutor(4) as asking:
        done = [asking.submit(ask, server.url, requests // 4, seed) for seed in range(4)]
        for one in done:
            one.result()
    server.settled_bytes()
    return {child: (resident_bytes(child), descriptors(child)) for child in server.children()}


@pytest.mark.parametrize(
    "requests", [600, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_thousands_of_requests_leave_nothing_behind(requests: int) -> None:
    with serving_tree(sums, max_inflight_bytes="256MiB") as server:
        before = asked(server, requests // 2)
        held, kept = server.held_bytes, server.tree.hub.arena.resident_bytes()
        after = asked(server, requests)
        assert server.held_bytes == held
        # Of the arena, the pages that requests have used stay, and no more than so many.
        assert server.tree.hub.arena.resident_bytes() <= max(kept, 64 * 2**20)
        assert after.keys() == before.keys()
        for child, (memory, files) in after.items():
            assert memory - before[child][0] < MOST_GROWTH_BYTES, (before, after)
            assert files <= before[child][1] + 4  # connections that are kept for their clients
            # The arena has no name: a container's /dev/shm is small, and open to others.
            mapped = Path(f"/proc/{child}/maps").read_text()
            assert "/dev/shm" not in mapped  # noqa: S108


def test_problems_that_fail_leave_nothing_behind() -> None:
    with serving_tree(failing) as server, Client(server.url, timeout=60, max_retries=0) as client:
        worker = server.worker_id
        assert worker is not None
        before_bytes = resident_bytes(worker)
        for _ in range(8):
            with pytest.raises(DeadlineExceeded):
                client.conv_bwd_data(
                    np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 1, 1), np.float32)
                )
        # The server keeps one for the next problem.
        assert resident_bytes(worker) - before_bytes < 2 * 32 * 2**20
