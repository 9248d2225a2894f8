"""Haloed tiles: their tables, followed as the kernel does, give the convolution; no GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cuda.kernels.conv.hopper_halo import HopperHalo
from convgrad_service.backends.cuda.kernels.conv.hopper_halo_tables import (
    CHUNK,
    TAP_BYTES,
)
from convgrad_service.backends.cuda.kernels.conv.hopper_halo_tiles import (
    GROUPS,
    TABLE_BYTES,
    HaloTile,
    halo_tiles,
)
from convgrad_service.backends.cuda.kernels.core.gather_axes import gather_axes
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.program import Launch
from convgrad_service.plans.cuda.works import (
    ConvWork,
    Direction,
    activation_operand,
    weight_operand,
)
from convgrad_service.problems.geometry import ConvShape
from convgrad_service.problems.layouts import LAYOUTS, activation_shape, weight_shape

Array = NDArray[np.float64]
UNWRITTEN = -1e9


def work_of(
    direction: Direction,
    *,
    batch: int,
    channels: tuple[int, int],
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> ConvWork:
    sides = zip(size, kernel, stride, padding, dilation, strict=True)
    out = tuple((n + sum(p) - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    conv = ConvShape(
        batch=batch,
        groups=1,
        in_channels=channels[0],
        out_channels=channels[1],
        input_size=size,
        kernel_size=kernel,
        output_size=out,
        stride=stride,
        padding=padding,
        dilation=dilation,
    )
    order = LAYOUTS[{1: "NWC", 2: "NHWC", 3: "NDHWC"}[len(size)]]
    dtype = DType.BFLOAT16
    x, y = (
        activation_operand(name, dtype, order, activation_shape(order, batch, 1, total, extent), 1)
        for name, total, extent in (("x", channels[0], size), ("y", channels[1], out))
    )
    shape = weight_shape(order, 1, channels[0], channels[1], kernel)
    return ConvWork(
        direction=direction,
        conv=conv,
        dtype=dtype,
        result_dtype=dtype,
        x=x,
        w=weight_operand("w", dtype, order, shape, 1),
        y=y,
    )


def box(array: Array, first: tuple[int, ...], extent: tuple[int, ...]) -> Array:
    """As the copy engine takes it: zeros outside."""
    found = np.zeros(extent, np.float64)
    inside = [
        slice(max(a, 0), max(min(a + n, whole), 0))
        for a, n, whole in zip(first, extent, array.shape, strict=True)
    ]
    part = array[tuple(inside)]
    into = tuple(
        slice(one.start - a, one.start - a + n)
        for one, a, n in zip(inside, first, part.shape, strict=True)
    )
    found[into] = part
    return found


def followed(work: ConvWork, tile: HaloTile, source: Array, weight: Array, shape: Any) -> Array:
    """What the kernel would write: source N D H W C, weight (result, T, R, S, source channels)."""
    result = np.full(shape, UNWRITTEN, np.float64)
    tables, halo = tile.tables, tile.halo
    rows = 32 if tile.twice else 64
    spans = (work.batch, *tile.tiles, tile.channel_tiles)
    pixels, stay = tile.row_pixels * tile.rows, tile.slots == 0
    for n, *at, channel_tile in np.ndindex(*spans):
        m = [i * extent for i, extent in zip(at, tile.extent, strict=True)]
        sums = np.zeros((GROUPS, 64, tile.columns), np.float64)
        for chunk in range(tile.chunks):
            stages = []
            for depth in halo.depths:
                first = [i + o for i, o in zip(m, (depth, *halo.first), strict=True)]
                taken = box(
                    source,
                    (n, *first, chunk * CHUNK),
                    (1, 1, tile.rows, tile.row_pixels, CHUNK),
                )
                room = np.full((pixels + 2 * tile.columns + 2000, CHUNK), 7777, np.float64)
                room[:pixels] = taken.reshape(pixels, CHUNK)
                stages.append(room)
            memory: dict[int, Array] = {}
            at_slice = 0
            for number, step in enumerate(tables.steps):
                if not stay:
                    memory = {}
                load = tables.loads[number]
                t, r, first_s = load.tap
                for i in range(tables.run):
                    halves = [
                        box(
                            weight,
                            (channel_tile * rows, at_t, r, first_s + i, chunk * CHUNK),
                            (rows, 1, 1, 1, CHUNK),
                        ).reshape(rows, CHUNK)
                        for at_t in (t, t + 1)[: 64 // rows]
                    ]
                    memory[load.to + i * TAP_BYTES] = np.concatenate(halves)
                for tap in tables.taps[step.first_tap : step.first_tap + step.taps]:
                    for group in range(GROUPS):
                        start = tap.pixel + group * tile.columns
                        b = stages[at_slice][start : start + tile.columns]
                        sums[group] += memory[tap.weight] @ b.T
                at_slice += step.last
        for group, half in np.ndindex(GROUPS, 64 // rows):
            deeper = 1 - half if tile.twice and tile.problem.axes[0].x_tap > 0 else half
            channels = min(rows, shape[-1] - channel_tile * rows)
            for column in range(tile.columns):
                h, w = divmod(column + group * tile.columns, tile.row_pixels)
                place = m[0] + deeper, m[1] + h, m[2] + w
                if h >= tile.extent[1] or w >= tile.extent[2]:
                    continue
                if any(p >= count for p, count in zip(place, shape[1:-1], strict=True)):
                    continue
                into = result[(n, *place)][channel_tile * rows :][:channels]
                assert (into == UNWRITTEN).all(), "written twice"
                first_row = half * rows
                into[:] = sums[group, first_row : first_row + channels, column]
    return result


def defined(work: ConvWork, source: Array, weight: Array, shape: Any) -> Array:
    """By the definition: every pair that meets."""
    result = np.zeros(shape, np.float64)
    backward = work.direction == "bwd_data"
    small = work.output
    for o in np.ndindex(*small):
        for r in np.ndindex(*work.kernel):
            i = tuple(
                a * s + b * d - p
                for a, s, b, d, p in zip(o, work.stride, r, work.dilation, work.pad, strict=True)
            )
            if any(not 0 <= a < n for a, n in zip(i, work.input, strict=True)):
                continue
            to, by = (i, o) if backward else (o, i)
            result[(slice(None), *to)] += source[(slice(None), *by)] @ weight[(slice(None), *r)].T
    return result


def drawn(seed: int) -> ConvWork:
    rng = random.Random(seed)
    ndim = rng.choice((1, 2, 2, 3, 3))
    kernel = tuple(rng.choice((1, 2, 3, 3, 4)) for _ in range(ndim))
    direction: Direction = rng.choice(("fwd", "bwd_data"))
    dilation = tuple(rng.choice((1, 1, 2)) for _ in range(ndim))
    padding = tuple((rng.randint(0, 2), rng.randint(0, 2)) for _ in range(ndim))
    most = {1: 40, 2: 12, 3: 5}[ndim]
    size = tuple(
        d * (k - 1) + 1 + rng.randint(0, most) for d, k in zip(dilation, kernel, strict=True)
    )
    channels = rng.choice((16, 32, 40, 64, 80, 136)), rng.choice((16, 32, 40, 64, 80, 136))
    return work_of(
        direction,
        batch=rng.randint(1, 2),
        channels=channels,
        size=size,
        kernel=kernel,
        stride=(1,) * ndim,
        padding=padding,
        dilation=dilation,
    )


@pytest.mark.parametrize("seed", range(40))
def test_tables_give_the_convolution(seed: int) -> None:
    work = drawn(seed)
    if HopperHalo(anything=True).why_not(work, H200) is not None:
        return
    rng = np.random.default_rng(seed)
    backward = work.direction == "bwd_data"
    read, written = work.in_channels, work.out_channels
    sizes = work.input, work.output
    if backward:
        read, written, sizes = written, read, sizes[::-1]
    source = rng.integers(-3, 4, (work.batch, *sizes[0], read)).astype(np.float64)
    weight = rng.integers(-3, 4, (written, *work.kernel, read)).astype(np.float64)
    shape = (work.batch, *sizes[1], written)
    wanted = defined(work, source, weight, shape)
    tiles = halo_tiles(work, gather_axes(work), H200)
    for tile in {tiles[0], tiles[len(tiles) // 2]}:
        np.testing.assert_array_equal(
            followed(work, tile, source, weight, shape), wanted, tile.name
        )


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "chosen"),
    [
        ((64, 64), 3, 1, True),
        ((32, 32), 3, 1, True),
        ((96, 128), 3, 1, True),
        ((128, 128), 3, 1, False),
        ((64, 256), 1, 1, False),
        ((256, 256), 3, 1, False),
        ((64, 64), 3, 2, False),
        ((8, 64), 3, 1, False),
    ],
)
@pytest.mark.parametrize("size", [7, 56])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_plan_is_judged_by_channels_and_kernel_alone(
    channels: tuple[int, int], kernel: int, stride: int, chosen: bool, size: int, batch: int
) -> None:
    work = work_of(
        "bwd_data",
        batch=batch,
        channels=channels,
        size=(size, size),
        kernel=(kernel, kernel),
        stride=(stride, stride),
        padding=((kernel // 2, kernel // 2),) * 2,
        dilation=(1, 1),
    )
    assert (HopperHalo().why_not(work, H200) is None) == chosen
    assert HopperHalo().why_not(work, replace(H200, capability=(8, 0))) is not None
    if chosen:
        launch = HopperHalo().launches(work, H200).steps[-1]
        assert isinstance(launch, Launch)
        assert launch.instance in HopperHalo().instances()
        assert launch.shared_bytes + TABLE_BYTES <= H200.shared_bytes_per_block
        assert launch.grid[0] <= H200.multiprocessors
