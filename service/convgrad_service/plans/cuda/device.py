"""GPU models and architectures, as far as plans depend on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from convgrad.dtypes import DType

__all__ = ["ARCHITECTURES", "H200", "HOPPER", "MOST_BLOCKS_YZ", "OVERLAPPING", "RESERVED_BYTES"]
__all__ += ["SHARED_BYTES", "CudaDevice", "architecture_of", "architectures_before"]
__all__ += ["architectures_since", "listed_architecture", "sum_dtype", "with_shared_bytes"]

SHARED_BYTES = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90a": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}
"""The most shared memory of one block, by architecture."""

ARCHITECTURES = tuple(SHARED_BYTES)
"""The architectures that kernels are compiled for, oldest first: Ampere to Blackwell."""

HOPPER = ("sm_90a",)
"""The only architecture with wgmma."""

RESERVED_BYTES = 1024
"""Shared memory that the driver reserves per block."""

MOST_BLOCKS, MOST_BLOCKS_YZ = 2**31 - 1, 2**16 - 1
"""The largest grid along its first dimension, and along the others."""

OVERLAPPING = (9, 0)
"""The first compute capability with programmatic dependent launch."""


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """The constant properties of a GPU that decide how a problem is computed.

    Attributes
    ----------
    shared_bytes_per_block : int
        The most static and dynamic shared memory of a block.
    memory_bytes : int
        Memory that may be used, free or not.
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
        """The architecture that its kernels are compiled for."""
        return architecture_of(self.capability)

    def fitting_blocks(self, shared_bytes: int) -> int:
        """Return the blocks for which an SM has shared memory; the driver takes 1 KiB of each."""
        return self.shared_bytes_per_multiprocessor // (shared_bytes + RESERVED_BYTES)

    def why_not_shared(self, needed_bytes: int) -> str | None:
        """Return why a block cannot have this much shared memory; None if it can."""
        if needed_bytes <= self.shared_bytes_per_block:
            return None
        return (
            f"a block needs {needed_bytes} bytes of shared memory and there are "
            f"{self.shared_bytes_per_block}"
        )

    def why_not_launched(self, grid: tuple[int, int, int], shared_bytes: int) -> str | None:
        """Return why a launch is larger than a grid or a block can be; None if it is not."""
        if grid[0] > MOST_BLOCKS or max(grid[1:]) > MOST_BLOCKS_YZ:
            return "more blocks than a grid can have"
        return self.why_not_shared(shared_bytes)


# They do not run code for other chips of their major version, despite their compute capability.
_SYSTEMS_ON_CHIP = {(8, 7), (10, 1), (11, 0)}


@cache
def architecture_of(capability: tuple[int, int]) -> str:
    """Return the architecture, as NVRTC spells it, that a device's kernels are compiled for.

    It is the newest of `ARCHITECTURES` whose code the device runs (the same major version and no
    later minor one), or the device's own if there is none.
    """
    if capability not in _SYSTEMS_ON_CHIP:
        for name in reversed(ARCHITECTURES):
            major, minor = _capability_of(name)
            if major == capability[0] and minor <= capability[1]:
                return name
    return f"sm_{capability[0]}{capability[1]}"


def listed_architecture(architecture: str) -> str:
    """Return the member of `ARCHITECTURES` whose instances a device of this architecture uses.

    It is the architecture itself, or the newest older one whose code is portable.
    """
    if architecture in ARCHITECTURES:
        return architecture
    capability = _capability_of(architecture)
    before = (name for name in architectures_before(capability) if name not in HOPPER)
    return max(before, key=_capability_of, default=ARCHITECTURES[0])


def architectures_before(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the members of `ARCHITECTURES` that are older than a compute capability."""
    return tuple(name for name in ARCHITECTURES if _capability_of(name) < capability)


def architectures_since(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the members of `ARCHITECTURES` from a compute capability on."""
    return tuple(name for name in ARCHITECTURES if _capability_of(name) >= capability)


def _capability_of(architecture: str) -> tuple[int, int]:
    return divmod(int("".join(filter(str.isdigit, architecture))), 10)


H200 = CudaDevice("NVIDIA H200", (9, 0), 132, 232448, 233472, 60 * 2**20, 150_000_000_000)
"""An example, for plans made where there is no GPU."""


def with_shared_bytes(needed: int) -> tuple[str, ...]:
    """Return the architectures on which a block may have this much shared memory."""
    return tuple(name for name in ARCHITECTURES if SHARED_BYTES[name] >= needed)


def sum_dtype(dtype: DType) -> DType:
    """Return the type in which elements of this type are accumulated."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
