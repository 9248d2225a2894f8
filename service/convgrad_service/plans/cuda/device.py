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
    "architectures_before",
    "architectures_since",
    "listed_architecture",
    "sum_dtype",
    "with_shared_bytes",
]

SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90a": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
"""Of shared memory, that one block may have, by architecture."""

ARCHITECTURES = tuple(SHARED_BYTES)
"""What kernels are compiled for where no device says otherwise, the oldest first: Ampere to
Blackwell."""

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
        """What its kernels are compiled for."""
        return architecture_of(self.capability)

    def why_not_shared(self, needed_bytes: int) -> str | None:
        """Why a block cannot have so much shared memory."""
        if needed_bytes <= self.shared_bytes_per_block:
            return None
        return (
            f"a block needs {needed_bytes} bytes of shared memory and there are "
            f"{self.shared_bytes_per_block}"
        )


# Beside a chip of their own kind they run no other's code, though their capability says so.
_SYSTEMS_ON_CHIP = {(8, 7), (10, 1), (11, 0)}


def architecture_of(capability: tuple[int, int]) -> str:
    """What the kernels of a device are compiled for, as the compiler takes it.

    The newest of `ARCHITECTURES` whose code the device runs: one of the same major version, and no
    later minor one; ``sm_90a`` for Hopper, whose own instructions need it. Where none is, the
    device's own.
    """
    if capability not in _SYSTEMS_ON_CHIP:
        for name in reversed(ARCHITECTURES):
            major, minor = _capability_of(name)
            if major == capability[0] and minor <= capability[1]:
                return name
    return f"sm_{capability[0]}{capability[1]}"


def listed_architecture(architecture: str) -> str:
    """The one of `ARCHITECTURES` whose instances are compiled for this one: itself, or the newest
    before it that has no instructions of its own."""
    if architecture in ARCHITECTURES:
        return architecture
    capability = _capability_of(architecture)
    before = (name for name in architectures_before(capability) if name not in HOPPER)
    return max(before, key=_capability_of, default=ARCHITECTURES[0])


def architectures_before(capability: tuple[int, int]) -> tuple[str, ...]:
    """Those of `ARCHITECTURES` that are older."""
    return tuple(name for name in ARCHITECTURES if _capability_of(name) < capability)


def architectures_since(capability: tuple[int, int]) -> tuple[str, ...]:
    """The others of `ARCHITECTURES`."""
    return tuple(name for name in ARCHITECTURES if _capability_of(name) >= capability)


def _capability_of(architecture: str) -> tuple[int, int]:
    return divmod(int("".join(filter(str.isdigit, architecture))), 10)


H200 = CudaDevice("NVIDIA H200", (9, 0), 132, 232448, 233472, 60 * 2**20, 150_000_000_000)
"""An example, for plans made where there is no GPU."""


def with_shared_bytes(needed: int) -> tuple[str, ...]:
    """The architectures on which a block may have so much shared memory."""
    return tuple(name for name in ARCHITECTURES if SHARED_BYTES[name] >= needed)


def sum_dtype(dtype: DType) -> DType:
    """What elements of this type are summed in."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
