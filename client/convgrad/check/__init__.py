"""Verification as pure functions: what a server does with `Client.verify`, without one.

`bounded` holds a result against float64; `kernel` runs a kernel of yours on what is drawn, as often
as all checks need; `draw` draws the tensors that a server draws for a seed, `spread_indices` the
indices of a max unpooling; `report` writes what was found for people.
"""

from __future__ import annotations

from convgrad.check._kernel import KernelCheck, kernel
from convgrad.check._report import report
from convgrad.check._verify import bounded
from convgrad.check.philox import draw, spread_indices

__all__ = ["KernelCheck", "bounded", "draw", "kernel", "report", "spread_indices"]
