"""Strips of columns, the work units of depthwise kernels on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import Plane, plane_of
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import ARCHITECTURES, HOPPER, CudaDevice
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["DTYPES", "STRIP_COLUMNS", "TILE_STRIPS", "StripTiling", "Strips", "line_bytes"]
__all__ += ["plane_bytes", "plane_of_strips", "variant", "variants"]

DTYPES = (DType.FLOAT16, DType.BFLOAT16)
# Offsets are 32-bit, in units of four elements, and signed: rows may precede the first.
MOST_ELEMENTS = 2**33
STRIP_COLUMNS = 8
TILE_STRIPS = 16


StripTiling = structure("depthwise/depthwise_strips.cuh", "StripTiling")


@dataclass(frozen=True, slots=True)
class Strips:
    """The strips of a batch of images.

    Each image has ``count`` adjacent strips, ``apart`` units of the source from each other, each of
    which reads ``reads`` units.
    """

    batch: int
    count: int
    apart: int
    reads: int

    @property
    def units(self) -> int:
        """Number of units per image."""
        return (self.count - 1) * self.apart + self.reads

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
            most = max(most, images * self.units + (last - first) * self.apart + self.reads)
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


def _why_not_strips(plane: Plane, work: ConvWork) -> str | None:
    """Return why no tensor-core kernel of strips applies, or None if one may."""
    dtype = work.dtype
    tensors = ((plane.input, plane.strides(work.x)), (plane.output, plane.strides(work.y)))
    if dtype not in DTYPES:
        return f"{dtype}"
    if plane.axes[1] is None:
        return "one dimension, whose strips depend on where it is cut in pieces"
    for size, strides in tensors:
        extents = (plane.batch, *size)
        if sum(n * stride for n, stride in zip(extents, strides, strict=True)) >= MOST_ELEMENTS:
            return f"a tensor of more than {MOST_ELEMENTS} elements"
    return None


def plane_of_strips(work: ConvWork) -> Plane | str:
    """Return the work's plane, or why no tensor-core kernel of strips computes it."""
    plane = plane_of(work)
    if plane is None:
        return f"two strides, {work.stride[1]} and {work.stride[2]}"
    return _why_not_strips(plane, work) or plane


def plane_bytes(slots: int, channels: int) -> int:
    """Return the bytes of a row of a block's channels as copied."""
    return slots * STRIP_COLUMNS * channels * 2


def line_bytes(slots: int, channels: int) -> int:
    """Return the bytes of the transposed row."""
    return channels * (slots + (4 if slots % 8 == 0 else 0)) * 16
