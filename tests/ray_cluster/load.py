"""Clients that keep a service busy and check every result."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import convgrad

__all__ = ["Load", "throughput"]


@dataclass
class Load:
    """Clients that send one problem after another until the block ends."""

    url: str
    clients: int
    shape: tuple[int, int, int, int] = (4, 32, 28, 3)
    """Batch, channels, image size and kernel size of a convolution."""
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        rng = np.random.default_rng(1)
        n, c, side, kernel = self.shape
        self._padding = kernel // 2
        self._dy = rng.integers(-2, 3, (n, c, side, side)).astype(np.float32)
        self._w = rng.integers(-2, 3, (c, c, kernel, kernel)).astype(np.float32)
        with convgrad.Client(self.url, timeout=120) as client:
            self._wanted = self._ask(client)
        self._threads = [threading.Thread(target=self._send) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, answers: int, within_s: float = 120.0) -> None:
        """Wait until this many requests in total have been answered, or one has failed."""
        end_s = time.monotonic() + within_s
        while self.answered < answers and not self.failed:
            assert time.monotonic() < end_s, f"{self.answered} answered, expected {answers}"
            time.sleep(0.05)

    def _ask(self, client: convgrad.Client) -> np.ndarray[Any, Any]:
        return client.conv_bwd_data(self._dy, self._w, padding=self._padding)

    def _send(self) -> None:
        # No retries: a lost request must count as failed.
        with convgrad.Client(self.url, timeout=120, max_retries=0) as client:
            while not self._stop.is_set():
                try:
                    found = self._ask(client)
                except convgrad.ConvgradError as error:
                    self.failed.append(f"{type(error).__name__}: {error}")
                    continue
                if not np.array_equal(found, self._wanted):
                    self.failed.append("wrong result")
                self.answered += 1


def throughput(url: str, clients: int, seconds: float, shape: tuple[int, int, int, int]) -> float:
    """Measure requests per second."""
    with Load(url, clients, shape) as load:
        time.sleep(1)
        before, started = load.answered, time.monotonic()
        time.sleep(seconds)
        rate = (load.answered - before) / (time.monotonic() - started)
    assert not load.failed, load.failed[:3]
    return rate
