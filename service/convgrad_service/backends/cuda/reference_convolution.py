"""Reference convolutions in float64 on a GPU, by ``reference_convolution.cu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import Float
from convgrad.check.convolve import wide
from convgrad.check.geometry import Geometry
from convgrad_service.backends.cuda.compile import OPTIONS
from convgrad_service.backends.cuda.device import import_cupy
from convgrad_service.backends.cuda.nvrtc import Nvrtc

__all__ = ["SOURCE", "CudaConvolver", "ReferenceKernels", "packed_geometry"]

Array = NDArray[Any]
Both = tuple[Float, Float]

SOURCE = Path(__file__).with_name("reference_convolution.cu")
THREADS = 128
# Threads that fill a GPU. A weight gradient with fewer elements is split along the samples.
_MANY = 2**18


def packed_geometry(
    batch: int, groups: int, channels: int, out_channels: int, geometry: Geometry
) -> NDArray[np.int64]:
    """Return the kernels' argument; missing dimensions have one element."""
    missing = 3 - len(geometry.kernel_size)

    def three(values: Sequence[int], filler: int) -> list[int]:
        return [filler] * missing + list(values)

    return np.array(
        [
            batch,
            groups,
            channels,
            out_channels,
            *three(geometry.input_size, 1),
            *three(geometry.output_size, 1),
            *three(geometry.kernel_size, 1),
            *three(geometry.stride, 1),
            *three(geometry.before, 0),
            *three(geometry.dilation, 1),
        ],
        np.int64,
    )


class ReferenceKernels:
    """The three kernels of one device, compiled on first use."""

    def __init__(self, nvrtc: Nvrtc, architecture: str) -> None:
        self._nvrtc, self._architecture = nvrtc, architecture
        self._loaded: Mapping[str, Any] | None = None

    def function(self, name: str) -> Any:
        """Return a kernel; the device must be current."""
        if self._loaded is None:
            options = (*OPTIONS, f"--gpu-architecture={self._architecture}")
            code, _ = self._nvrtc.compile(SOURCE.read_text("utf-8"), SOURCE.name, options)
            module = import_cupy().cuda.Module()
            module.load(code)
            names = ("forward", "backward_data", "backward_weight")
            self._loaded = {each: module.get_function(each) for each in names}
            self._module = module
        return self._loaded[name]


class CudaConvolver:
    """See `Convolver`. ``device`` is CuPy's; each call makes it current."""

    name = "cuda"

    def __init__(self, kernels: ReferenceKernels, device: Any, check: Callable[[], None]) -> None:
        self._kernels, self._device, self._check = kernels, device, check

    def forward(self, x: Array, w: Array, geometry: Geometry) -> Both:
        """See `Convolver`."""
        n, g, c = x.shape[:3]
        shape = (n, g, w.shape[1], *geometry.output_size)
        return self._run("forward", (n, g, c, w.shape[1]), geometry, (x, w), shape)

    def backward_data(self, y: Array, w: Array, geometry: Geometry) -> Both:
        """See `Convolver`."""
        n, g, k = y.shape[:3]
        shape = (n, g, w.shape[2], *geometry.input_size)
        return self._run("backward_data", (n, g, w.shape[2], k), geometry, (y, w), shape)

    def backward_weight(self, x: Array, y: Array, geometry: Geometry) -> Both:
        """See `Convolver`."""
        n, g, c = x.shape[:3]
        shape = (g, y.shape[2], c, *geometry.kernel_size)
        parts = max(1, min(n, _MANY // max(1, prod(shape))))
        return self._run("backward_weight", (n, g, c, y.shape[2]), geometry, (x, y), shape, parts)

    def _run(
        self,
        name: str,
        sizes: tuple[int, int, int, int],
        geometry: Geometry,
        operands: tuple[Array, Array],
        shape: tuple[int, ...],
        parts: int = 1,
    ) -> Both:
        self._check()
        cupy = import_cupy()
        with self._device:
            given = [cupy.asarray(wide(each)) for each in operands]
            packed = cupy.asarray(packed_geometry(*sizes, geometry))
            value, magnitude = (cupy.empty((parts, *shape), cupy.float64) for _ in range(2))
            blocks = -(-prod(shape) // THREADS)
            self._kernels.function(name)(
                (blocks, parts), (THREADS,), (packed, *given, value, magnitude)
            )
            found = cupy.asnumpy(value), cupy.asnumpy(magnitude)
        return found[0].sum(axis=0), found[1].sum(axis=0)
