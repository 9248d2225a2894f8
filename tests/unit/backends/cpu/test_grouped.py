"""The grouped and depthwise kernels below the backend: tiles and odd strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad_service.backends.cpu import grouped
from convgrad_service.backends.cpu.library import load
from convgrad_service.backends.cpu.threads import Workers
from convgrad_service.plans import cpu_depthwise, planar
from convgrad_service.problems.geometry import ConvShape
from tests.support.numerics import reference
from tests.support.numerics.arrays import rng_for
from tests.support.numerics.bounds import assert_bounded, assert_same_bits

Array = NDArray[Any]
LIBRARY = load()
ORDERS = ["first", "last", "mixed"]


def _conv(groups: int, in_each: int, out_each: int, stride: int, dilation: int) -> ConvShape:
    """A 3x4 kernel, asymmetric padding, and sizes that leave rows past the last window."""
    size, kernel, padding = (19, 22), (3, 4), ((2, 0), (1, 3))
    output = tuple(
        (n + sum(p) - dilation * (k - 1) - 1) // stride + 1
        for n, k, p in zip(size, kernel, padding, strict=True)
    )
    return ConvShape(
        batch=2, groups=groups, in_channels=groups * in_each, out_channels=groups * out_each,
        input_size=size, kernel_size=kernel, output_size=output,
        stride=(stride, stride), padding=padding, dilation=(dilation, dilation),
    )  # fmt: skip


def _ordered(array: Array, groups: int, order: str) -> Array:
    """A canonical view (N, G, C/G, H, W) whose memory has another order."""
    n, channels, height, width = array.shape
    view = array.reshape(n, groups, channels // groups, height, width)
    axes = {"first": (0, 1, 2, 3, 4), "last": (0, 3, 4, 1, 2), "mixed": (2, 0, 4, 1, 3)}[order]
    moved = np.ascontiguousarray(view.transpose(axes))
    return moved.transpose(np.argsort(axes))


def _forget_plans() -> None:
    for plan in (planar.forward_plan, planar.bwd_data_plan, planar.bwd_weight_plan):
        plan.cache_clear()
    cpu_depthwise.depthwise_tiles.cache_clear()
    grouped._prepared.cache_clear()


def _params(conv: ConvShape) -> dict[str, Any]:
    return {
        "stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation,
        "groups": conv.groups,
    }  # fmt: skip


def _all_ways(
    conv: ConvShape, x: Array, w: Array, y: Array, order: str, threads: int = 2
) -> list[Array]:
    """Output, grad_input and grad_weight by the kernels, channels first again."""
    workers = Workers(threads, keep_bytes=1 << 20)
    dtype = DType.of(x.dtype)
    assert dtype is not None
    groups = conv.groups
    xs, ys = _ordered(x, groups, order), _ordered(y, groups, order)
    ws = w.reshape(groups, -1, *w.shape[1:])
    output, grad_input, grad_weight = (np.full_like(a, np.nan) for a in (ys, xs, ws))
    try:
        ran = [
            grouped.forward(LIBRARY, workers, conv, dtype, xs, ws, output),
            grouped.bwd_data(LIBRARY, workers, conv, dtype, ys, ws, grad_input),
            grouped.bwd_weight(LIBRARY, workers, conv, dtype, xs, ys, grad_weight),
        ]
    finally:
        workers.close()
    assert None not in ran
    return [a.reshape(b.shape) for a, b in ((output, y), (grad_input, x), (grad_weight, w))]


def _drawn(conv: ConvShape, seed: int, dtype: Any) -> tuple[Array, Array, Array]:
    rng = rng_for(seed, conv)
    shapes = (
        (conv.batch, conv.in_channels, *conv.input_size),
        (conv.out_channels, conv.in_channels_per_group, *conv.kernel_size),
        (conv.batch, conv.out_channels, *conv.output_size),
    )
    x, w, y = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return x, w, y


def _references(conv: ConvShape, x: Array, w: Array, y: Array) -> list[reference.Reference]:
    params = _params(conv)
    return [
        reference.conv_fwd(x, w, **params),
        reference.conv_bwd_data(y, w, conv.input_size, **params),
        reference.conv_bwd_weight(x, y, conv.kernel_size, **params),
    ]


@pytest.mark.parametrize("tile_bytes", [2_000, 256 * 1024])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("channels", "stride", "dilation"),
    [
        ((5, 3, 2), 1, 1), ((2, 8, 13), 2, 1), ((3, 11, 4), 3, 2),
        ((37, 1, 1), 1, 2), ((67, 1, 1), 2, 2), ((9, 1, 3), 4, 1), ((150, 1, 1), 1, 1),
    ],
)  # fmt: skip
def test_tiles_and_orders(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    channels: tuple[int, int, int],
    stride: int,
    dilation: int,
    order: str,
    tile_bytes: int,
) -> None:
    monkeypatch.setattr(planar, "TILE_BYTES", tile_bytes)
    monkeypatch.setattr(cpu_depthwise, "BLOCK_BYTES", 8 * tile_bytes)
    _forget_plans()
    conv = _conv(*channels, stride, dilation)
    x, w, y = _drawn(conv, seed, np.float32)
    found = _all_ways(conv, x, w, y, order)
    for out, ref in zip(found, _references(conv, x, w, y), strict=True):
        assert_bounded(out, ref, f"seed {seed}")
    _forget_plans()


def _pointwise(channels: tuple[int, int, int], size: tuple[int, int]) -> ConvShape:
    groups, in_each, out_each = channels
    return ConvShape(
        batch=2, groups=groups, in_channels=groups * in_each, out_channels=groups * out_each,
        input_size=size, kernel_size=(1, 1), output_size=size,
        stride=(1, 1), padding=((0, 0),) * 2, dilation=(1, 1),
    )  # fmt: skip


@pytest.mark.parametrize("tile_bytes", [2_000, 256 * 1024])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [(9, 7), (16, 8), (1, 5), (2, 700)])
@pytest.mark.parametrize("channels", [(1, 133, 41), (3, 5, 9), (1, 1, 3), (1, 35, 2)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_pointwise_layers(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    channels: tuple[int, int, int],
    size: tuple[int, int],
    order: str,
    tile_bytes: int,
    dtype: Any,
) -> None:
    monkeypatch.setattr(planar, "TILE_BYTES", tile_bytes)
    _forget_plans()
    conv = _pointwise(channels, size)
    x, w, y = _drawn(conv, seed, dtype)
    found = _all_ways(conv, x, w, y, order)
    for out, ref in zip(found, _references(conv, x, w, y), strict=True):
        assert_bounded(out, ref, f"seed {seed}")
    _forget_plans()


@pytest.mark.parametrize("order", ORDERS)
def test_phases_that_no_tap_reaches(seed: int, order: str) -> None:
    conv = ConvShape(
        batch=2, groups=1, in_channels=20, out_channels=12, input_size=(10, 7), kernel_size=(1, 1),
        output_size=(4, 3), stride=(3, 3), padding=((0, 0),) * 2, dilation=(1, 1),
    )  # fmt: skip
    x, w, y = _drawn(conv, seed, np.float32)
    for out, ref in zip(_all_ways(conv, x, w, y, order), _references(conv, x, w, y), strict=True):
        assert_bounded(out, ref, f"seed {seed}")


def test_infinite_positions_stay_in_their_channels_and_positions(seed: int) -> None:
    """Of a plane that is read in place, the last vector has positions of the next channel."""
    conv = _pointwise((1, 7, 6), (5, 5))
    x, w, y = _drawn(conv, seed, np.float32)
    x[0, 2, 4, 4] = y[1, 3, 0, 0] = np.inf
    output, grad_input, grad_weight = _all_ways(conv, x, w, y, "first")
    wrong = ~np.isfinite(output)
    assert wrong[0, :, 4, 4].all()
    assert wrong.sum() == conv.out_channels
    wrong = ~np.isfinite(grad_input)
    assert wrong[1, :, 0, 0].all()
    assert wrong.sum() == conv.in_channels
    wrong = ~np.isfinite(grad_weight)
    assert wrong[3].all()
    assert wrong[:, 2].all()
    assert wrong.sum() == conv.in_channels + conv.out_channels - 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("channels", [(6, 4, 4), (33, 1, 1)])
def test_threads_change_no_bit(seed: int, channels: tuple[int, int, int], order: str) -> None:
    conv = _conv(*channels, 1, 1)
    x, w, y = _drawn(conv, seed, np.float32)
    one, three = (_all_ways(conv, x, w, y, order, threads) for threads in (1, 3))
    for a, b in zip(one, three, strict=True):
        assert_same_bits(a, b, f"seed {seed}")


def test_subnormals_survive() -> None:
    conv = _conv(3, 2, 2, 1, 1)
    x, w, y = _drawn(conv, 0, np.float32)
    tiny = np.float32(1e-41)
    out = _all_ways(conv, np.full_like(x, tiny), np.ones_like(w), y, "first")[0]
    ref = reference.conv_fwd(np.full_like(x, tiny), np.ones_like(w), **_params(conv))
    np.testing.assert_allclose(out, ref.value, rtol=1e-4)
    assert out.min() > 0
