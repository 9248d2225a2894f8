"""Warp tiles ("units") of the grouped gather; see ``grouped_units.cuh``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
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

    def defines(self, dtype: DType, across: bool, exact: bool) -> dict[str, object]:
        return {
            "EXACT": exact,
            "ACROSS": across,
            "ELEMENT": dtype,
            "MF": self.fragments,
            "PACK": self.merges,
            "NF": self.columns,
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


def unit_of(work: ConvWork) -> Unit:
    """Return the unit for the result channels of a work."""
    merge = merge_of(work)
    backward = work.direction == "bwd_data"
    channels = merge.in_channels if backward else merge.out_channels
    columns = ceil_div(channels, 8)
    units = EXACT_UNITS if is_exact(work) else UNITS
    return units[widest(columns)]


def every_unit() -> Iterator[tuple[Unit, DType, bool]]:
    """Yield every unit with its element type, and whether it computes exact float32 by FMA."""
    for unit in UNITS.values():
        for dtype in DTYPES:
            yield unit, dtype, False
    for unit in EXACT_UNITS.values():
        yield unit, DType.FLOAT32, True
