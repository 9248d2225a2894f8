"""Verification as pure functions: what a server does with `Client.verify`, without one.

`bounded` holds a result against float64; `draw` draws the tensors that a server draws for a seed.
"""

from __future__ import annotations

from convgrad.check._verify import bounded
from convgrad.check.philox import draw

__all__ = ["bounded", "draw"]
