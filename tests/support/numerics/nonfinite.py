"""The rule for NaN and infinities among the inputs, with both of its bounds, for every backend.

*At least*: where the products of existing elements alone make a result non-finite, it is
non-finite; NaN may stand for an infinity. A product with padding, with the zeros that a stride
inserts or with what fills up a tile does not exist, but may be computed, and zero times an infinity
is NaN.

*At most*: a non-finite value spreads within what it feeds (`reached`), and everything else has the
bits of the same call with the non-finite elements set to zero.

Between the bounds a result is non-finite or right. Max pooling has no room between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.base import Backend
from tests.support.kernels.harness import answers, check
from tests.support.numerics.arrays import DTYPES, Arrays, draw, normals, rng_for
from tests.support.numerics.bounds import assert_bounded, assert_same_bits
from tests.support.numerics.cases import Case
from tests.support.numerics.oracle import expected
from tests.support.numerics.reference import Reference

__all__ = ["assert_rule", "check_rule", "finite_part", "planted", "reached"]

Mask = NDArray[np.bool_]
PACKED = 16
"""Channels of an aligned block: groups that share one may be multiplied together."""


def nonfinite(array: NDArray[Any]) -> Mask:
    """Return where an array holds NaN or an infinity; integers are finite."""
    return ~np.isfinite(array.astype(np.float64))


def finite_part(tensors: Mapping[str, NDArray[Any]]) -> Arrays:
    """The same tensors with their non-finite elements set to zero."""
    return {
        name: np.where(nonfinite(array), array.dtype.type(0), array)
        for name, array in tensors.items()
    }


# --- at most -------------------------------------------------------------------------------------


def _blocks(group: int, channels: int) -> set[int]:
    """Return the aligned blocks of channels that a group with this number of channels is in."""
    return set(range(group * channels // PACKED, ((group + 1) * channels - 1) // PACKED + 1))


def packed_with(groups: int, read: int, written: int) -> Mask:
    """[g, h]: whether an element of group g may reach group h, by the channels of a group.

    Groups of fewer than 16 channels, on either side, are packed with those with which they share
    an aligned block of 16 channels on that side. Depthwise groups are not packed.
    """
    together = np.eye(groups, dtype=bool)
    if read == written == 1:
        return together
    for channels in (read, written):
        if channels < PACKED:
            blocks = [_blocks(group, channels) for group in range(groups)]
            together |= np.array([[bool(a & b) for b in blocks] for a in blocks])
    return together


def _from_activation(bad: Mask, groups: int, shape: tuple[int, ...]) -> Mask:
    """Results [N, C, ...] that elements of an activation [N, C, ...] may reach.

    Of an image, the group and those packed with it.
    """
    n, channels = bad.shape[:2]
    together = packed_with(groups, channels // groups, shape[1] // groups)
    of_group = bad.reshape(n, groups, -1).any(axis=2)
    reached_groups = (of_group[:, :, None] & together).any(axis=1)
    each = np.repeat(reached_groups, shape[1] // groups, axis=1)
    return np.broadcast_to(each.reshape(*each.shape, *(1,) * (len(shape) - 2)), shape)


def _from_channels(bad: Mask, shape: tuple[int, ...]) -> Mask:
    """Results [N, C, ...] of the marked channels, in all images."""
    return np.broadcast_to(bad.reshape(-1, *(1,) * (len(shape) - 2)), shape)


def _rest(array: Mask, *kept: int) -> Mask:
    """Whether any is marked, along every axis but those kept."""
    return array.any(axis=tuple(axis for axis in range(array.ndim) if axis not in kept))


def _forward(bad: Mapping[str, Mask], names: tuple[str, str, str], groups: int, shape: Any) -> Mask:
    """Of a forward convolution's output: its input, weight and bias by name."""
    x, w, bias = names
    reached = _from_activation(bad[x], groups, shape) | _from_channels(_rest(bad[w], 0), shape)
    return reached | _from_channels(bad[bias], shape) if bias in bad else reached


