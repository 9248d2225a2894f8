"""The plans and kernels of the service in the caller's process, on memory that the caller owns.

There is no server, event loop or second process. A framework bridge finds `executor` by the entry
point ``convgrad.executors``, prepares an operation once for each set of shapes, and launches it on
the addresses of its own tensors::

    device = executor("cuda", 0)
    backward = device.prepare("conv_bwd_data", {"grad_output": spec, "weight": spec}, {"stride": 2})
    backward.launch(addresses, workspace, stream)

The caller allocates outputs and workspace. Nothing is copied, and no call waits for the GPU.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from convgrad.errors import DeviceUnavailable, UnsupportedProblem
from convgrad_service.backends.cpu.library import load
from convgrad_service.inprocess.base import Executor, NotCompiled, Prepared, problem_of

__all__ = [
    "Executor",
    "NotCompiled",
    "Prepared",
    "executor",
    "native_driver",
    "native_library",
    "problem_of",
    "use_tuning",
]


@lru_cache(maxsize=64)
def executor(kind: str, index: int = 0) -> Executor:
    """Return the executor of one device, created once per process.

    Parameters
    ----------
    kind : {"cpu", "cuda"}
        The kind of device.
    index : int
        The number of the GPU; ignored for the CPU.

    Raises
    ------
    DeviceUnavailable
        The GPU, CuPy or a compiler for its kernels is missing.
    UnsupportedProblem
        There is no such kind of device.
    """
    if kind == "cpu":
        from convgrad_service.inprocess.cpu import CpuExecutor

        return CpuExecutor()
    if kind == "cuda":
        from convgrad_service.inprocess.cuda import CudaExecutor

        return CudaExecutor(index)
    raise UnsupportedProblem(f"tensors are on {kind!r}; expected cpu or cuda")


def native_library() -> ctypes.CDLL:
    """Return the library that holds ``native``.

    Raises
    ------
    DeviceUnavailable
        It has not been built, or is older than this package.
    """
    library = load()
    if not hasattr(library.handle, "convgrad_xla_settings"):
        raise DeviceUnavailable(
            f"the library of the CPU kernels for {library.level} is older than this package"
        )
    return library.handle


def native_driver() -> ctypes.Structure:
    """Return the addresses of the CUDA driver's functions, as ``native`` takes them.

    Raises
    ------
    DeviceUnavailable
        There is no driver, or it is too old.
    """
    from convgrad_service.inprocess.launch_plan import Driver

    return Driver.loaded()


def use_tuning(path: str | Path) -> None:
    """Take GPU kernels for tuned layers from a table, as written by ``convgrad kernels tune``.

    Call it before the first operation: plans that exist stay as they are.

    Raises
    ------
    ValueError
        The file cannot be read or is no such table.
    """
    from convgrad_service.backends.cuda.tuning.tuned import use_table

    use_table(Path(path))
