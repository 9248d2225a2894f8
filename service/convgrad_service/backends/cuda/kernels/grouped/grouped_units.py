"""Warp tiles ("units") of the grouped gather; see ``grouped_units.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import lattice_axis
from convgrad_service.backends.cuda.kernels.grouped.grouped_merge import (
    DTYPES,
    is_exact,
    merge_of,
    widest,
)
from convgrad_service.plans.cuda.program import ceil_div
from convgrad_service.plans.cuda.works import ConvWork

__all__ = ["BLOCKS", "WARPS", "Unit", "every_unit", "unit_of"]


WARPS, BLOCKS = 8, 2
"""Warps of a block, and blocks per SM."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A warp tile: fragments of 16 positions, merges, and columns of 8 channels."""

    fragments: int
    merges: int
    columns: int
    windows: bool = False
    """Whether positions form windows of 4 x 8, which stay in registers for all 3 x 3 taps."""

    def defines(self, dtype: DType, across: bool, exact: bool) -> dict[str, object]:
        return {
            "EXACT": exact,
            "ACROSS": across,
            "ELEMENT": dtype,
            "MF": self.fragments,
            "PACK": self.merges,
            "NF": self.columns,
            "WINDOWS": self.windows,
            "WARPS": WARPS,
            "BLOCKS": BLOCKS,
        }

    @property
    def rows_bytes(self) -> int:
        """Bytes of a warp's rows of accumulators."""
        return 16 * (self.merges * self.columns * 8 + 4) * 4


UNITS = {1: Unit(4, 2, 1), 2: Unit(4, 1, 2), 3: Unit(4, 1, 3), 4: Unit(4, 1, 4)}
"""By columns of 8 channels. Those with one column have two merges, so that stores have 32 bytes."""


EXACT_UNITS = {1: Unit(4, 1, 1), 2: Unit(4, 1, 2), 3: Unit(2, 1, 3), 4: Unit(2, 1, 4)}
"""The same for exact float32, by FMA."""
SMALL = Unit(2, 2, 1, windows=True)
"""For 3x3 taps of 8 channels without dilation."""


def unit_of(work: ConvWork) -> Unit:
    """Return the unit for the result channels and the taps of a work."""
    merge = merge_of(work)
    backward = work.direction == "bwd_data"
    channels = merge.in_channels if backward else merge.out_channels
    columns = ceil_div(channels, 8)
    units = EXACT_UNITS if is_exact(work) else UNITS
    unit = units[widest(columns)]
    chunks = merge.out_chunks if backward else merge.in_chunks
    axes = [lattice_axis(work, dim) for dim in (1, 2)]
    near = all(
        axis.x_step == abs(axis.x_tap) == 1 and all(phase.taps == 3 for phase in axis.phases)
        for axis in axes
    )
    small = unit.columns == 1 and chunks == 1 and near
    return SMALL if small and work.dtype.itemsize == 2 else unit


def every_unit() -> Iterator[tuple[Unit, DType, bool]]:
    """Yield every unit with its element type, and whether it computes exact float32 by FMA."""
    for unit in (*UNITS.values(), SMALL):
        for dtype in DTYPES:
            if dtype.itemsize == 2 or not unit.windows:
                yield unit, dtype, False
    for unit in EXACT_UNITS.values():
        yield unit, DType.FLOAT32, True
