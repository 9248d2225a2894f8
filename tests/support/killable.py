"""Backends whose process a test can kill, and a steady load that checks every answer."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from convgrad import Client
from convgrad_service.backends.base import Outcome
from convgrad_service.problems import Problem
from tests.support.fake_backends import Sums
from tests.support.tree_server import TreeServer

POISON = -666.0


class Mortal(Sums):
    """Sums that take a while, and a process that does not survive a tensor full of poison."""

    def run(
        self,
        problem: Problem,
        tensors: Mapping[str, NDArray[Any]],
        cancelled: threading.Event | None = None,
        out: Mapping[str, NDArray[Any]] | None = None,
    ) -> Outcome:
        time.sleep(0.005)
        if tensors["weight"].flat[0] == POISON:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(problem, tensors, cancelled, out)


def mortal(device: int) -> Mortal:
    """See `Mortal`."""
    return Mortal()


class Load:
    """Threads that ask without a retry of their own, and check every answer."""

    def __init__(self, url: str, threads: int = 4) -> None:
        self.answered = 0
        self.longest_s = 0.0
        self._url, self._ended = url, threading.Event()
        self._pool = ThreadPoolExecutor(threads)
        self._running = [self._pool.submit(self._ask, seed) for seed in range(threads)]

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        with Client(self._url, max_retries=0, timeout=60) as client:
            while not self._ended.is_set():
                side = rng.choice((4, 8, 64, 1024))
                grad = np.full((1, 1, side, side), rng.randrange(4), np.float32)
                weight = np.full((1, 1, 1, 1), rng.randrange(4), np.float32)
                wire = "json" if rng.random() < 0.2 else "safetensors"
                began_s = time.monotonic()
                found = client.with_options(wire=wire).conv_bwd_data(grad, weight)
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                assert found.shape == grad.shape
                assert (found == grad.sum(dtype=np.float64) + weight.sum()).all()
                self.answered += 1

    def end(self) -> None:
        """Stop, and raise what went wrong."""
        self._ended.set()
        for running in self._running:
            running.result(120)
        self._pool.shutdown()


@contextlib.contextmanager
def load(url: str) -> Iterator[Load]:
    loading = Load(url)
    try:
        yield loading
    finally:
        loading.end()


def ready(server: TreeServer) -> bool:
    """Whether it says so."""
    return httpx.get(f"{server.url}/v2/health/ready", timeout=60).status_code == 200
