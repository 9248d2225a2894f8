"""Tiles of hopper_weight.cu, how blocks share tiles and pixels, and what should take least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.elements import CUDA_TYPES
from convgrad_service.plans.cuda_device import HOPPER, CudaDevice
from convgrad_service.plans.cuda_program import Instance, ceil_div
from convgrad_service.plans.cuda_works import ConvWork

__all__ = ["SPLIT_TILES", "TILES", "Cut", "WeightTile", "cuts", "expected_s", "plane_pixels"]

ROWS = 64

MOST_STAGES, LEAST_STAGES = 16, 3
# The ring starts at a multiple of 1,024 bytes; barriers and where boxes come from lie beside it.
ALIGNMENT, BESIDE_BYTES = 1024, 1024
# Blocks of columns that share a box lie a row apart; compute-sanitizer takes each product to read
# them one after another, of up to 256 columns and 16 pixels (HOPPER.md).
BELIEVED_BYTES = 3 * 16 * 128
# Partial sums take at most so much, unless the caller asks for more; more waves do not pay.
PARTIAL_BYTES = 256 * 2**20
MOST_WAVES = 3

# Blocks that an H200's processors keep in clusters of so many, and its multiprocessors.
CLUSTERS, MEASURED_ON = {2: 66, 4: 30, 8: 15}, 132
# What an H200 takes, fitted to every cut of tests/perf's dense layers (HOPPER.md): a launch; a
# cycle of its tensor cores; bytes to shared memory; a box, where four threads copy; one that blocks
# of a cluster share; four elements, split by one thread; of products and copies the shorter one, so
# much beside the longer; partial sums that a unit writes; the second kernel, and its bytes; sums of
# a cluster, and their bytes.
LAUNCH_S, CYCLE_S, COPIED_BYTES_PER_S = 7.7e-6, 1 / 1.82e9, 8.8e12
BOX_S, SHARED_BOX_S, SPLIT_S, BESIDE = 60e-9, 15e-9, 90e-9, 0.14
PARTIAL_BYTES_PER_S, SUM_S, SUM_BYTES_PER_S = 5.5e12, 6.6e-6, 6.1e12
CLUSTER_SUM_S, CLUSTER_BYTES_PER_S = 3.4e-6, 4.5e12


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
        """One warpgroup more copies, another one splits where there is room for it."""
        return (self.warpgroups + (2 if self.split and self.warpgroups == 2 else 1)) * 128

    @property
    def copiers(self) -> int:
        """Threads that start copies: they have a warpgroup of their own, or one of its warps."""
        return 1 if self.split and self.warpgroups == 3 else 4

    @property
    def splitters(self) -> int:
        """Warps."""
        return 4 if self.warpgroups == 2 else 3

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

    @property
    def copying(self) -> tuple[int, ...]:
        """Clusters of so many blocks share what they copy: where their code finds the registers."""
        return () if self.split or self.rows * self.columns > 256 else (2,)

    @property
    def summing(self) -> tuple[int, ...]:
        """Clusters of so many blocks sum one tile: of those that were ever the fastest so."""
        tiles = "64x288", "128x192", "256x64", "256x128"
        return (4, 8) if not self.split and self.name in tiles else ()

    def instance(
        self, dtype: DType, cluster: int = 1, *, sums: bool = False, planes: bool = False
    ) -> Instance:
        """``planes``: of operands that lie along the pixels, which float32's products can read."""
        # Registers of threads that copy (and split), and that multiply: together no more than the
        # block starts with, or it waits for ever.
        if self.warpgroups == 3:
            copies, multiplies = (56, 152) if self.split or cluster > 1 else (32, 160)
        elif self.split:
            copies, multiplies = 64, 192
        else:
            copies, multiplies = (40, 232) if cluster > 1 else (24, 240)
        defines = (
            ("ELEMENT", CUDA_TYPES[dtype]),
            ("PIXELS", str(plane_pixels(dtype) if planes else self.pixels)),
            ("WARPGROUPS", str(self.warpgroups)),
            ("ROWS", str(self.rows)),
            ("PRODUCTS", str(self.products)),
            ("COLUMNS", str(self.columns)),
            ("CHANNELS", str(self.channels)),
            ("SPREAD", str(int(self.spread))),
            ("CLUSTER", str(cluster)),
            ("SUMS", str(int(sums))),
            ("PRODUCER_REGISTERS", str(copies)),
            ("CONSUMER_REGISTERS", str(multiplies)),
            *((("PLANES", "1"),) if planes else ()),
        )
        name = "hopper_weight_split" if self.split else "hopper_weight"
        return Instance(f"{name}.cu", name, defines, HOPPER)


