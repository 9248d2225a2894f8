"""Strips of columns, the work units of depthwise kernels on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["STRIP_COLUMNS", "TILE_STRIPS", "StripTiling", "Strips", "line_bytes", "plane_bytes"]
__all__ += ["variant", "variants"]

STRIP_COLUMNS = 8
TILE_STRIPS = 16


StripTiling = structure("depthwise/depthwise_strips.cuh", "StripTiling")


@dataclass(frozen=True, slots=True)
class Strips:
    """The strips of a batch of images.

    Each image has ``count`` adjacent strips, each of which reads its own unit of the source and the
    next one.
    """

    batch: int
    count: int

    @property
    def units(self) -> int:
        """Number of units per image."""
        return self.count + 1

    @property
    def tiles(self) -> int:
        return ceil_div(self.batch * self.count, TILE_STRIPS)

    @property
    def slots(self) -> int:
        """The most units per tile, rounded up to matrices of 4."""
        most = 0
        for tile in range(min(self.tiles, self.count)):
            first = tile * TILE_STRIPS % self.count
            images, last = divmod(first + TILE_STRIPS - 1, self.count)
            most = max(most, images * self.units + last - first + 2)
        return ceil_div(most, 4) * 4


def variants(kernel_rows: int, blocks: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return the numbers of blocks per SM with the architectures of each.

    With 7 kernel rows, registers suffice for two blocks on Hopper only.
    """
    if kernel_rows < 7 or blocks == 1:
        return ((blocks, ARCHITECTURES),)
    others = tuple(name for name in ARCHITECTURES if name not in HOPPER)
    return (blocks, HOPPER), (1, others)


def variant(kernel_rows: int, blocks: int, device: CudaDevice) -> tuple[int, tuple[str, ...]]:
    """Return the variant for a device."""
    found = variants(kernel_rows, blocks)
    return found[0] if len(found) == 1 or device.architecture in HOPPER else found[1]


def plane_bytes(slots: int, channels: int) -> int:
    """Return the bytes of a row of a block's channels as copied."""
    return slots * STRIP_COLUMNS * channels * 2


def line_bytes(slots: int, channels: int) -> int:
    """Return the bytes of the transposed row."""
    return channels * (slots + (4 if slots % 8 == 0 else 0)) * 16
