"""The checker of the rule for non-finite values accepts what keeps to it and finds violations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.numerics.arrays import Arrays
from tests.support.numerics.bounds import rounded
from tests.support.numerics.cases import (
    FROM_CONV,
    FROM_CONV3D,
    FUSED,
    Case,
    conv3d_transpose,
    conv_fwd,
    maxpool_bwd,
    maxpool_fwd,
)
from tests.support.numerics.geometries import CONVS, POOLS, Conv
from tests.support.numerics.nonfinite import assert_rule, finite_part, packed_with, planted
from tests.support.numerics.oracle import expected
from tests.support.numerics.reference import Reference

NAMES = ("plain", "depthwise", "groups_4", "padding_beyond_the_kernel", "3d_groups_2")
CASES = [
    *(make(name, CONVS[name]) for make in FROM_CONV.values() for name in NAMES),
    *(make("3d_groups_2", CONVS["3d_groups_2"]) for make in FROM_CONV3D.values()),
    *(case for case in FUSED if "silu" not in case.params.values()),
]


def answered(case: Case, tensors: Arrays) -> Arrays:
    """As the definition has it, rounded once."""
    dtype = next(iter(tensors.values())).dtype
    return {
        name: rounded(ref.value, dtype).astype(dtype) if isinstance(ref, Reference) else ref
        for name, ref in expected(case.operation, tensors, case.params).items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_definition_keeps_to_the_rule(seed: int, case: Case, dtype: str) -> None:
    finite, variants = planted(seed, case, dtype)
    for name, tensors in variants:
        part = finite_part(tensors)
        for tensor, array in part.items():
            np.testing.assert_array_equal(array, finite[tensor])
        assert_rule(case, tensors, answered(case, tensors), answered(case, finite), name)


SMALL = Conv(2, 32, 32, (4, 5), (3, 3), padding=1, groups=8)
DEPTHWISE = Conv(2, 6, 6, (4, 5), (3, 3), padding=1, groups=6)
DENSE = Conv(2, 5, 6, (4, 5), (3, 3), padding=1)

# Of a case and the tensor and element that is NaN: the output, an element of it that may be NaN and
# one that may not, from the rule's text.
SPREAD: list[tuple[Case, str, tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]] = [
    (conv_fwd("dense", DENSE), "input", (1, 2, 0, 0), "output", (1, 5, 3, 4), (0, 5, 3, 4)),
    (conv_fwd("dense", DENSE), "weight", (3, 2, 0, 0), "output", (1, 3, 3, 4), (1, 2, 3, 4)),
    (conv_fwd("dense", DENSE), "bias", (3,), "output", (0, 3, 0, 0), (1, 4, 0, 0)),
    # Four groups of four channels in an aligned block of 16.
    (conv_fwd("groups", SMALL), "input", (1, 2, 0, 0), "output", (1, 15, 3, 4), (1, 16, 0, 0)),
    (conv_fwd("groups", SMALL), "weight", (5, 2, 0, 0), "output", (0, 5, 3, 4), (0, 4, 0, 0)),
    (conv_fwd("depthwise", DEPTHWISE), "input", (1, 2, 0, 0), "output", (1, 2, 3, 4), (1, 3, 0, 0)),
    *(
        (FROM_CONV["conv_bwd_data"](name, conv), tensor, at, "grad_input", may, may_not)
        for name, conv, tensor, at, may, may_not in (
            ("dense", DENSE, "grad_output", (1, 2, 0, 0), (1, 4, 3, 4), (0, 4, 3, 4)),
            ("dense", DENSE, "weight", (3, 2, 0, 0), (1, 2, 3, 4), (1, 3, 3, 4)),
            ("groups", SMALL, "grad_output", (1, 17, 0, 0), (1, 31, 3, 4), (1, 15, 0, 0)),
            # The second group's third channel.
            ("groups", SMALL, "weight", (5, 2, 0, 0), (0, 6, 3, 4), (0, 2, 0, 0)),
        )
    ),
    *(
        (FROM_CONV["grouped_conv_bwd_weight"](name, conv), tensor, at, output, may, may_not)
        for name, conv, tensor, at, output, may, may_not in (
            ("d", DENSE, "grad_output", (1, 2, 0, 0), "grad_weight", (2, 4, 2, 2), (3, 0, 0, 0)),
            ("d", DENSE, "grad_output", (1, 2, 0, 0), "grad_bias", (2,), (3,)),
            ("d", DENSE, "input", (1, 2, 0, 0), "grad_weight", (5, 2, 2, 2), (5, 3, 0, 0)),
            ("g", SMALL, "input", (1, 6, 0, 0), "grad_weight", (7, 2, 2, 2), (3, 2, 0, 0)),
            ("w", DEPTHWISE, "input", (1, 2, 0, 0), "grad_weight", (2, 0, 2, 2), (3, 0, 0, 0)),
        )
    ),
    (
        conv3d_transpose("dense", CONVS["3d_plain"]),
        "weight",
        (3, 2, 0, 0, 0),
        "output",
        (0, 2, 0, 0, 0),
        (0, 3, 0, 0, 0),
    ),
]


@pytest.mark.parametrize(("case", "tensor", "at", "output", "may", "may_not"), SPREAD)
def test_spread_is_bounded(
    seed: int,
    case: Case,
    tensor: str,
    at: tuple[int, ...],
    output: str,
    may: tuple[int, ...],
    may_not: tuple[int, ...],
) -> None:
    finite, _ = planted(seed, case, "float32")
    finite[tensor][at] = 0
    clean = answered(case, finite)
    spoilt = finite[tensor].copy()
    spoilt[at] = np.nan
    tensors = {**finite, tensor: spoilt}
    found = answered(case, tensors)
    found[output][may] = np.nan
    assert_rule(case, tensors, found, clean)
    found[output][may_not] = np.nan
    with pytest.raises(AssertionError, match=f"{output}: at most"):
        assert_rule(case, tensors, found, clean)


def _finite_again(found: Arrays, output: str) -> None:
    bad = np.flatnonzero(~np.isfinite(found[output]))
    found[output].flat[bad[-1]] = 1.0


def _another_value(found: Arrays, output: str) -> None:
    good = np.flatnonzero(np.isfinite(found[output]))
    found[output].flat[good[-1]] += 99.0


def _another_bit(found: Arrays, output: str) -> None:
    """Of the last image, which the planted element does not feed."""
    last = found[output][-1].view(np.uint32)
    last ^= 1


VIOLATIONS: list[tuple[Callable[[Arrays, str], None], str]] = [
    (_finite_again, "at least"),
    (_another_value, "at most|finite"),
    (_another_bit, "at most"),
]


@pytest.mark.parametrize(("spoil", "message"), VIOLATIONS)
@pytest.mark.parametrize("operation", ["conv_fwd", "conv_bwd_data"])
def test_violations_are_found(
    seed: int, operation: str, spoil: Callable[[Arrays, str], None], message: str
) -> None:
    case = FROM_CONV[operation]("dense", DENSE)
    finite, _ = planted(seed, case, "float32")
    tensor, output = next(iter(case.shapes)), {"conv_fwd": "output"}.get(operation, "grad_input")
    spoilt = finite[tensor].copy()
    finite[tensor][0, 0, 0, 0], spoilt[0, 0, 0, 0] = 0, np.inf
    tensors, clean = {**finite, tensor: spoilt}, answered(case, finite)
    found = answered(case, tensors)
    assert_rule(case, tensors, found, clean)
    spoil(found, output)
    with pytest.raises(AssertionError, match=message):
        assert_rule(case, tensors, found, clean)


@pytest.mark.parametrize("make", [maxpool_fwd, maxpool_bwd])
def test_pooling_has_no_spread(seed: int, make: Callable[..., Case]) -> None:
    case = make("plain", POOLS["plain"])
    finite, variants = planted(seed, case, "float32")
    for _, tensors in variants:
        found = answered(case, tensors)
        assert_rule(case, tensors, found, answered(case, finite))
        output = next(name for name in found if name != "indices")
        good = np.flatnonzero(np.isfinite(found[output]))
        found[output].flat[good[0]] = np.nan
        with pytest.raises(AssertionError):
            assert_rule(case, tensors, found, answered(case, finite))


@pytest.mark.parametrize(
    ("groups", "read", "written", "of_first"),
    [
        (8, 4, 4, [0, 1, 2, 3]),
        (3, 16, 16, [0]),
        (4, 12, 12, [0, 1]),
        (8, 1, 1, [0]),
        (8, 1, 2, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, 32, 8, [0, 1]),
    ],
)
def test_groups_packed_together(groups: int, read: int, written: int, of_first: list[int]) -> None:
    assert np.flatnonzero(packed_with(groups, read, written)[0]).tolist() == of_first
