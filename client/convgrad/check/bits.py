"""Compares the bits of a result with those of other runs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.compare import digest
from convgrad.contract.verification import Bits, Finding

__all__ = ["bit_findings", "compare_bits"]

Array = NDArray[Any]


def compare_bits(
    result: Array, own: Array | None, second: Array | None, doubled: Array | None
) -> Bits:
    """Compare a result with the server's own, a second run, and one with a doubled tensor."""
    from_ours, from_second = (
        None if other is None else _differing(result, other) for other in (own, second)
    )
    return Bits(
        digest=digest(result),
        equal_to_ours=None if from_ours is None else from_ours == 0,
        differing_from_ours=from_ours,
        equal_to_second=None if from_second is None else from_second == 0,
        differing_from_second=from_second,
        equal_when_doubled=None if doubled is None else _doubles(result, doubled),
    )


def _differing(a: Array, b: Array) -> int:
    """Count the elements whose bits differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return int(max(a.size, b.size))
    left, right = (
        np.ascontiguousarray(each).reshape(-1).view(f"u{each.dtype.itemsize}") for each in (a, b)
    )
    return int(np.count_nonzero(left != right))


def _doubles(result: Array, doubled: Array) -> bool:
    """Return whether every element doubled, except near the ends of the exponent range.

    Doubling may round there.
    """
    if result.shape != doubled.shape:
        return False
    with np.errstate(all="ignore"):
        one, two = result.astype(np.float64), doubled.astype(np.float64)
        tiny = np.abs(one) < 2.0**-10 if result.dtype == np.float16 else np.abs(one) < 2.0**-120
        same = (2.0 * one == two) | tiny | ~np.isfinite(two) | ~np.isfinite(one)
    return bool(same.all())


def bit_findings(name: str, bits: Bits, *, linear: bool) -> list[Finding]:
    """Return what is wrong with the bits of an output; ``linear`` includes doubling."""
    found = []
    if bits.equal_to_second is False:
        sentence = (
            f"{name}: two runs with the same inputs differ in {bits.differing_from_second} "
            "elements: the kernel is not deterministic"
        )
        found.append(Finding(code="nondeterministic", output=name, sentence=sentence))
    # Of results that change from run to run, doubling shows nothing more.
    elif linear and bits.equal_when_doubled is False:
        sentence = f"{name}: it does not double with the first tensor: the kernel is not linear"
        found.append(Finding(code="not-linear", output=name, sentence=sentence))
    return found
