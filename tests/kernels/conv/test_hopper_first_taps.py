"""Weight gradients of first layers on Hopper, on every backend and emulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convgrad_service.backends.base import Backend
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.conv.hopper_first_taps import HopperFirstTaps
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment
from convgrad_service.plans.cuda.works import ConvWork
from tests.emulator.backend import EmulatedBackend, works_here
from tests.support.kernels.first_layer_cases import CASES
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.nonfinite import check_rule

NONFINITE = ("resnet", "alexnet", "patches", "asymmetric_padding", "vgg", "odd_width", "3d")
emulation = pytest.mark.skipif(not works_here(), reason="the emulator is written for x86-64")


class Few(HopperFirstTaps):
    """The family with several rows of several images per block."""

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        return super().launches(replace(work, split_k=work.split_k or 3), device)


def emulated() -> EmulatedBackend:
    return EmulatedBackend(replace(FAMILIES, bwd_weight=(Few(),)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_gates(backend: Backend, seed: int, name: str, dtype: str) -> None:
    gates(backend, seed, CASES[name], dtype, with_layouts(CASES[name].ndim, grouped=False))


@pytest.mark.parametrize("name", NONFINITE)
def test_nonfinite(backend: Backend, seed: int, name: str) -> None:
    check_rule(
        backend, seed, CASES[name], "bfloat16", with_layouts(CASES[name].ndim, grouped=False)[-1]
    )


@emulation
@pytest.mark.parametrize("name", CASES)
def test_emulated(seed: int, name: str) -> None:
    gates(
        emulated(),
        seed,
        CASES[name],
        "bfloat16",
        with_layouts(CASES[name].ndim, grouped=False)[-1:],
    )


@emulation
@pytest.mark.parametrize("name", ["resnet", "patches"])
def test_emulated_float16(seed: int, name: str) -> None:
    gates(
        emulated(), seed, CASES[name], "float16", with_layouts(CASES[name].ndim, grouped=False)[-1:]
    )


@emulation
@pytest.mark.parametrize("name", NONFINITE)
def test_emulated_nonfinite(seed: int, name: str) -> None:
    check_rule(
        emulated(), seed, CASES[name], "bfloat16", with_layouts(CASES[name].ndim, grouped=False)[-1]
    )
