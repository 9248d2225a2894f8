"""Which backend a setting gives, on machines with and without a GPU."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from convgrad.errors import DeviceUnavailable
from convgrad_service.backends.cpu import CpuBackend
from convgrad_service.backends.cuda import backend
from convgrad_service.backends.cuda.backend import CudaBackend
from convgrad_service.backends.cuda.device import describe, device_count
from convgrad_service.backends.cuda.plan_process import PlanProcess
from convgrad_service.backends.selection import BackendOptions, backend_named
from convgrad_service.plans.cuda.device import H200

OPTIONS = BackendOptions(threads=1)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


def test_the_cpu_by_name() -> None:
    backend = backend_named("cpu", OPTIONS)
    assert isinstance(backend, CpuBackend)
    assert backend.device.threads == 1
    backend.close()


@pytest.mark.usefixtures("no_cupy")
def test_auto_without_a_gpu_is_the_cpu_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "convgrad.backends"):
        backend = backend_named("auto", OPTIONS)
    assert isinstance(backend, CpuBackend)
    assert "CuPy cannot be imported" in caplog.text
    backend.close()


@pytest.mark.usefixtures("no_cupy")
def test_a_gpu_asked_for_by_name_is_not_replaced() -> None:
    with pytest.raises(DeviceUnavailable, match=r"expected convgrad\[cuda13\]"):
        backend_named("cuda", OPTIONS)
    assert device_count() == 0
    with pytest.raises(DeviceUnavailable, match="0 GPUs"):
        describe(0)


def test_auto_takes_the_gpu_where_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    class Working(CudaBackend):
        def __init__(self, device: int, *, cache: Path, compilers_ahead: int) -> None:
            assert device == 0
            made.append(cache)
            self.device = H200

    monkeypatch.setattr(backend, "CudaBackend", Working)
    made_one = backend_named("auto", BackendOptions(kernel_cache=tmp_path))
    assert isinstance(made_one, Working)
    assert made == [tmp_path]
    assert getattr(made_one.plan, "__func__", None) is PlanProcess.plan
