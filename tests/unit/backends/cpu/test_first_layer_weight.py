"""The kernel of a first layer's weights below the backend: tiles, orders, types, threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu import dense
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans import cpu_first
from convgrad_service.plans.cpu import choose
from convgrad_service.plans.cpu_dense import dense_of
from convgrad_service.plans.cpu_dense_parts import first_plan
from convgrad_service.plans.cpu_device import CpuDevice, sum_bytes
from convgrad_service.problems.geometry import ConvShape
from tests.support.numerics import reference
from tests.support.numerics.arrays import rng_for
from tests.support.numerics.bounds import assert_bounded, assert_same_bits

Array = NDArray[Any]
LIBRARY = load()
LANES = LIBRARY.vector_bytes // 4


def _conv(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: int,
    dilation: int = 1,
    groups: int = 1,
    channels: int = 3,
) -> ConvShape:
    padding = tuple((k // 2, k // 3) for k in kernel)
    output = tuple(
        (n + sum(p) - dilation * (k - 1) - 1) // stride + 1
        for n, k, p in zip(size, kernel, padding, strict=True)
    )
    each = len(size)
    channels = min(channels, LANES // 4)  # as many as the plan allows at this level
    return ConvShape(
        batch=2, groups=groups, in_channels=groups * channels,
        out_channels=groups * (LANES * 2 + 3),
        input_size=size, kernel_size=kernel, output_size=output,
        stride=(stride,) * each, padding=padding, dilation=(dilation,) * each,
    )  # fmt: skip


CONVS = {
    "7x7 stride 2": _conv((31, 45), (7, 7), 2),
    "4x4 stride 4": _conv((32, 36), (4, 4), 4),
    "dilated": _conv((25, 23), (3, 3), 1, 2),
    "1d of one channel": _conv((701,), (10,), 5, channels=1),
    "3d": _conv((5, 12, 13), (3, 5, 3), 1, channels=2),
    "long rows": _conv((3, 411), (3, 3), 1),
    "groups": _conv((14, 15), (3, 3), 2, groups=3, channels=1),
}


def _ran(conv: ConvShape, x: Array, y: Array, order: str, threads: int = 2) -> Array:
    """grad_weight by the kernel, whether or not another is faster at this level."""
    dtype = DType.of(x.dtype)
    assert dtype is not None
    device = CpuDevice(LIBRARY.level, threads, 1 << 28)
    plan = first_plan(dense_of(conv), sum_bytes=sum_bytes(dtype), device=device)
    assert plan is not None
    workers = Workers(threads, keep_bytes=1 << 20)
    single = np.float32 if x.dtype.itemsize < 4 else x.dtype
    shape = (conv.groups, conv.out_channels_per_group, conv.in_channels_per_group)
    grad_weight = np.full((*shape, *conv.kernel_size), np.nan, single)
    views = []
    for array in (x, y):
        view = array.reshape(conv.batch, conv.groups, -1, *array.shape[2:])
        if order == "last":
            moved = np.ascontiguousarray(np.moveaxis(view, (1, 2), (-2, -1)))
            view = np.moveaxis(moved, (-2, -1), (1, 2))
        views.append(view)
    try:
        dense.bwd_weight(LIBRARY, workers, "first_bwd_weight", plan, conv, *views, grad_weight)
    finally:
        workers.close()
    return grad_weight.reshape(conv.out_channels, conv.in_channels_per_group, *conv.kernel_size)


def _drawn(conv: ConvShape, seed: int, dtype: Any) -> tuple[Array, Array]:
    rng = rng_for(seed, conv)
    x = rng.standard_normal((conv.batch, conv.in_channels, *conv.input_size))
    y = rng.standard_normal((conv.batch, conv.out_channels, *conv.output_size))
    return x.astype(dtype), y.astype(dtype)


@pytest.mark.parametrize("slab_bytes", [1, 128 * 1024])
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("name", CONVS)
def test_tiles_and_orders(
    seed: int, monkeypatch: pytest.MonkeyPatch, name: str, order: str, slab_bytes: int
) -> None:
    monkeypatch.setattr(cpu_first, "SLAB_BYTES", slab_bytes)
    monkeypatch.setattr(cpu_first, "GROUP_PIXELS", 160 if slab_bytes > 1 else 29)
    conv = CONVS[name]
    x, y = _drawn(conv, seed, np.float32)
    wanted = reference.conv_bwd_weight(
        x, y, conv.kernel_size,
        stride=conv.stride, padding=conv.padding, dilation=conv.dilation, groups=conv.groups,
    )  # fmt: skip
    assert_bounded(_ran(conv, x, y, order), wanted, f"seed {seed}")


@pytest.mark.parametrize("dtype", ["float16", "float64"] if LANES > 4 else ["float16"])
def test_element_types(seed: int, dtype: str) -> None:
    conv = replace(CONVS["7x7 stride 2"], in_channels=1)
    x, y = _drawn(conv, seed, dtype)
    wanted = reference.conv_bwd_weight(
        x, y, conv.kernel_size, stride=conv.stride, padding=conv.padding
    )
    found = _ran(conv, x, y, "first")
    limit = 1e-4 if dtype == "float16" else 1e-12
    assert np.abs(found - wanted.value).max() <= limit * wanted.magnitude.max()


def test_threads_change_no_bit(seed: int) -> None:
    conv = CONVS["7x7 stride 2"]
    x, y = _drawn(conv, seed, np.float32)
    assert_same_bits(_ran(conv, x, y, "first", 1), _ran(conv, x, y, "first", 5), f"seed {seed}")


def test_other_widths_are_left_to_other_kernels() -> None:
    device = CpuDevice(LIBRARY.level, 2, 1 << 28)
    narrow = replace(CONVS["dilated"], out_channels=2)
    assert choose("bwd_weight", narrow, DType.FLOAT32, device).engine != "first"
    wide = replace(CONVS["dilated"], in_channels=2 * LANES + 1)
    assert choose("bwd_weight", wide, DType.FLOAT32, device).engine != "first"
