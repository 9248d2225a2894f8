"""The instances of hopper_first_data, by the layers that they have the room for."""

from __future__ import annotations

from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.plans.cuda.device import HOPPER, SHARED_BYTES
from convgrad_service.plans.cuda.program import ceil_div

__all__ = ["GROUPS", "ROW_BYTES", "STATIC_BYTES", "STEP", "Form", "shapes_of"]

GROUPS, STEP = 64, 16
"""Groups of positions per warpgroup, and channels of a k-step."""
# With split float32, the most 8-column fragments of a warpgroup.
MOST_SPLIT = 7
MOST_FINISHED = 4
ROW_BYTES, ALIGNMENT, STATIC_BYTES = 128, 1024, 1024
# The slowdown factor of wgmmas that overlap splitting, fitted to an H200.
SPLIT_CLOCKS = 1.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The capacity of an instance: kernel rows, 8-column fragments per kernel row, k-steps of 16
    channels of grad_output, and steps along W, 0 for any number."""

    rows: int
    eights: int
    steps: int
    taps: int = 0

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
    *(Shape(rows, 1, steps) for rows in (4, 7) for steps in (2, 4, 8)),
    *(Shape(3, 2, steps) for steps in (2, 4)),
    *(Shape(4, 2, steps) for steps in (2, 4, 8)),
)
# In TF32, where an SM has one block, a loop over steps along W takes 1.2 times as long (16 layers,
# up to 1.8).
TF32_SHAPES = (
    *(Shape(4, 1, steps, taps) for taps in (2, 4) for steps in (2, 4, 8)),
    *(Shape(7, 1, steps, taps) for taps in (4, 5, 7) for steps in (2, 4)),
    *(Shape(rows, 2, steps, 4) for rows in (3, 4) for steps in (2, 4)),
    *(Shape(4, 2, steps, 1) for steps in (4, 8)),
)


def shapes_of(dtype: DType, split: bool) -> tuple[Shape, ...]:
    """Return the instances' capacities for a dtype, and whether float32 is split."""
    return TF32_SHAPES if dtype is DType.FLOAT32 and not split else SHAPES


@dataclass(frozen=True, slots=True)
class Form:
    """An instance and how a layer uses it.

    Attributes
    ----------
    dtype, split, shape
        Its dtype, whether float32 is split, and its capacity.
    row_step
        The number of blocks that share the kernel rows: 1 or the stride along H.
    planes, used_taps
        Taps along D, and the layer's steps along W.
    """

    dtype: DType
    split: bool
    shape: Shape
    row_step: int = 1
    planes: int = 1
    used_taps: int = 1

    @property
    def wide(self) -> bool:
        return self.dtype is DType.FLOAT32

    @property
    def taps(self) -> int:
        """Steps along W that the instance computes."""
        return self.shape.taps or self.used_taps

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
        """Bytes of the weights in shared memory."""
        parts = 3 * ceil_div(self.shape.steps * STEP * 2, ROW_BYTES) if self.split else self.subs
        return parts * self.planes * self.taps * self.shape.columns * ROW_BYTES

    @property
    def product_clocks(self) -> float:
        """Clocks of all wgmmas of a warpgroup for a row of y."""
        shape = self.shape
        each = max(shape.columns / 2, 16 + shape.columns / 4)
        factor = 6 * SPLIT_CLOCKS if self.split else 2 if self.wide else 1
        return self.taps * shape.steps * each * factor

    def positions(self, warpgroups: int) -> int:
        """Return the number of positions of y per row that a block of warpgroups reads."""
        return warpgroups * GROUPS + self.taps - 1

    def sub_bytes(self, warpgroups: int) -> int:
        return ceil_div(self.positions(warpgroups) * ROW_BYTES, ALIGNMENT) * ALIGNMENT

    def stage_bytes(self, warpgroups: int) -> int:
        return self.sub_bytes(warpgroups) * self.subs

    def shared_bytes(self, warpgroups: int) -> int:
        """Return the bytes of shared memory: alignment, the pipeline and the weights."""
        return ALIGNMENT + self.stages * self.stage_bytes(warpgroups) + self.weight_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits into registers and shared memory."""
        shape = self.shape
        small = shape.rows * shape.eights <= MOST_SPLIT
        shared = self.shared_bytes(1) + STATIC_BYTES <= SHARED_BYTES[HOPPER[0]]
        return shared and (small or not self.split)

    @property
    def wide_rows(self) -> bool:
        """Whether it has the most rows and channels. On an H200 it took 1.15 and 1.2 times as long
        as one with fewer rows, of which two blocks share the kernel's (two layers)."""
        return (self.shape.rows, self.shape.steps) == (7, 8)
