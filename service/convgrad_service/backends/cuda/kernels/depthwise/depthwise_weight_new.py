"""Channels-last depthwise wgrad in registers, all taps of a plane at a time
(depthwise_weight_new.cu)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.arguments import pack
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.kernels.core.gather_axes import divider
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_tiles import (
    BYTES_S,
    bytes_of,
    vector_of,
    why_not_counted,
)
from convgrad_service.backends.cuda.kernels.depthwise.depthwise_weight_args import (
    CLUSTERED,
    MOST_CLUSTER,
    buffers_of,
    fill_volume,
    is_clustered,
    partials_of,
    received_bytes,
    why_not_volume,
)
from convgrad_service.backends.cuda.structures import structure
from convgrad_service.plans.cuda.device import CudaDevice
from convgrad_service.plans.cuda.program import Fragment, Instance, Launch, ceil_div
from convgrad_service.plans.cuda.works import ConvWork

DTYPES = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
MOST_INDEX = 2**31 - 1
MOST_ALONG = 2**16 - 1
CLUSTERS = (1, 2, 4, 8)
MOST_TILES, MOST_GROUPS = 12, 6
CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class NewTile:
    """Kernel and stride; columns of y of a thread, rows loaded ahead, threads of a block."""

    kernel: int
    stride: int
    columns: int
    ahead: int
    threads: int
    vector: int = 2


@dataclass(frozen=True, slots=True)
class NewLayout:
    """A tile, vectors of channels, strips of a unit, rows of a chunk, and blocks that share."""

    tile: NewTile
    vectors: int
    strips: int
    rows: int
    blocks: int

    @property
    def unit_warps(self) -> int:
        return ceil_div(self.vectors * self.strips, 32)

    @property
    def units(self) -> int:
        return self.tile.threads // 32 // self.unit_warps

    @property
    def sums(self) -> int:
        return self.tile.kernel**2 * self.tile.vector * self.vectors

    @property
    def shared_bytes(self) -> int:
        return self.units * self.strips * self.sums * 4 + received_bytes(self.sums)


TILES = {
    (3, 1): (NewTile(3, 1, 4, 3, 512), NewTile(3, 1, 7, 2, 384)),
    (3, 2): (NewTile(3, 2, 4, 4, 512), ),
    (5, 1): (NewTile(5, 1, 4, 1, 384), NewTile(5, 1, 4, 1, 256)),
    (5, 2): (NewTile(5, 2, 4, 1, 384), NewTile(5, 2, 4, 1, 384, 1)),
    (7, 1): (NewTile(7, 1, 4, 1, 256), NewTile(7, 1, 7, 1, 256, 1), NewTile(7, 1, 4, 1, 256, 1)),
    (7, 2): (NewTile(7, 2, 4, 1, 256, 1), NewTile(7, 2, 4, 1, 256)),
}

DepthwiseWeightNewArgs = structure("depthwise/depthwise_weight_new.cu", "DepthwiseWeightNewArgs")


class DepthwiseWeightNew:
    name = "depthwise_weight_new"

    def __init__(self, layout: NewLayout | None = None) -> None:
        self._layout = layout

    def why_not(self, work: ConvWork, device: CudaDevice) -> str | None:
        """See `Family.why_not`."""
        reason = why_not_volume(work)
        if reason is not None:
            return reason
        if work.out_channels > 1:
            return f"{work.out_channels} channels a group"
        square = work.kernel[1] == work.kernel[2] and work.stride[1] == work.stride[2]
        if not square or work.dilation[1:] != (1, 1) or (work.kernel[2], work.stride[2]) not in TILES:
            return f"no instance for kernel {work.kernel} and stride {work.stride}"
        if work.pixels * CHUNKS[-1] > MOST_INDEX:
            return "more than 2^31 items"
        layout = self.layout(work, device)
        if max(_grid(work, layout)) > MOST_ALONG:
            return "more tiles than a grid can have"
        columns, planes = _grid(work, layout)
        reason = why_not_counted(columns * planes)
        return reason or device.why_not_shared(layout.shared_bytes)

    def launches(self, work: ConvWork, device: CudaDevice) -> Fragment:
        """See `Family.launches`."""
        layout = self.layout(work, device)
        tile, blocks = layout.tile, layout.blocks
        tiles, planes = _grid(work, layout)
        args = DepthwiseWeightNewArgs()
        fill_volume(args, work, layout.vectors)
        args.strips, args.unit_warps, args.units = layout.strips, layout.unit_warps, layout.units
        args.groups, args.chunks = _groups(work, layout), _chunks(work, layout)
        args.rows, args.items = layout.rows, _items(work, layout)
        args.by_unit_warps, args.by_groups = divider(layout.unit_warps), divider(args.groups)
        args.by_chunks, args.by_planes = divider(args.chunks), divider(work.output[0])
        clustered = is_clustered(device, blocks)
        partials = partials_of(work, 1 if clustered else blocks, blocks * tiles * planes * layout.sums)
        launch = Launch(
            _instance(work.dtype, tile),
            (blocks, tiles, planes),
            (tile.threads, 1, 1),
            pack(args, **buffers_of(work, partials)),
            layout.shared_bytes,
            cluster=blocks if clustered else 1,
        )
        return Fragment(self.name, (launch,), partials, expected_s=expected_s(work, device, layout))

    def layout(self, work: ConvWork, device: CudaDevice) -> NewLayout:
        return self._layout or _best(work, device)

    def instances(self) -> Iterable[Instance]:
        """See `Family.instances`."""
        return []


def _grid(work: ConvWork, layout: NewLayout) -> tuple[int, int]:
    return ceil_div(work.groups, layout.vectors * layout.tile.vector), work.kernel[0]


def _groups(work: ConvWork, layout: NewLayout) -> int:
    return ceil_div(work.output[2], layout.strips * layout.tile.columns)


def _chunks(work: ConvWork, layout: NewLayout) -> int:
    return ceil_div(work.output[1], layout.rows)


def _items(work: ConvWork, layout: NewLayout) -> int:
    return work.batch * work.output[0] * _chunks(work, layout) * _groups(work, layout)


def layouts_of(work: ConvWork, device: CudaDevice) -> Iterator[NewLayout]:
    """Yield the layouts that may be the fastest."""
    from dataclasses import replace

    seen = set()
    for tile in TILES[work.kernel[2], work.stride[2]]:
        tile = replace(tile, vector=min(tile.vector, vector_of(work)))
        if tile in seen:
            continue
        seen.add(tile)
        all_vectors = ceil_div(work.groups, tile.vector)
        all_strips = ceil_div(work.output[2], tile.columns)
        sizes = {ceil_div(ceil_div(all_vectors, tiles), 4) * 4 for tiles in range(1, MOST_TILES)}
        sizes |= {16, 32, 64}
        for vectors in sorted(sizes):
            if vectors > tile.threads or vectors > ceil_div(all_vectors, 4) * 4:
                continue
            columns = ceil_div(all_vectors, vectors) * work.kernel[0]
            for strips in sorted({ceil_div(all_strips, groups) for groups in range(1, MOST_GROUPS)}):
                if vectors * strips > tile.threads:
                    continue
                for chunks in CHUNKS:
                    rows = ceil_div(work.output[1], chunks)
                    if ceil_div(work.output[1], rows) != chunks:
                        continue
                    one = NewLayout(tile, vectors, strips, rows, 1)
                    most = ceil_div(_items(work, one), one.units)
                    wave = device.multiprocessors // columns
                    for blocks in (*CLUSTERS, wave) if wave > MOST_CLUSTER else CLUSTERS:
                        if blocks <= most:
                            share = ceil_div(most, blocks)
                            yield NewLayout(tile, vectors, strips, rows, ceil_div(most, share) if blocks > 8 else blocks)


@lru_cache(maxsize=1024)
def _best(work: ConvWork, device: CudaDevice) -> NewLayout:
    return min(layouts_of(work, device), key=lambda one: expected_s(work, device, one))


LAUNCH_S, FIRST_S, ITEM_S, STEP_S, CLOCKS_S = 3.5e-6, 1.8e-6, 0.4e-6, 0.3e-6, 1.3e9
CLUSTER_S, GRID_S = 0.41e-6, 2.9e-6
APART = 0.2


def row_instructions(tile: NewTile) -> float:
    read = (tile.columns - 1) * tile.stride + tile.kernel + tile.columns / tile.stride
    products = tile.columns * tile.kernel**2 * tile.vector / tile.stride
    return 12 + read * (2 + tile.vector) + products


def expected_s(work: ConvWork, device: CudaDevice, layout: NewLayout) -> float:
    tile = layout.tile
    tiles, planes = _grid(work, layout)
    grid = layout.blocks * tiles * planes
    spread = CLUSTERED if 2 < layout.blocks <= MOST_CLUSTER else 1.0
    waves = ceil_div(grid, int(device.multiprocessors * spread))
    rounds = ceil_div(_items(work, layout), layout.blocks * layout.units)
    steps = (layout.rows - 1) * tile.stride + tile.kernel
    warps = layout.units * layout.unit_warps
    step_s = max(STEP_S, warps * row_instructions(tile) / (4 * CLOCKS_S))
    total_s = LAUNCH_S + waves * (FIRST_S + rounds * (ITEM_S + steps * step_s))
    total_s += APART * bytes_of(work) * planes / BYTES_S
    if layout.blocks > 1:
        total_s += CLUSTER_S if is_clustered(device, layout.blocks) else CLUSTER_S + GRID_S
    return total_s


def _instance(dtype: DType, tile: NewTile) -> Instance:
    defines = {
        "ELEMENT": CUDA_TYPES[dtype],
        "KERNEL": tile.kernel,
        "STRIDE": tile.stride,
        "COLUMNS": tile.columns,
        "VECTOR": tile.vector,
        "AHEAD": tile.ahead,
        "THREADS": tile.threads,
    }
    return Instance.of("depthwise/depthwise_weight_new.cu", defines)
