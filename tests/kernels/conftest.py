"""The `backend` fixture: the CPU backend and, with the mark `gpu`, GPU backends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cpu import CpuBackend
from tests.support.kernels import cuda_backends


def _cpu() -> Backend:
    return CpuBackend(threads=2)


BACKENDS = {"cpu": _cpu, **cuda_backends.MAKERS}


@pytest.hookimpl(tryfirst=True)  # before -m selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the emulator's tests, and those as slow that cover no further value of a parameter.

    Compiling a kernel instance for the emulator takes about a second. Of a test over (case, tile,
    dtype), `make test-gpu-code` runs combinations that include every case, tile and dtype at least
    once. `make test-slow` and GPU runs include the whole product.
    """
    products = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item.module, "works_here")
            and item.get_closest_marker("gpu") is None
        ):
            item.add_marker(pytest.mark.gpu_code)
        if (
            isinstance(item, pytest.Function)
            and hasattr(item.module, "EmulatedBackend")
            and item.get_closest_marker("gpu") is None
        ):
            products[item.module.__name__, item.originalname].append(item)
    for product in products.values():
        for item in set(product) - _covering(product):
            item.add_marker(pytest.mark.slow)


def _covering(product: Iterable[pytest.Function]) -> set[pytest.Function]:
    """Choose combinations of a test that include each value of each parameter (greedy cover)."""
    values = {item: _values(item) for item in product}
    missing = set().union(*values.values())
    kept = {item for item, of_item in values.items() if not of_item}
    while missing:
        best = max(values, key=lambda item: len(values[item] & missing))
        kept.add(best)
        missing -= values[best]
    return kept


def _values(item: pytest.Function) -> set[tuple[Hashable, ...]]:
    """Return the parameter values of a test. Names of one `parametrize` count as one parameter."""
    if not hasattr(item, "callspec"):
        return set()
    params = item.callspec.params
    together = {
        name: mark.args[0] for mark in item.iter_markers("parametrize") for name in _names(mark)
    }
    grouped: dict[Hashable, list[Hashable]] = defaultdict(list)
    for name in sorted(params):
        grouped[str(together.get(name, name))].append(id(params[name]))
    return {(names, *parts) for names, parts in grouped.items()}


def _names(mark: pytest.Mark) -> list[str]:
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize by backend. Runs without GPUs do not collect the 60,000 GPU tests."""
    if "backend" not in metafunc.fixturenames or hasattr(metafunc.module, "backend"):
        return
    without_gpu = "not gpu" in metafunc.config.getoption("markexpr")
    metafunc.parametrize(
        "backend",
        [
            pytest.param(name, marks=pytest.mark.gpu) if name in cuda_backends.MAKERS else name
            for name in BACKENDS
            if not (without_gpu and name in cuda_backends.MAKERS)
        ],
        indirect=True,
        scope="session",
    )


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """The backend chosen by ``pytest_generate_tests``."""
    return BACKENDS[request.param]()


@pytest.fixture(autouse=True)
def _fresh_memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill arrays made by np.empty with NaN, to detect elements that are never written."""
    empty = np.empty

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        array = empty(*args, **kwargs)
        if array.dtype != object and array.flags.c_contiguous:
            array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    monkeypatch.setattr(np, "empty", poisoned)
