"""`LoadGate`: loads and computations keep apart, and neither waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from convgrad_service.backends.cuda import load_gate
from convgrad_service.backends.cuda.load_gate import LoadGate


def test_computations_overlap() -> None:
    gate = LoadGate()
    with gate.computing(), ThreadPoolExecutor(1) as pool:

        def compute() -> bool:
            with gate.computing():
                return True

        assert pool.submit(compute).result(timeout=5)


def test_a_load_waits_for_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_gate, "LONGEST_WAIT_S", 5.0)
    gate, loaded = LoadGate(), threading.Event()

    def load() -> None:
        with gate.loading():
            loaded.set()

    with ThreadPoolExecutor(1) as pool:
        with gate.computing():
            pool.submit(load)
            assert not loaded.wait(0.1)
        assert loaded.wait(5)


def test_a_load_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_gate, "LONGEST_WAIT_S", 0.05)
    gate = LoadGate()
    with gate.computing():
        began_s = time.monotonic()
        with gate.loading():
            waited_s = time.monotonic() - began_s
    assert 0.05 <= waited_s < 2


def test_what_begins_to_compute_waits_for_loads_that_have_begun() -> None:
    gate, computed = LoadGate(), threading.Event()

    def compute() -> None:
        with gate.computing():
            computed.set()

    with ThreadPoolExecutor(1) as pool:
        with gate.loading(), gate.loading():
            pool.submit(compute)
            assert not computed.wait(0.1)
        assert computed.wait(5)


def test_errors_release_it() -> None:
    gate = LoadGate()
    with pytest.raises(ZeroDivisionError), gate.loading():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), gate.computing():
        raise ZeroDivisionError
    began_s = time.monotonic()
    with gate.loading():
        assert time.monotonic() - began_s < load_gate.LONGEST_WAIT_S