def _backward(
    bad: Mapping[str, Mask], names: tuple[str, str, str], groups: int, shape: Any
) -> Mask:
    """Of an input's gradient: what stands for grad_output, the weight and a bias by name."""
    y, w, bias = names
    weight = bad[w].reshape(groups, -1, *bad[w].shape[1:])
    reached = _from_activation(bad[y], groups, shape)
    reached = reached | _from_channels(_rest(weight, 0, 2).reshape(-1), shape)
    return reached | _from_channels(bad[bias], shape) if bias in bad else reached


def _weight(bad: Mapping[str, Mask], names: tuple[str, str], groups: int, shape: Any) -> Mask:
    """Of a weight's gradient [K, C/groups, ...]: the rows of the output gradient's channels, and of
    each group the columns of the input's; both by name, the input first."""
    x, y = names
    rows, columns = _rest(bad[y], 1), _rest(bad[x], 1)
    of_column = np.repeat(columns.reshape(groups, -1), shape[0] // groups, axis=0)
    reached = rows[:, None] | of_column
    return np.broadcast_to(reached.reshape(*reached.shape, *(1,) * (len(shape) - 2)), shape)


def _second(
    bad: Mapping[str, Mask], output: str, transposed: bool, groups: int, shape: Any
) -> Mask:
    """Of a double backward pass's outputs; of terms whose tensors are missing, none."""
    ways = (_backward, _forward) if transposed else (_forward, _backward)
    none = np.zeros(shape, bool)
    if output == "grad_grad_output":
        reached = none
        for names in (("grad_grad_input", "weight"), ("input", "grad_grad_weight")):
            if names[0] in bad and names[1] in bad:
                reached = reached | ways[0](bad, (*names, "grad_grad_bias"), groups, shape)
        return reached
    if output == "grad_input":
        return ways[1](bad, ("grad_output", "grad_grad_weight", ""), groups, shape)
    names = ("grad_grad_input", "grad_output")
    return _weight(bad, names[::-1] if transposed else names, groups, shape)


def _fused(bad: Mapping[str, Mask], params: Mapping[str, Any], shape: Any, middle: Any) -> Mask:
    """Stage by stage: what reaches the intermediate feeds the second convolution."""
    groups = [params.get(conv, {}).get("groups", 1) for conv in ("conv0", "conv1")]
    first = _forward(bad, ("input", "weight0", "bias0"), groups[0], middle)
    return _forward({**bad, "middle": first}, ("middle", "weight1", "bias1"), groups[1], shape)


def _middle_shape(case: Case, tensors: Mapping[str, NDArray[Any]]) -> tuple[int, ...]:
    first = {"input": tensors["input"], "weight": tensors["weight0"]}
    answer = expected("conv_fwd", first, case.params.get("conv0", {}))["output"]
    assert isinstance(answer, Reference)
    return answer.value.shape


def reached(
    case: Case, tensors: Mapping[str, NDArray[Any]], output: str, shape: tuple[int, ...]
) -> Mask:
    """Return where an output of this canonical shape may differ from that of the finite parts."""
    bad = {name: nonfinite(array) for name, array in tensors.items()}
    groups = case.groups
    transposed = "transpose" in case.operation
    if output == "grad_bias":
        return _rest(bad["grad_output"], 1)
    if "double" in case.operation:
        mask = _second(bad, output, transposed, groups, shape)
    elif output == "grad_weight":
        names = ("input", "grad_output")
        mask = _weight(bad, names[::-1] if transposed else names, groups, shape)
    elif case.operation == "grouped_conv_conv_fwd":
        mask = _fused(bad, case.params, shape, _middle_shape(case, tensors))
    elif case.operation == "conv_fwd":
        mask = _forward(bad, ("input", "weight", "bias"), groups, shape)
    elif transposed and output == "grad_input":
        mask = _forward(bad, ("grad_output", "weight", ""), groups, shape)
    else:
        gradient = "input" if transposed else "grad_output"
        mask = _backward(bad, (gradient, "weight", "bias"), groups, shape)
    if "accumulate" in bad and case.params.get("beta") != 0:
        mask = mask | bad["accumulate"]
    return mask


# --- both bounds ---------------------------------------------------------------------------------


def assert_rule(
    case: Case,
    tensors: Mapping[str, NDArray[Any]],
    found: Arrays,
    finite: Arrays,
    what: str = "",
    c: float = 0.0,
) -> None:
    """The results of a case's canonical tensors keep to the rule.

    Parameters
    ----------
    tensors : arrays by name, canonical
        With non-finite elements among them.
    found : arrays by name, canonical
        What the call gave.
    finite : arrays by name, canonical
        What the same call gave of ``finite_part(tensors)``.
    c : float
        What rounding the factors costs, see `tests.support.numerics.bounds`.

    Raises
    ------
    AssertionError
        Which bound an output broke, and where first.
    """
    wanted = expected(case.operation, tensors, case.params)
    what = what or case.id
    if "pool" in case.operation:
        check(found, wanted, "bounded", what)
        return
    assert set(found) == set(wanted), f"{what}: outputs {sorted(found)}, expected {sorted(wanted)}"
    for output, reference in wanted.items():
        assert isinstance(reference, Reference)
        array, label = found[output], f"{what} {output}"
        lost = nonfinite(reference.value) & np.isfinite(array.astype(np.float64))
        assert not lost.any(), (
            f"{label}: at least: {int(lost.sum())} elements are finite whose products make them "
            f"non-finite, {_first(lost, array, reference)}"
        )
        mask = reached(case, tensors, output, array.shape)
        assert_same_bits(
            np.where(mask, array.dtype.type(0), array),
            np.where(mask, array.dtype.type(0), finite[output]),
            f"{label}: at most: beside what non-finite elements feed",
        )
        # Between the bounds: what is finite is right.
        kept = np.isfinite(reference.value) & np.isfinite(array.astype(np.float64))
        settled = np.where(kept, array, array.dtype.type(0))
        assert_bounded(settled, _where(kept, reference), f"{label}: finite", c)


def _first(wrong: Mask, array: NDArray[Any], reference: Reference) -> str:
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"first at {index}: found {array[index]!s}, expected {reference.value[index]!s}"


def _where(kept: Mask, reference: Reference) -> Reference:
    return reference.map(lambda a: np.where(kept, a, a.dtype.type(0)))


# --- planting ------------------------------------------------------------------------------------


def planted(seed: int, case: Case, dtype: str) -> tuple[Arrays, Iterator[tuple[str, Arrays]]]:
    """Canonical finite tensors, and each in turn with non-finite elements in place of zeros.

    One tensor at a time, so that what it does not feed can be told. Of each it is the first
    element, which padding meets where there is any, and one or two others, or a whole image.
    The finite part of every variant is the first of what is returned.
    """
    rng = rng_for(seed, case.id, dtype, "non-finite")
    finite = draw(case, rng, DTYPES[dtype], normals)
    places = {}
    for name, array in finite.items():
        chosen = np.zeros(array.shape, bool)
        kind = rng.integers(4)
        if kind == 0 and array.ndim > 2:
            chosen[rng.integers(array.shape[0])] = True
        else:
            chosen.flat[rng.integers(array.size, size=kind)] = True
            chosen.flat[0] = kind != 3
        array[chosen] = 0
        places[name] = chosen

    def variants() -> Iterator[tuple[str, Arrays]]:
        for name, chosen in places.items():
            spoilt = finite[name].copy()
            spoilt[chosen] = rng.choice([np.inf, -np.inf, np.nan], int(chosen.sum()))
            yield name, {**finite, name: spoilt}

    return finite, variants()


def check_rule(
    backend: Backend,
    seed: int,
    case: Case,
    dtype: str,
    layout: str | None = None,
    c: float = 0.0,
) -> None:
    """Plants non-finite elements in each tensor of a case in turn, and asserts the rule."""
    finite, variants = planted(seed, case, dtype)
    clean = answers(backend, case, finite, layout)
    for name, tensors in variants:
        found = answers(backend, case, tensors, layout)
        what = f"seed {seed}, {case.id} {dtype} {layout}, non-finite {name}"
        assert_rule(case, tensors, found, clean, what, c)
