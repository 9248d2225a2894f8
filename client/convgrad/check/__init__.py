"""Verification without a server: the functions behind `Client.verify`.

`bounded` checks a result against a float64 reference; `kernel` runs your kernel on generated
tensors and checks its results; `draw` generates the tensors that a server generates from a seed,
and `spread_indices` the indices of a max unpooling; `linear_pair` makes the tensors of the
linearity check; `report` formats a verification for people.
"""

from __future__ import annotations

from convgrad.check._kernel import KernelCheck, kernel
from convgrad.check._report import report
from convgrad.check._verify import bounded
from convgrad.check.linearity import linear_pair
from convgrad.check.philox import draw, spread_indices

__all__ = [
    "KernelCheck",
    "bounded",
    "draw",
    "kernel",
    "linear_pair",
    "report",
    "spread_indices",
]
