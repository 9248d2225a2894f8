"""The formulas of sizes and of taps, against counting one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad.errors import InvalidProblem
from convgrad_service.problems.formulas import (
    conv_output_size,
    implied_kernel_size,
    minimal_input_size,
    pool_output_size,
)
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.lattice import count_below, count_residues_from, floor_sum
from tests.support.numerics.problem_loops import meetings

small = st.integers(1, 7)
pads = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.integers(0, 15), small, st.integers(-20, 20), st.integers(-50, 50))
def test_floor_sum(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * i + b) // m for i in range(n))


@given(st.integers(-9, 60), small, small, small, small)
def test_count_below(limit: int, outer: int, stride: int, taps: int, dilation: int) -> None:
    below = sum(o * stride + r * dilation < limit for o in range(outer) for r in range(taps))
    assert count_below(limit, outer, stride, taps, dilation) == below


@given(st.data(), st.integers(0, 15), st.integers(-9, 9), st.integers(-30, 30), small)
def test_count_residues(data: st.DataObject, n: int, step: int, start: int, modulus: int) -> None:
    least = data.draw(st.integers(0, modulus))
    wanted = sum((start + i * step) % modulus >= least for i in range(n))
    assert count_residues_from(least, n, step, start, modulus) == wanted


def windows_that_fit(size: int, k: int, s: int, pad: tuple[int, int], d: int) -> int:
    """Output positions whose whole window lies inside the padded input."""
    padded, reach = size + sum(pad), d * (k - 1) + 1
    return sum(o * s + reach <= padded for o in range(padded))


@given(st.integers(1, 20), small, small, pads, st.integers(1, 4))
def test_conv_output_size(size: int, k: int, s: int, pad: tuple[int, int], d: int) -> None:
    fits = windows_that_fit(size, k, s, pad, d)
    if fits:
        assert conv_output_size("input", (size,), (k,), (s,), (pad,), (d,)) == (fits,)
    else:
        with pytest.raises(InvalidProblem, match="the kernel spans"):
            conv_output_size("input", (size,), (k,), (s,), (pad,), (d,))


@given(st.integers(1, 9), small, small, pads, st.integers(1, 4))
def test_minimal_input_size(out: int, k: int, s: int, pad: tuple[int, int], d: int) -> None:
    smallest = next(n for n in count(-20) if windows_that_fit(n, k, s, pad, d) >= out)
    if smallest < 1:
        with pytest.raises(InvalidProblem, match="expected at least 1 in every dimension"):
            minimal_input_size((out,), (k,), (s,), (pad,), (d,))
    else:
        assert minimal_input_size((out,), (k,), (s,), (pad,), (d,)) == (smallest,)
        assert minimal_input_size((out,), (k,), (s,), (pad,), (d,), (2,)) == (smallest + 2,)


@given(st.integers(1, 20), st.integers(1, 12), small, pads, st.integers(1, 4))
def test_implied_kernel_size(size: int, out: int, s: int, pad: tuple[int, int], d: int) -> None:
    """The one that leads there, or a refusal that says whether there is none or several."""
    room = range(1, size + sum(pad) + 1)
    fitting = [k for k in room if d * (k - 1) < len(room)]
    leads = [
        k for k in fitting if conv_output_size("x", (size,), (k,), (s,), (pad,), (d,)) == (out,)
    ]
    sizes = (size,), (out,), (s,), (pad,), (d,)
    if len(leads) == 1:
        assert implied_kernel_size(*sizes) == (leads[0],)
        return
    sentence = f"kernels of {leads[0]} to {leads[-1]}" if leads else "some kernel size connects"
    with pytest.raises(InvalidProblem, match=sentence):
        implied_kernel_size(*sizes)


@given(st.integers(1, 14), small, small, pads, st.integers(1, 5), st.booleans())
def test_pool_output_size(
    size: int, k: int, s: int, pad: tuple[int, int], d: int, ceil_mode: bool
) -> None:
    """Floor: windows inside the padded input. Ceil: one more where a remainder is left, unless it
    starts beyond the input and its left padding. Each must hold an element of the input."""
    padded, reach = size + sum(pad), d * (k - 1) + 1
    fits = windows_that_fit(size, k, s, pad, d)
    more = ceil_mode and (fits - 1) * s + reach < padded and fits * s < size + pad[0]
    out = fits + more
    full = all(any(0 <= o * s + r * d - pad[0] < size for r in range(k)) for o in range(out))
    arguments = (size,), (k,), (s,), (pad,), (d,)
    if out and max(pad) < reach and full:
        assert pool_output_size(*arguments, ceil_mode=ceil_mode) == (out,)
    else:
        with pytest.raises(InvalidProblem):
            pool_output_size(*arguments, ceil_mode=ceil_mode)


axis = st.tuples(small, small, small, small, st.integers(-5, 6), st.integers(1, 4))


def shape_of(axes: list[tuple[int, int, int, int, int, int]]) -> ConvShape:
    size, k, out, s, before, d = zip(*axes, strict=True)
    return ConvShape(
        batch=2,
        groups=3,
        in_channels=6,
        out_channels=9,
        input_size=size,
        kernel_size=k,
        output_size=out,
        stride=s,
        padding=tuple((b, 0) for b in before),
        dilation=d,
    )


@given(st.lists(axis, min_size=1, max_size=3))
def test_flops(axes: list[tuple[int, int, int, int, int, int]]) -> None:
    """2 * N * K * C/G = 2*2*9*2 for every pair of output and tap, or those that meet an input."""
    conv = shape_of(axes)
    pairs = 1
    for _, k, out, *_ in axes:
        pairs *= k * out
    assert conv.flops == 72 * pairs
    assert conv.valid_flops == 72 * sum(1 for _ in meetings(conv))


@given(axis, st.data())
def test_a_window_keeps_the_identity(
    one: tuple[int, int, int, int, int, int], data: st.DataObject
) -> None:
    """What meets in the window is what meets in the whole, in local coordinates."""
    conv = shape_of([one])
    spans = []
    for extent in (conv.input_size[0], conv.output_size[0]):
        start = data.draw(st.integers(0, extent - 1))
        spans.append((start, data.draw(st.integers(start + 1, extent))))
    (i0, i1), (o0, o1) = spans
    local = {(i[0] + i0, o[0] + o0, r[0]) for i, o, r in meetings(conv.window(0, *spans))}
    whole = {(i[0], o[0], r[0]) for i, o, r in meetings(conv)}
    assert local == {(i, o, r) for i, o, r in whole if i0 <= i < i1 and o0 <= o < o1}


@given(axis, st.data())
def test_halos_hold_everything_that_meets(
    one: tuple[int, int, int, int, int, int], data: st.DataObject
) -> None:
    conv = shape_of([one])
    whole = {(i[0], o[0]) for i, o, _ in meetings(conv)}
    for extent, partner, pairs in (
        (conv.output_size[0], conv.inputs_for, {(o, i) for i, o in whole}),
        (conv.input_size[0], conv.outputs_for, whole),
    ):
        start = data.draw(st.integers(0, extent - 1))
        stop = data.draw(st.integers(start + 1, extent))
        low, high = partner(0, (start, stop))
        assert low < high
        assert all(low <= b < high for a, b in pairs if start <= a < stop)


def test_cost_does_not_grow_with_the_extent() -> None:
    """Sizes that a loop would take hours over."""
    big = 2**31 - 1
    conv = shape_of([(big, big, big, 1, big - 1, 1)] * 3)
    assert conv.valid_flops < conv.flops
    pool = PoolShape(
        batch=1,
        channels=1,
        input_size=(1,),
        kernel_size=(big,),
        output_size=(big,),
        stride=(1,),
        padding=((big - 1, big - 1),),
        dilation=(1,),
        ceil_mode=False,
    )
    assert pool.valid_flops == big
    assert pool_output_size((1,), (big,), (1,), ((big // 2,) * 2,), (1,), ceil_mode=False) == (1,)
    reach = 7 * (2**28 - 1) + 1
    with pytest.raises(InvalidProblem, match="a pooling window holds no input element"):
        pool_output_size((5,), (2**28,), (3,), ((reach - 1,) * 2,), (7,), ceil_mode=True)


def test_geometry_text() -> None:
    conv = shape_of([(5, 3, 2, 1, 1, 1), (5, 2, 2, 2, 1, 1)])
    conv = replace(conv, padding=((1, 1), (1, 1)))
    assert conv.geometry_text == "kernel 3x2, stride 1x2, padding 1"
    conv = replace(conv, padding=((0, 1), (1, 1)), dilation=(2, 2), stride=(2, 2))
    assert conv.geometry_text == "kernel 3x2, stride 2, padding [0, 1]x[1, 1], dilation 2"
