"""Classification of CUDA errors: out of memory, or fatal for the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from convgrad_service.backends.cuda.device import import_cupy

__all__ = ["alloc_or_none", "fatal_fault"]

# Sticky errors, after which the process can no longer use the GPU. cudaError_t and CUresult share
# these numbers.
FATAL = {
    46: "the devices are busy or unavailable",
    100: "there is no device",
    101: "the device is invalid",
    214: "an uncorrectable memory error",
    220: "an uncorrectable NVLink error",
    226: "a contained memory error",
    700: "an illegal address",
    702: "a launch timeout",
    709: "the context is destroyed",
    710: "a device assertion",
    714: "a hardware stack error",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an invalid address space",
    718: "an invalid program counter",
    719: "a launch failure",
    720: "a cooperative launch too large",
    999: "an unknown error",
}
_OUT_OF_MEMORY = 2


def fatal_fault(error: BaseException) -> str | None:
    """Return what failed if the error is fatal for this process, else None."""
    return FATAL.get(_status(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had too little free memory."""
    cuda = import_cupy().cuda
    return isinstance(error, cuda.memory.OutOfMemoryError) or _status(error) == _OUT_OF_MEMORY


def _status(error: BaseException) -> int:
    cuda = import_cupy().cuda
    if isinstance(error, cuda.runtime.CUDARuntimeError | cuda.driver.CUDADriverError):
        return int(error.status)
    return 0


def alloc_or_none(alloc: Callable[[int], Any], size_bytes: int) -> Any:
    """Allocate device memory; return None if there is too little."""
    try:
        return alloc(size_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None
