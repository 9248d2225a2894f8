"""What a plan needs to know of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType

__all__ = [
    "ARCHITECTURES",
    "H200",
    "HOPPER",
    "OVERLAPPING",
    "SHARED_BYTES",
    "CudaDevice",
    "architecture_of",
    "sum_dtype",
]
__all__ += ["with_shared_bytes"]

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100")
"""What kernels are compiled for where no device says otherwise: Ampere to Blackwell."""

SHARED_BYTES = {"sm_80": 166_912, "sm_89": 101_376, "sm_90a": 232_448, "sm_100": 232_448}
"""Of shared memory, that one block may have."""

HOPPER = ("sm_90a",)
"""The one architecture of wgmma and its kin."""

OVERLAPPING = (9, 0)
"""From this capability on, a launch may overlap the one before it."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU model: what decides how a problem is computed, and nothing that changes meanwhile.

    ``shared_bytes_per_block`` is what one block may ask for, dynamic memory included.
    ``memory_bytes`` is all of the memory that may be used, free or not.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int
    l2_bytes: int
    memory_bytes: int

    @property
    def architecture(self) -> str:
        return architecture_of(self.capability)

    def why_not_shared(self, needed_bytes: int) -> str | None:
        """Why a block cannot have so much shared memory."""
        if needed_bytes <= self.shared_bytes_per_block:
            return None
        return (
            f"a block needs {needed_bytes} bytes of shared memory and there are "
            f"{self.shared_bytes_per_block}"
        )


def architecture_of(capability: tuple[int, int]) -> str:
    """The name that the compiler takes: ``sm_90a`` for Hopper, whose own instructions need it."""
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


H200 = CudaDevice("NVIDIA H200", (9, 0), 132, 232448, 233472, 60 * 2**20, 150_000_000_000)
"""An example, for plans made where there is no GPU."""


def with_shared_bytes(needed: int) -> tuple[str, ...]:
    """The architectures on which a block may have so much shared memory."""
    return tuple(name for name in ARCHITECTURES if SHARED_BYTES[name] >= needed)


def sum_dtype(dtype: DType) -> DType:
    """What elements of this type are summed in."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
