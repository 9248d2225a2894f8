"""Tiles of hopper_weight.cu, how blocks share tiles and pixels, and what should take least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Instance, ceil_div
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["SPLIT_TILES", "TILES", "Cut", "WeightTile", "cuts", "expected_s"]

ROWS = 64

MOST_STAGES, LEAST_STAGES = 16, 3
# The ring starts at a multiple of 1,024 bytes; barriers and where boxes come from lie beside it.
ALIGNMENT, BESIDE_BYTES = 1024, 640
# Partial sums take at most so much, unless the caller asks for more; more waves do not pay.
PARTIAL_BYTES = 256 * 2**20
MOST_WAVES = 3

# What an H200 did, see HOPPER.md: cycles of a second while tensor cores are busy, bytes a second
# from L2, what a unit takes beside its steps, and a second kernel beside its bytes.
CYCLES_PER_S = 1.6e9
L2_BYTES_PER_S = 6.5e12
UNIT_S, SUM_S = 1.5e-6, 2.5e-6
SUM_BYTES_PER_S = 4e12


@dataclass(frozen=True, slots=True)
class WeightTile:
    """How the warpgroups of a block share a tile.

    Each has ``rows`` times 64 channels of grad_output, and ``products`` of ``columns`` columns
    beside each other. Where they ``spread`` all have the same rows and columns of their own, else
    rows of their own and the same columns. ``channels`` of the input are copied at a time.
    ``split`` is for float32: three products of bfloat16 for one.
    """

    warpgroups: int
    rows: int
    products: int
    columns: int
    channels: int
    spread: bool
    split: bool = False

    @property
    def itemsize(self) -> int:
        """Of what is copied."""
        return 4 if self.split else 2

    @property
    def pixels(self) -> int:
        """Of a step."""
        return 32 if self.split else 64

    @property
    def y_channels(self) -> int:
        """Of a box of grad_output: 128 bytes."""
        return 128 // self.itemsize

    @property
    def threads(self) -> int:
        """One warpgroup more copies."""
        return (self.warpgroups + 1) * 128

    @property
    def row_boxes(self) -> int:
        """Times 64 rows."""
        return self.rows if self.spread else self.rows * self.warpgroups

    @property
    def blocks_each(self) -> int:
        """Taps x channels of a box, of one product."""
        return self.columns // self.channels

    @property
    def blocks(self) -> int:
        """The same of the tile."""
        return self.blocks_each * self.products * (self.warpgroups if self.spread else 1)

    @property
    def sums(self) -> int:
        """Of the tile: rows times columns."""
        return self.row_boxes * ROWS * self.blocks * self.channels

    @property
    def name(self) -> str:
        return f"{self.row_boxes * ROWS}x{self.blocks * self.channels}"

    @property
    def step_cycles(self) -> int:
        """Of the tensor cores: a product of 64 rows and 16 pixels takes one for two columns."""
        products = self.warpgroups * self.rows * self.products * (3 if self.split else 1)
        return products * (self.pixels // 16) * self.columns // 2

    def instance(self, dtype: DType) -> Instance:
        # Registers of threads that copy (and split), and that multiply: 64 Ki a block.
        if self.split:
            copies, multiplies = (40, 232) if self.warpgroups == 2 else (56, 152)
        else:
            copies, multiplies = (24, 240) if self.warpgroups == 2 else (32, 160)
        defines = (
            ("ELEMENT", CUDA_TYPES[dtype]),
            ("PIXELS", str(self.pixels)),
            ("WARPGROUPS", str(self.warpgroups)),
            ("ROWS", str(self.rows)),
            ("PRODUCTS", str(self.products)),
            ("COLUMNS", str(self.columns)),
            ("CHANNELS", str(self.channels)),
            ("SPREAD", str(int(self.spread))),
            ("PRODUCER_REGISTERS", str(copies)),
            ("CONSUMER_REGISTERS", str(multiplies)),
        )
        name = "hopper_weight_split" if self.split else "hopper_weight"
        return Instance(f"{name}.cu", name, defines, HOPPER)


TILES = (
    WeightTile(2, 2, 1, 192, 64, spread=False),
    WeightTile(2, 1, 1, 192, 64, spread=False),
    WeightTile(2, 1, 1, 256, 64, spread=False),
    WeightTile(2, 2, 1, 128, 64, spread=False),
    WeightTile(2, 2, 1, 64, 64, spread=False),
    WeightTile(3, 1, 1, 192, 64, spread=True),
    WeightTile(3, 1, 1, 96, 32, spread=True),
)
SPLIT_TILES = (
    WeightTile(2, 1, 1, 192, 64, spread=False, split=True),
    WeightTile(2, 1, 1, 256, 64, spread=False, split=True),
    WeightTile(2, 1, 1, 128, 64, spread=False, split=True),
    WeightTile(3, 1, 1, 192, 64, spread=True, split=True),
    WeightTile(3, 1, 1, 96, 32, spread=True, split=True),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile, how many taps along W share a box of the input, and who sums what.

    The first ``whole`` tiles are summed by one block each, the others by ``shares`` blocks, each
    of its share of the ``steps``.
    """

    tile: WeightTile
    shared_taps: int
    halo: int
    row_tiles: int
    column_tiles: int
    steps: int
    whole: int
    shares: int

    @property
    def boxes(self) -> int:
        """Of the input, in a tile."""
        return self.tile.blocks // self.shared_taps

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.column_tiles

    @property
    def parted(self) -> int:
        """Tiles whose sums are partial at first."""
        return self.tiles - self.whole

    @property
    def units(self) -> int:
        return self.whole + self.parted * self.shares

    @property
    def partial_bytes(self) -> int:
        return self.parted * self.shares * self.tile.sums * 4

    @property
    def box_pixels(self) -> int:
        """Of the input."""
        return self.tile.pixels + self.halo

    @property
    def copied_bytes(self) -> int:
        """Of a step."""
        x = self.boxes * self.box_pixels * self.tile.channels
        return (self.tile.row_boxes * ROWS * self.tile.pixels + x) * self.tile.itemsize

    @property
    def box_bytes(self) -> int:
        """From one box of the input to the next, as products read them."""
        return _aligned(self.box_pixels * self.tile.channels * 2)

    @property
    def stage_bytes(self) -> int:
        y = self.tile.row_boxes * ROWS * self.tile.pixels * self.tile.itemsize
        if not self.tile.split:
            return y + self.boxes * self.box_bytes
        copied = _aligned(self.boxes * self.box_pixels * self.tile.channels * 4)
        return y + copied + 2 * self.boxes * self.box_bytes

    def stages(self, device: CudaDevice) -> int:
        room = device.shared_bytes_per_block - ALIGNMENT - BESIDE_BYTES
        return min(MOST_STAGES, room // self.stage_bytes)

    def shared_bytes(self, device: CudaDevice) -> int:
        """Dynamic."""
        return self.stages(device) * self.stage_bytes + ALIGNMENT

    @property
    def name(self) -> str:
        taps = f"_{self.shared_taps}taps" if self.shared_taps > 1 else ""
        return f"{self.tile.name}{taps}/{self.shares}"


def _aligned(size_bytes: int) -> int:
    return ceil_div(size_bytes, ALIGNMENT) * ALIGNMENT


def cuts(work: ConvWork, device: CudaDevice, *, direct: bool) -> Iterator[Cut]:
    """All that may be worth while; ``direct`` where whole tiles need no second kernel."""
    for tile in SPLIT_TILES if work.dtype is DType.FLOAT32 else TILES:
        shared = {1}
        if work.stride[2] == 1 and work.kernel[2] > 1:
            shared.add(tile.blocks_each)
        for taps in sorted(shared):
            for cut in _shares(work, device, tile, taps, direct):
                if cut.stages(device) >= LEAST_STAGES:
                    yield cut


def _shares(
    work: ConvWork, device: CudaDevice, tile: WeightTile, taps: int, direct: bool
) -> Iterator[Cut]:
    halo = (taps - 1) * work.dilation[2]
    boxes = tile.blocks // taps
    outer = work.kernel[0] * work.kernel[1] * ceil_div(work.kernel[2], taps)
    column_tiles = ceil_div(outer * ceil_div(work.in_channels, tile.channels), boxes)
    row_tiles = ceil_div(work.out_channels, tile.row_boxes * ROWS)
    rows = work.batch * work.output[0] * work.output[1]
    steps = ceil_div(rows * (work.output[2] + halo), tile.pixels)
    tiles, blocks = row_tiles * column_tiles, device.multiprocessors

    def cut(whole: int, shares: int) -> Cut:
        shares = max(1, min(shares, steps))
        return Cut(tile, taps, halo, row_tiles, column_tiles, steps, whole, shares)

    if work.split_k is not None:
        whole = tiles if direct and work.split_k == 1 else 0
        yield cut(whole, work.split_k)
        return
    if direct:
        yield cut(tiles, 1)
    full = tiles // blocks if direct else 0
    for waves in {full, max(0, full - 1), 0}:
        rest = tiles - waves * blocks
        if rest == 0:
            continue
        counts = {max(1, times * blocks // rest) for times in range(1, MOST_WAVES + 1)}
        for count in sorted(counts):
            found = cut(waves * blocks, count)
            if found.shares == 1 or found.partial_bytes <= PARTIAL_BYTES:
                yield found


def expected_s(cut: Cut, device: CudaDevice) -> float:
    """What a cut should take on an H200; for others it serves to choose as well."""
    blocks = device.multiprocessors
    busy = min(blocks, cut.units)
    step_s = max(cut.tile.step_cycles / CYCLES_PER_S, cut.copied_bytes * busy / L2_BYTES_PER_S)
    whole = ceil_div(cut.whole, blocks)
    parted = ceil_div(cut.parted * cut.shares, blocks)
    seconds = whole * (UNIT_S + cut.steps * step_s)
    seconds += parted * (UNIT_S + ceil_div(cut.steps, cut.shares) * step_s)
    if cut.parted:
        seconds += SUM_S + 2 * cut.partial_bytes / SUM_BYTES_PER_S
    return seconds