TILES = (
    WeightTile(2, 2, 1, 192, 64, spread=False),
    WeightTile(2, 1, 1, 192, 64, spread=False),
    WeightTile(2, 2, 1, 128, 64, spread=False),
    WeightTile(2, 2, 1, 64, 64, spread=False),
    WeightTile(3, 1, 1, 192, 64, spread=True),
    WeightTile(3, 1, 1, 96, 32, spread=True),
)
SPLIT_TILES = (
    WeightTile(2, 1, 1, 192, 64, spread=False, split=True),
    WeightTile(2, 1, 1, 128, 64, spread=False, split=True),
    WeightTile(3, 1, 1, 192, 64, spread=True, split=True),
    WeightTile(3, 1, 1, 96, 32, spread=True, split=True),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A tile, how many taps along W share a box of the input, and who sums what.

    The first ``whole`` tiles are summed by one block each, the others by ``shares`` blocks, each
    of its share of the ``steps``. The blocks of a ``cluster`` have neighbouring tiles: of the same
    columns where tiles run along the rows first (``rows_first``), and they share boxes of the
    input then, else of the same rows, and they share boxes of grad_output. Or they have one tile
    (``sums``), and a share is what a cluster sums: then there are no whole tiles.
    """

    tile: WeightTile
    shared_taps: int
    halo: int
    row_tiles: int
    column_tiles: int
    steps: int
    whole: int
    shares: int
    cluster: int = 1
    rows_first: bool = True
    sums: bool = False

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
        return 0 if self.sums and self.shares == 1 else self.tiles - self.whole

    @property
    def units(self) -> int:
        """Of blocks."""
        if self.sums:
            return self.tiles * self.shares * self.cluster
        return self.whole + self.parted * self.shares

    def blocks(self, device: CudaDevice) -> int:
        """That run, each unit after unit: whole clusters."""
        return min(self.units, device.multiprocessors) // self.cluster * self.cluster

    @property
    def partial_bytes(self) -> int:
        return self.parted * self.shares * self.tile.sums * 4

    @property
    def box_pixels(self) -> int:
        """Of the input."""
        return self.tile.pixels + self.halo

    @property
    def copied_bytes(self) -> int:
        """Of a step and a block, from L2."""
        x = self.boxes * self.box_pixels * self.tile.channels * self.tile.itemsize
        y = self.tile.row_boxes * ROWS * self.tile.pixels * self.tile.itemsize
        if self.sums:
            return x + y
        return x // self.cluster + y if self.rows_first else x + y // self.cluster

    @property
    def copied_boxes(self) -> float:
        """Of a step and a block."""
        y = self.tile.row_boxes * self.tile.itemsize / 2
        if self.sums:
            return self.boxes + y
        return self.boxes / self.cluster + y if self.rows_first else self.boxes + y / self.cluster

    @property
    def split_vectors(self) -> float:
        """Of four elements of the input, a step and a thread that splits."""
        if not self.tile.split:
            return 0
        return self.boxes * self.box_pixels * self.tile.channels / 4 / (32 * self.tile.splitters)

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

    def ring_bytes(self, device: CudaDevice) -> int:
        return self.stages(device) * self.stage_bytes

    def shared_bytes(self, device: CudaDevice) -> int:
        """Dynamic, with what checking tools believe that products read where there is room."""
        room = device.shared_bytes_per_block - BESIDE_BYTES
        return min(self.ring_bytes(device) + ALIGNMENT + BELIEVED_BYTES, room)

    @property
    def name(self) -> str:
        taps = f"_{self.shared_taps}taps" if self.shared_taps > 1 else ""
        shared = f"_sum{self.cluster}" if self.sums else "_x" if self.rows_first else "_y"
        if self.cluster == 1:
            shared = ""
        return f"{self.tile.name}{taps}{shared}/{self.shares}"


def _aligned(size_bytes: int) -> int:
    return ceil_div(size_bytes, ALIGNMENT) * ALIGNMENT


def plane_pixels(dtype: DType) -> int:
    """Of a step of planes: 128 bytes."""
    return 128 // dtype.itemsize


def cuts(
    work: ConvWork, device: CudaDevice, *, direct: bool, planes: bool = False
) -> Iterator[Cut]:
    """All that may be worth while; ``direct`` where whole tiles need no second kernel. Of
    ``planes`` each image has whole steps."""
    if planes:
        steps = work.batch * ceil_div(prod(work.output), plane_pixels(work.dtype))
        for tile in TILES:
            for cut in _tiled(work, tile, 1):
                if cut.cluster == 1 or cut.sums:
                    yield from _shared_out(work, device, replace(cut, steps=steps), direct)
        return
    for tile in SPLIT_TILES if work.dtype is DType.FLOAT32 else TILES:
        shared = {1}
        if work.stride[2] == 1 and work.kernel[2] > 1:
            shared.add(tile.blocks_each)
        for taps in sorted(shared):
            for cut in _tiled(work, tile, taps):
                if cut.stages(device) >= LEAST_STAGES:
                    yield from _shared_out(work, device, cut, direct)


def _tiled(work: ConvWork, tile: WeightTile, taps: int) -> Iterator[Cut]:
    """With clusters and without, not yet shared out."""
    halo = (taps - 1) * work.dilation[2]
    outer = work.kernel[0] * work.kernel[1] * ceil_div(work.kernel[2], taps)
    boxes = outer * ceil_div(work.in_channels, tile.channels)
    column_tiles = ceil_div(boxes, tile.blocks // taps)
    row_tiles = ceil_div(work.out_channels, tile.row_boxes * ROWS)
    rows = work.batch * work.output[0] * work.output[1]
    steps = ceil_div(rows * (work.output[2] + halo), tile.pixels)
    yield Cut(tile, taps, halo, row_tiles, column_tiles, steps, 0, 1)
    for cluster in tile.summing:
        yield Cut(tile, taps, halo, row_tiles, column_tiles, steps, 0, 1, cluster, sums=True)
    for cluster in tile.copying:
        if row_tiles > 1:
            whole = ceil_div(row_tiles, cluster) * cluster
            yield Cut(tile, taps, halo, whole, column_tiles, steps, 0, 1, cluster)
        if column_tiles > 1 and tile.row_boxes > 1:
            whole = ceil_div(column_tiles, cluster) * cluster
            yield Cut(tile, taps, halo, row_tiles, whole, steps, 0, 1, cluster, rows_first=False)


def _shared_out(work: ConvWork, device: CudaDevice, cut: Cut, direct: bool) -> Iterator[Cut]:
    tiles, blocks = cut.tiles, device.multiprocessors // cut.cluster * cut.cluster
    if cut.sums:
        # One unit a block, whose ring then holds the sums.
        room = CLUSTERS[cut.cluster] * device.multiprocessors // MEASURED_ON
        most = min(room // tiles, cut.steps // cut.cluster)
        if work.split_k is None and most >= 1 and cut.tile.sums * 4 <= cut.ring_bytes(device):
            yield replace(cut, shares=most)
        return
    if work.split_k is not None:
        whole = tiles if direct and work.split_k == 1 else 0
        yield replace(cut, whole=whole, shares=min(work.split_k, cut.steps))
        return
    if direct:
        yield replace(cut, whole=tiles)
    full = tiles // blocks if direct else 0
    for waves in {full, max(0, full - 1), 0}:
        rest = tiles - waves * blocks
        if rest == 0:
            continue
        counts = {max(1, times * blocks // rest) for times in range(1, MOST_WAVES + 1)}
        for count in sorted(counts):
            shares = min(count, cut.steps)
            found = replace(cut, whole=waves * blocks, shares=shares)
            if shares == 1 or found.partial_bytes <= PARTIAL_BYTES:
                yield found


def expected_s(cut: Cut, device: CudaDevice) -> float:
    """What a cut should take on an H200; for others it serves to choose as well."""
    tile, blocks = cut.tile, device.multiprocessors
    busy = cut.blocks(device)
    products = tile.step_cycles * CYCLE_S
    copies = max(
        cut.copied_bytes * busy / COPIED_BYTES_PER_S,
        cut.copied_boxes * BOX_S * 4 / tile.copiers,
        cut.split_vectors * SPLIT_S,
    )
    step_s = max(products, copies) + BESIDE * min(products, copies)
    partial_s = tile.sums * 4 * busy / PARTIAL_BYTES_PER_S
    seconds = LAUNCH_S
    if cut.sums:
        seconds += ceil_div(cut.steps, cut.shares * cut.cluster) * step_s
        seconds += CLUSTER_SUM_S + tile.sums * 4 * busy / CLUSTER_BYTES_PER_S
        if cut.parted:
            seconds += partial_s / cut.cluster
    else:
        if cut.cluster > 1:
            step_s += SHARED_BOX_S * (cut.boxes if cut.rows_first else tile.row_boxes)
        whole = ceil_div(cut.whole, blocks)
        parted = ceil_div(cut.parted * cut.shares, blocks)
        seconds += (whole * cut.steps + parted * ceil_div(cut.steps, cut.shares)) * step_s
        seconds += parted * partial_s
    if cut.parted:
        seconds += SUM_S + cut.partial_bytes / SUM_BYTES_PER_S
    return seconds
