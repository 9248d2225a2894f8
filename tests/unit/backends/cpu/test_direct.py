"""The direct kernels against the definition, and that tiles are passed over where nothing meets."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.cpu import direct
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans import planar
from convgrad_service.plans.cpu import Direction, choose
from convgrad_service.plans.cpu_device import CpuDevice
from convgrad_service.problems.geometry import ConvShape

DEVICE = CpuDevice("x86_64_v4", 2, 256 * 2**20)
Axes = Sequence[tuple[int, ...]]
HUGE = [1, 2, 3, 4, 6, 9, 100, 2**30, 2**31 - 1]


def shape(axes: Axes, **channels: int) -> ConvShape:
    """A convolution from (input, kernel, output, stride, dilation, pad before) of each axis."""
    size, kernel, out, stride, dilation, pad = zip(*axes, strict=True)
    sizes = {"batch": 1, "groups": 1, "in_channels": 1, "out_channels": 1} | channels
    return ConvShape(
        input_size=size,
        kernel_size=kernel,
        output_size=out,
        stride=stride,
        padding=tuple((before, 0) for before in pad),
        dilation=dilation,
        **sizes,
    )


def drawn(pick: random.Random) -> Axes:
    axes: list[tuple[int, ...]] = []
    for _ in range(3):
        size, kernel, out = pick.randint(1, 9), pick.randint(1, 7), pick.randint(1, 6)
        stride, dilation = pick.choice(HUGE), pick.choice(HUGE)
        pads = [0, pick.randint(-3, 8), pick.randint(0, (kernel - 1) * dilation + 3)]
        pad = pick.choice([*pads, (out - 1) * stride])
        axes.append((size, kernel, out, stride, dilation, pad))
    return axes


def meetings(axes: Axes) -> list[NDArray[Any]]:
    """1 where input position, tap and output position meet, for each axis."""
    found = []
    for size, kernel, out, stride, dilation, pad in axes:
        table = np.zeros((size, kernel, out))
        for tap in range(kernel):
            for position in range(out):
                if 0 <= (at := position * stride + tap * dilation - pad) < size:
                    table[at, tap, position] = 1
        found.append(table)
    return found


@pytest.mark.parametrize("block", range(8))
def test_every_geometry_against_the_definition(block: int) -> None:
    library, workers = load(), Workers(2, keep_bytes=2**20)
    for seed in range(block * 12, block * 12 + 12):
        pick, rng = random.Random(seed), np.random.default_rng(seed)
        axes = drawn(pick)
        conv = shape(axes, batch=2, groups=2, in_channels=4, out_channels=6)
        x, w, y = (
            rng.integers(-2, 3, lead + size).astype(np.float32)
            for lead, size in (
                ((2, 2, 2), conv.input_size),
                ((2, 3, 2), conv.kernel_size),
                ((2, 2, 3), conv.output_size),
            )
        )
        tables = meetings(axes)
        names = "dxp,hyq,wzr"
        wanted = [
            np.einsum(f"ngcdhw,gkcxyz,{names}->ngkpqr", x, w, *tables, optimize=True),
            np.einsum(f"ngkpqr,gkcxyz,{names}->ngcdhw", y, w, *tables, optimize=True),
            np.einsum(f"ngcdhw,ngkpqr,{names}->gkcxyz", x, y, *tables, optimize=True),
        ]
        found = [np.full(array.shape, np.nan, np.float32) for array in wanted]
        direct.forward(library, workers, conv, x, w, found[0])
        direct.bwd_data(library, workers, conv, y, w, found[1])
        direct.bwd_weight(library, workers, conv, x, y, found[2])
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs, f"seed {seed}: {conv}")


def test_a_cancelled_launch_ends_within_one_result() -> None:
    """A result of a billion terms must not outlive the request that asked for it."""
    size = 2**15
    conv = shape([(1, 1, 1, 1, 1, 0), *[(size, size, 1, 1, 1, 0)] * 2])
    ones = np.ones((1, 1, 1, 1, 1, 1), np.float32)
    whole = np.broadcast_to(ones, (1, 1, 1, 1, size, size))
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        direct.forward(
            load(),
            Workers(1, keep_bytes=2**20),
            conv,
            whole,
            whole,
            np.empty_like(ones),
            cancelled=cancelled,
        )
    assert time.monotonic() - started_s < 10


# Each would otherwise copy gigabytes or list a billion taps for a few thousand products.
SPARSE: dict[str, tuple[Direction, Axes]] = {
    "a dilation of thousands": ("bwd_data", [(13288, 4, 1000, 1, 4096, 0), (3, 1, 3, 1, 1, 0)]),
    "a phase for each pixel": ("bwd_data", [(8192, 1, 1, 8192, 1, 0)] * 2),
    "as many phases as taps": ("bwd_data", [(10_000, 10_000, 1, 10_000, 1, 0)]),
    "a kernel in padding": ("fwd", [(1, 300, 302, 1, 1, 300)] * 2),
    "taps far apart": ("bwd_weight", [(13288, 4, 1000, 1, 4096, 0), (3, 1, 3, 1, 1, 0)]),
}


@pytest.mark.parametrize("case", SPARSE)
def test_where_little_meets_only_that_is_visited(case: str) -> None:
    direction, axes = SPARSE[case]
    plan = {
        "fwd": planar.forward_plan,
        "bwd_data": planar.bwd_data_plan,
        "bwd_weight": planar.bwd_weight_plan,
    }[direction]
    few = shape(axes, in_channels=2, out_channels=2)
    many = shape(axes, in_channels=17, out_channels=17)
    started_s = time.monotonic()
    assert plan(few, 4, 16, False) is None
    choice = choose(direction, many, DType.FLOAT32, DEVICE)
    assert choice.engine == "direct"
    assert time.monotonic() - started_s < 10


def test_plans_that_are_kept_are_small() -> None:
    """Anybody may fill the cache with the largest plans there are."""
    conv = shape([(9000, planar.MOST_TAPS, 9001 - planar.MOST_TAPS, 1, 1, 0)])
    plan = planar.forward_plan(conv, 4, 16, False)
    assert plan is not None
    arrays = plan.taps, plan.first_tap, plan.src_phase, plan.dst_phase
    assert sum(array.nbytes for array in arrays) * planar.PLANS_KEPT * 3 < 150 * 2**20
    more = shape([(9000, planar.MOST_TAPS + 1, 9000 - planar.MOST_TAPS, 1, 1, 0)])
    assert planar.forward_plan(more, 4, 16, False) is None


@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
@pytest.mark.parametrize("stride", [1, 2, 16])
@pytest.mark.parametrize("dilation", [1, 6, 18])
def test_layers_that_people_train_are_tiled(
    direction: Direction, stride: int, dilation: int
) -> None:
    pad = dilation
    out = (56 + 2 * pad - 2 * dilation - 1) // stride + 1
    axes = [(56, 3, out, stride, dilation, pad)] * 2
    conv = shape(axes, batch=4, in_channels=64, out_channels=64)
    choice = choose(direction, conv, DType.FLOAT32, DEVICE)
    assert choice.engine == "dense"
