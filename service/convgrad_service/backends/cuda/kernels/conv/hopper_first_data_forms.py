"""The instances of hopper_first_data, by the layers that they have the room for."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import HOPPER, SHARED_BYTES
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["GROUPS", "ROW_BYTES", "SHAPES", "STATIC_BYTES", "STEP", "Form"]

GROUPS, STEP = 64, 16
"""Groups of positions per warpgroup, and channels of a k-step."""
# With split float32: the most 8-column fragments of a warpgroup, and the most taps along W.
MOST_SPLIT, MOST_SPLIT_TAPS = 7, 7
MOST_FINISHED = 4
ROW_BYTES, ALIGNMENT, STATIC_BYTES = 128, 1024, 1024
# The slowdown factor of wgmmas that overlap splitting, fitted to an H200.
SPLIT_CLOCKS = 1.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The capacity of an instance: kernel rows, 8-column fragments per kernel row, steps along W,
    and k-steps of 16 channels of grad_output."""

    rows: int
    eights: int
    taps: int
    steps: int

    @property
    def columns(self) -> int:
        return self.rows * self.eights * 8

    @property
    def most_finished(self) -> int:
        """The most rows of the input that one row of grad_output completes."""
        return 2 if self.eights == 1 else MOST_FINISHED

    @property
    def most_warpgroups(self) -> int:
        """The most consumer warpgroups, limited by registers for accumulators."""
        return 2 if self.eights == 1 else 1


SHAPES = (
    *(Shape(4, 1, taps, steps) for taps in (2, 4) for steps in (2, 4)),
    *(Shape(7, 1, taps, steps) for taps in (4, 5, 7) for steps in (2, 4)),
    *(Shape(rows, 2, 4, steps) for rows in (3, 4) for steps in (2, 4)),
    *(Shape(4, 1, taps, 8) for taps in (2, 4)),
    *(Shape(4, 2, 1, steps) for steps in (4, 8)),
)


@dataclass(frozen=True, slots=True)
class Form:
    """An instance and how a layer uses it.

    Attributes
    ----------
    dtype, split, shape
        Its dtype, whether float32 is split, and its capacity.
    row_step
        The number of blocks that share the kernel rows: 1 or the stride along H.
    planes
        Taps along D.
    """

    dtype: DType
    split: bool
    shape: Shape
    row_step: int = 1
    planes: int = 1

    @property
    def wide(self) -> bool:
        return self.dtype is DType.FLOAT32

    @property
    def stages(self) -> int:
        return 3 if self.wide else 4

    @property
    def blocks(self) -> int:
        """Blocks of the largest size per SM."""
        return 1 if self.wide else 2

    def together(self, warpgroups: int) -> int:
        """Return the blocks per SM of that many warpgroups each, limited by registers."""
        return 1 if self.split else self.blocks * self.shape.most_warpgroups // warpgroups

    @property
    def loaders(self) -> int:
        """Producer threads: a whole warpgroup if they split float32, else one warp."""
        return 128 if self.split else 32

    @property
    def subs(self) -> int:
        """Rows of 128 bytes in shared memory per position of y."""
        return ceil_div(self.shape.steps * STEP * self.dtype.itemsize, ROW_BYTES)

    @property
    def weight_bytes(self) -> int:
        parts = 3 * ceil_div(self.shape.steps * STEP * 2, ROW_BYTES) if self.split else self.subs
        return parts * self.planes * self.shape.taps * self.shape.columns * ROW_BYTES

    @property
    def product_clocks(self) -> float:
        """Clocks of all wgmmas of a warpgroup for a row of y."""
        shape = self.shape
        each = max(shape.columns / 2, 16 + shape.columns / 4)
        return (
            shape.taps
            * shape.steps
            * each
            * (6 * SPLIT_CLOCKS if self.split else 2 if self.wide else 1)
        )

    def positions(self, warpgroups: int) -> int:
        """Return the number of positions of y per row that a block of warpgroups reads."""
        return warpgroups * GROUPS + self.shape.taps - 1

    def sub_bytes(self, warpgroups: int) -> int:
        return ceil_div(self.positions(warpgroups) * ROW_BYTES, ALIGNMENT) * ALIGNMENT

    def stage_bytes(self, warpgroups: int) -> int:
        return self.sub_bytes(warpgroups) * self.subs

    def shared_bytes(self, warpgroups: int) -> int:
        """Return the bytes of shared memory: alignment, the pipeline and the weights."""
        return ALIGNMENT + self.stages * self.stage_bytes(warpgroups) + self.weight_bytes

    @property
    def fits(self) -> bool:
        """Whether the instance fits into registers and shared memory."""
        shape = self.shape
        small = shape.rows * shape.eights <= MOST_SPLIT and shape.taps <= MOST_SPLIT_TAPS
        shared = self.shared_bytes(1) + STATIC_BYTES <= SHARED_BYTES[HOPPER[0]]
        return shared and (small or not self.split)
