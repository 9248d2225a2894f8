"""Exact counting in arithmetic progressions, in time that does not depend on their length.

Extents come from requests: a loop over 2**31 taps would hang.
"""

from __future__ import annotations

__all__ = ["count_below", "count_residues_from", "floor_sum"]


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum of floor((a*i + b) / m) over i = 0 ... n-1, for n >= 0, m >= 1 and any a, b.

    This is the Euclidean algorithm on (a, m): each step removes the whole parts of both and swaps
    the axes of the remaining triangle, so it ends after O(log m) steps.
    """
    total = 0
    while n > 0:
        whole, a = divmod(a, m)
        total += whole * (n * (n - 1) // 2)
        whole, b = divmod(b, m)
        total += whole * n
        top = a * n + b
        if top < m:
            break
        n, b = divmod(top, m)
        m, a = a, m
    return total


def count_below(limit: int, outer: int, stride: int, taps: int, dilation: int) -> int:
    """Count (o, r) with 0 <= o < outer, 0 <= r < taps and o*stride + r*dilation < limit."""
    # For tap r that is ceil((limit - r*dilation) / stride), clamped to [0, outer]: the first
    # `full` taps count all of outer, those from `some` on none.
    full = min(taps, max(0, -(((outer - 1) * stride - limit) // dilation)))
    some = min(taps, max(0, -(-limit // dilation)))
    # Sum over the taps between in descending order, so that the progression ascends.
    start = limit - (some - 1) * dilation + stride - 1
    return full * outer + floor_sum(some - full, stride, dilation, start)


def count_residues_from(least: int, n: int, step: int, start: int, modulus: int) -> int:
    """Count i in 0 ... n-1 with (start + i*step) mod modulus >= least, for least <= modulus."""
    raised = floor_sum(n, modulus, step, start + modulus - least)
    return raised - floor_sum(n, modulus, step, start)
