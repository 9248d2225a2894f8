"""The GPU's float64 convolutions, compiled for the CPU thread by thread, against NumPy's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.check.convolve import NumpyConvolver, wide
from convgrad.check.geometry import Geometry
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.backends.cuda.reference_convolution import (
    SOURCE,
    THREADS,
    CudaConvolver,
    packed_geometry,
)
from tests.support.numerics.geometries import CONVS, Conv

# What CUDA gives a kernel, as plain variables that the loop below sets.
_SHIM = """
struct Dim { unsigned x, y, z; };
static Dim blockIdx, threadIdx, blockDim, gridDim;
static double fabs(double value) { return value < 0 ? -value : value; }
#define __global__ static
#define __device__ static
#include "%s"
#define RUN(kernel) extern "C" void run_##kernel(unsigned blocks, unsigned parts, \\
        unsigned threads, const void* shape, const double* a, const double* b, \\
        double* value, double* magnitude) { \\
    gridDim = {blocks, parts, 1}; blockDim = {threads, 1, 1}; \\
    for (unsigned y = 0; y < parts; ++y) \\
        for (unsigned x = 0; x < blocks; ++x) \\
            for (unsigned t = 0; t < threads; ++t) { \\
                blockIdx = {x, y, 0}; threadIdx = {t, 0, 0}; \\
                kernel((const Geometry*)shape, a, b, value, magnitude); } }
RUN(forward) RUN(backward_data) RUN(backward_weight)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("reference")
    # extern "C" beside static is CUDA's alone.
    text = SOURCE.read_text("utf-8").replace('extern "C" __global__', "__global__")
    (folder / "kernels.inc").write_text(text)
    (folder / "shim.cpp").write_text(_SHIM % "kernels.inc")
    target = folder / "reference.so"
    command = [sys.executable, "-m", "ziglang", "c++", "-O1", "-shared", "-fPIC", "-nostdlib++"]
    subprocess.run(
        [*command, "-o", str(target), str(folder / "shim.cpp")],
        check=True,
        env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder / "cache")},
    )
    return ctypes.CDLL(str(target))


class Emulated(CudaConvolver):
    """The launches of `CudaConvolver`, run by a loop."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _run(
        self,
        name: str,
        sizes: Any,
        geometry: Geometry,
        operands: Any,
        shape: tuple[int, ...],
        parts: int = 1,
    ) -> Any:
        given = [wide(each) for each in operands]
        packed = packed_geometry(*sizes, geometry)
        value, magnitude = (np.full((parts, *shape), np.nan) for _ in range(2))
        blocks = -(-int(np.prod(shape)) // THREADS)
        arrays = (packed, *given, value, magnitude)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
        getattr(self._library, f"run_{name}")(blocks, parts, THREADS, *pointers)
        return value.sum(axis=0), magnitude.sum(axis=0)


def operands(conv: Conv) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], Geometry]:
    rng = np.random.default_rng(len(conv.kernel))

    def drawn(shape: tuple[int, ...]) -> NDArray[Any]:
        return rng.integers(-2, 3, shape).astype(np.float32)

    groups = conv.groups
    n, c, *size = conv.input_shape
    k, _, *kernel = conv.weight_shape
    x = drawn((n, groups, c // groups, *size))
    w = drawn((groups, k // groups, c // groups, *kernel))
    geometry = Geometry.of(conv.params, kernel, input_size=size)
    y = drawn((n, groups, k // groups, *geometry.output_size))
    return x, w, y, geometry


@pytest.mark.parametrize("name", CONVS)
def test_both_references_agree(name: str, library: ctypes.CDLL) -> None:
    x, w, y, geometry = operands(CONVS[name])
    on_gpu, on_cpu = Emulated(library), NumpyConvolver()
    for found, wanted in (
        (on_gpu.forward(x, w, geometry), on_cpu.forward(x, w, geometry)),
        (on_gpu.backward_data(y, w, geometry), on_cpu.backward_data(y, w, geometry)),
        (on_gpu.backward_weight(x, y, geometry), on_cpu.backward_weight(x, y, geometry)),
    ):
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])


def test_an_infinity_meets_only_what_it_meets(library: ctypes.CDLL) -> None:
    x, w, _, geometry = operands(CONVS["plain"])
    x[0, 0, 0, 0, 0] = w[0, 0, 0, 0, 0] = np.inf
    found = Emulated(library).forward(x, w, geometry)
    wanted = NumpyConvolver().forward(x, w, geometry)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert np.isfinite(found[0]).any()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
def test_it_compiles_for_every_architecture(architecture: str) -> None:
    try:
        nvrtc = find_nvrtc()
    except CompileError as missing:
        pytest.skip(str(missing))
    options = ["-std=c++20", f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    code, log = nvrtc.compile(SOURCE.read_text("utf-8"), Path(SOURCE).name, options)
    assert code.startswith(b"\x7fELF")
    assert "0 bytes spill stores" in log
