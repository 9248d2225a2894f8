"""Boxes of positions that grouped kernels copy to shared memory, and candidate tile extents."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any

from convgrad_service.backends.cuda.kernels.core.gather_axes import (
    MAX_PHASES,
    Axis,
    Phase,
    gather_axis,
)
from convgrad_service.backends.cuda.kernels.core.tensor_maps import TiledMap
from convgrad_service.backends.cuda.kernels.layout.channels_last import CHUNK_BYTES
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork, Operand

__all__ = ["BoxStrides", "LatticeAxis", "Size4", "box_args", "box_map", "candidate_tiles"]
__all__ += ["lattice_axis", "why_not_copied", "why_not_pixels"]

Size4 = tuple[int, int, int, int]
MOST_BOX, MOST_STEP = 256, 8
"""Of the copy engine: elements along a dimension of a box, and the distance of positions."""


BoxStrides = structure("grouped/grouped_box.cuh", "BoxStrides")


BoxArgs = structure("grouped/grouped_box.cuh", "Box")


def box_args(
    extent: Sequence[int],
    pitch: int,
    merges: int,
    merge_bytes: tuple[int, int],
    piece: int,
    threads: int,
) -> Any:
    """Return the kernel parameters of a box of positions (N, D, H, W), copied by ``threads``.

    Parameters
    ----------
    pitch
        Bytes between positions.
    merges, merge_bytes
        Their number in a position, and the bytes of each in memory and in the box.
    piece
        Bytes that a thread copies at once.
    """
    pieces = merges * merge_bytes[0] // piece
    most = threads // pieces
    columns = min(most, extent[3])
    return BoxArgs(
        (ctypes.c_int32 * 4)(*extent),
        pitch,
        pieces,
        piece,
        *(merge_bytes[0] // piece, merge_bytes[1]),
        *(columns, most // columns),
    )


@dataclass(frozen=True)
class LatticeAxis:
    """An `Axis` whose source positions are x0 + (m*x_step + j*x_tap)*lattice."""

    axis: Axis
    lattice: int

    @cached_property
    def x_step(self) -> int:
        return self.axis.x_step // self.lattice

    @cached_property
    def x_tap(self) -> int:
        return self.axis.x_tap // self.lattice

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.axis.phases

    @cached_property
    def count(self) -> int:
        """Number of positions of the largest phase."""
        return max(phase.count for phase in self.phases)

    @cached_property
    def taps(self) -> int:
        return max(phase.taps for phase in self.phases)

    def extent(self, positions: int, taps: int | None = None) -> int:
        """Return the extent of the source that ``positions`` read, in lattice points, with
        ``taps`` or all taps."""
        taps = self.taps if taps is None else taps
        return (positions - 1) * self.x_step + max(taps - 1, 0) * abs(self.x_tap) + 1


def lattice_axis(work: ConvWork, dim: int) -> LatticeAxis:
    """Split the phases of `gather_axis` further where taps are not adjacent.

    The positions of one phase then read adjacent lattice points, and a box of the source holds no
    unused element.
    """
    axis = gather_axis(work, dim)
    spread = abs(axis.x_tap) // gcd(axis.x_step, axis.x_tap)
    if work.kernel[dim] == 1:
        return LatticeAxis(axis, 1)
    if spread == 1 or spread * len(axis.phases) > MAX_PHASES:
        return LatticeAxis(axis, gcd(axis.x_step, axis.x_tap))
    phases = tuple(
        Phase(
            phase.taps,
            phase.r0,
            phase.x0 + first * axis.x_step,
            phase.y0 + first * axis.y_step,
            ceil_div(phase.count - first, spread),
        )
        for phase in axis.phases
        for first in range(min(spread, phase.count))
    )
    step = axis.x_step * spread
    split = Axis(axis.x_size, step, axis.x_tap, axis.y_step * spread, axis.r_step, phases)
    return LatticeAxis(split, gcd(step, axis.x_tap))


def box_span(extents: Size4, steps: Sequence[int]) -> Size4:
    """Return the positions from the first of a box to its last (N, D, H, W)."""
    d, h, w = ((n - 1) * step + 1 for n, step in zip(extents[1:], steps, strict=True))
    return extents[0], d, h, w


def why_not_copied(extents: Size4, steps: Sequence[int], pitch_elements: int) -> str | None:
    """Return why the copy engine does not copy a box; None if it does."""
    if max(steps) > MOST_STEP:
        return f"a distance of {max(steps)} between positions; expected at most {MOST_STEP}"
    most = max(*box_span(extents, steps), pitch_elements)
    return f"a box of {most}; expected at most {MOST_BOX}" if most > MOST_BOX else None


def why_not_pixels(work: ConvWork, side: str, operand: Operand, channels: int) -> str | None:
    """Return why the copy engine does not copy pixels of all groups; None if it does."""
    chunk = CHUNK_BYTES // operand.dtype.itemsize
    if operand.strides[2] != 1 or operand.strides[1] != channels:
        return f"the {side}'s channels are not contiguous"
    if work.groups * channels % chunk:
        return f"the {side}'s {work.groups * channels} channels are not whole chunks of 16 bytes"
    if any(operand.strides[axis] % chunk for axis in (0, 3, 4, 5)):
        return f"the {side}'s pixels do not start at multiples of 16 bytes"
    return None


def box_map(
    operand: Operand,
    shape: tuple[int, int, int, int, int],
    extents: Size4,
    steps: Sequence[int],
    pitch_bytes: int,
) -> TiledMap:
    """Return the tensor map of boxes of a channels-last tensor (C, W, H, D, N).

    A position in shared memory may be longer than its channels in the box, so that positions start
    in different banks: it then has some of the next channels, or zeros.

    Parameters
    ----------
    shape : tuple of int
        Images, extents of D, H, W, and the channels of all groups.
    extents, steps
        Of a box, in positions that are ``steps`` apart.
    """
    batch, *sizes, channels = shape
    size = operand.dtype.itemsize
    images, *span = box_span(extents, steps)
    given = (*reversed(operand.strides[3:]), operand.strides[0])
    all_sizes = (channels, *reversed(sizes), batch)
    # A dimension of extent 1 may have any stride, but TMA requires a multiple of 16 bytes.
    strides = tuple(
        (stride if extent > 1 else channels) * size
        for stride, extent in zip(given, all_sizes[1:], strict=True)
    )
    return TiledMap(
        operand.dtype,
        all_sizes,
        strides,
        steps=(1, *reversed(steps), 1),
        box=(pitch_bytes // size, *reversed(span), images),
    )


def candidate_tiles(batch: int, counts: Sequence[int], steps: Sequence[int]) -> Iterator[Size4]:
    """Yield candidate tiles (N, D, H, W) of ``counts`` positions, in multiples of ``steps``.

    A tile has several images only if it covers whole ones.
    """
    extents = [
        sorted({ceil_div(extent, step) * step for extent in _tile_extents(count)})
        for count, step in zip(counts, steps, strict=True)
    ]
    for depth, height, width in product(*extents):
        spatial = zip((depth, height, width), counts, strict=True)
        whole = all(extent >= count for extent, count in spatial)
        for images in _images_together(batch) if whole else [1]:
            yield images, depth, height, width


def _tile_extents(count: int) -> list[int]:
    """Return candidate extents of a tile: even divisions of ``count``, and powers of two."""
    parts = {ceil_div(count, parts) for parts in (1, 2, 3, 4, 5, 6, 7, 8)}
    powers = {size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size < count}
    return sorted(parts | powers)


def _images_together(batch: int) -> list[int]:
    """Return candidate numbers of whole images in a tile."""
    return [n for n in (1, 2, 3, 4, 6, 8, 16, 32, 64) if n <= batch]
