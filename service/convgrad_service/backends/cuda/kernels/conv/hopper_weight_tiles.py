"""Tile shapes of hopper_weight.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.float_parts import PRODUCTS
from convgrad_service.plans.cuda.device import HOPPER
from convgrad_service.plans.cuda.program import Instance, ceil_div, macros_of

__all__ = ["PIXELS", "ROWS", "TF32_TILES", "TILES", "TILES_OF", "WeightTile"]

# Rows of a wgmma and of a block of grad_output's channels, pixels of a k-tile.
ROWS, PIXELS = 64, 64
# Pixels of a k-tile that has several parts of each element.
PARTS_PIXELS = 32
# Bytes of a row of pixels in a k-tile of planes.
STEP_BYTES = 128
# Of mma.sync over wgmma in bfloat16: tensor-core cycles of as many products.
TF32_CYCLES = 3.2
# What shared memory loads or stores in a cycle.
LINE_BYTES = 128
# Bytes of four accumulator fragments of a warpgroup, the unit of a reduction.
QUAD_BYTES = 4 * 128 * 16
Clusters = dict[str, tuple[tuple[int, int], ...]]
# By tile, the (cluster size, blocks that reduce one tile) without which layers are expected to take
# longer.
CLUSTERS_OF: Clusters = {
    "128x128": ((2, 1), (3, 3), (4, 4)),
    "128x192": ((2, 1), (2, 2), (4, 4), (8, 4)),
    "256x128": ((2, 1), (2, 2), (4, 4), (8, 4)),
}
# The same where elements have several parts.
CLUSTERS_OF_PARTS: Clusters = {"128x128": ((4, 4),)}
# The same in TF32.
CLUSTERS_OF_TF32: Clusters = {
    "128x128": ((2, 1), (4, 4)),
}


@dataclass(frozen=True)
class WeightTile:
    """How the warpgroups of a block share a tile.

    A warpgroup tile has ``rows`` * 64 channels of grad_output (M) and ``products`` adjacent wgmmas
    of N = ``columns``. Warpgroups divide the columns if ``spread``, else the rows. A box has
    ``channels`` input channels. Elements have so many bfloat16 ``parts``. With ``tf32``, they are
    float32 with channels contiguous, and a wgmma is as many mma.syncs.
    """

    warpgroups: int
    rows: int
    products: int
    columns: int
    channels: int
    spread: bool
    parts: int = 1
    tf32: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of an element, or of a part of it."""
        return 4 if self.tf32 else 2

    @property
    def pixels(self) -> int:
        """Pixels of a k-tile."""
        return STEP_BYTES // self.item_bytes if self.parts == 1 else PARTS_PIXELS

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and one producer warpgroup."""
        return (self.warpgroups + 1) * 128

    @cached_property
    def row_boxes(self) -> int:
        """64-row blocks of the tile."""
        return self.rows if self.spread else self.rows * self.warpgroups

    @property
    def blocks_each(self) -> int:
        """Column blocks (a tap and a box of channels) of one wgmma."""
        return self.columns // self.channels

    @cached_property
    def blocks(self) -> int:
        """Column blocks of the tile."""
        return self.blocks_each * self.products * (self.warpgroups if self.spread else 1)

    @cached_property
    def sums(self) -> int:
        """Accumulators of the tile."""
        return self.row_boxes * ROWS * self.blocks * self.channels

    @cached_property
    def name(self) -> str:
        return f"{self.row_boxes * ROWS}x{self.blocks * self.channels}"

    @cached_property
    def step_cycles(self) -> float:
        """Cycles of a k-tile, limited by tensor cores or, in TF32, also by shared memory.

        A wgmma takes one per 64 rows x 16 pixels x 2 columns. For TF32, each warp loads its rows
        and columns from shared memory, where the copy engine stores each once.
        """
        products = self.warpgroups * self.rows * self.products * len(PRODUCTS[self.parts])
        cycles = products * (self.pixels // 16) * self.columns / 2
        if not self.tf32:
            return cycles
        lines = self.warpgroups * 4 * (16 * self.rows + self.columns)
        lines += self.row_boxes * ROWS + self.blocks * self.channels
        return max(cycles * TF32_CYCLES, lines * self.pixels * self.item_bytes / LINE_BYTES)

    @cached_property
    def clusters(self) -> tuple[tuple[int, int], ...]:
        """All cluster shapes (blocks, blocks that reduce one tile), the single block first."""
        others = CLUSTERS_OF if self.parts == 1 else CLUSTERS_OF_PARTS
        others = CLUSTERS_OF_TF32 if self.tf32 else others
        return ((1, 1), *others.get(self.name, ()))

    def joined_bytes(self, summing: int) -> int:
        """Return the bytes of accumulators, and of slices received, in a cluster reduction."""
        quads = self.sums * 4 // QUAD_BYTES
        return (quads + (summing - 1) * ceil_div(quads, summing)) * QUAD_BYTES

    def instance(
        self, dtype: DType, cluster: int = 1, *, summing: int = 1, planes: bool = False
    ) -> Instance:
        """Return the instance, for channels-first operands with ``planes``."""
        # setmaxnreg: in total at most the registers that the block starts with, or it deadlocks.
        if self.warpgroups == 3:
            copies, multiplies = 32, 160
        else:
            copies, multiplies = (40, 232) if cluster > 1 else (24, 240)
        return Instance.of(
            "conv/hopper_weight.cu",
            HOPPER,
            ELEMENT=dtype,
            PIXELS=STEP_BYTES // dtype.itemsize if planes else self.pixels,
            **macros_of(self, "warpgroups", "rows", "products", "columns", "channels", "spread"),
            CLUSTER=cluster,
            SUMS=summing,
            PRODUCER_REGISTERS=copies,
            CONSUMER_REGISTERS=multiplies,
            PLANES=planes or None,
            PARTS=self.parts if self.parts > 1 else None,
        )


TILES = (
    WeightTile(2, 2, 1, 192, 64, spread=False),
    WeightTile(2, 1, 1, 192, 64, spread=False),
    WeightTile(2, 2, 1, 128, 64, spread=False),
    WeightTile(2, 1, 1, 128, 64, spread=False),
    WeightTile(2, 2, 1, 64, 64, spread=False),
    WeightTile(3, 1, 1, 192, 64, spread=True),
    WeightTile(3, 1, 1, 96, 32, spread=True),
)
# Those whose threads have the registers for every accumulator twice, to add up products of three
# parts; products of two are not expected to gain from others.
OF_PARTS = ("128x192", "128x128", "256x64", "64x288")
# By mma.sync. Fewer elements are loaded from shared memory where a warp's part of the tile is as
# high as it is wide.
TF32_TILES = (
    WeightTile(2, 4, 1, 64, 32, spread=True, tf32=True),
    WeightTile(2, 2, 1, 64, 32, spread=True, tf32=True),
    WeightTile(2, 2, 1, 32, 32, spread=True, tf32=True),
    WeightTile(2, 1, 1, 64, 32, spread=True, tf32=True),
    WeightTile(2, 1, 1, 32, 32, spread=True, tf32=True),
    WeightTile(2, 1, 1, 32, 32, spread=False, tf32=True),
)
TILES_OF = {
    1: TILES,
    **{
        parts: tuple(replace(tile, parts=parts) for tile in TILES if tile.name in OF_PARTS)
        for parts in PRODUCTS
        if parts > 1
    },
}
"""The tiles by the number of parts of an element."""
