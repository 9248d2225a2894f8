"""Counting points of arithmetic progressions exactly, in time that ignores how many there are.

The extents come from requests: a loop over 2**31 taps, though it allocates nothing, would hang.
"""

from __future__ import annotations

__all__ = ["count_below", "count_residues_from", "floor_sum"]


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """sum of floor((a*i + b) / m) over i = 0 ... n-1, for n >= 0, m >= 1 and any a, b.

    The Euclidean algorithm on (a, m): each step takes out the whole parts of both and exchanges
    the axes of the triangle that remains, so it ends after O(log m) steps.
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
    """How many (o, r) with 0 <= o < outer, 0 <= r < taps have o*stride + r*dilation < limit."""
    # For tap r that is ceil((limit - r*dilation) / stride), held between 0 and outer: the first
    # `full` taps reach all of outer, those from `some` on reach none.
    full = min(taps, max(0, -(((outer - 1) * stride - limit) // dilation)))
    some = min(taps, max(0, -(-limit // dilation)))
    # Run the taps between backwards, so that the progression rises.
    start = limit - (some - 1) * dilation + stride - 1
    return full * outer + floor_sum(some - full, stride, dilation, start)


def count_residues_from(least: int, n: int, step: int, start: int, modulus: int) -> int:
    """How many i in 0 ... n-1 have (start + i*step) mod modulus >= least, for least <= modulus."""
    raised = floor_sum(n, modulus, step, start + modulus - least)
    return raised - floor_sum(n, modulus, step, start)
