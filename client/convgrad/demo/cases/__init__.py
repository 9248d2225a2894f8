"""The demo's test cases, one module per family of operations."""

from __future__ import annotations

from convgrad.demo.cases import conv3d, convolution, fused, pooling, transposed, windows
from convgrad.demo.cases.table import Case, Draw

__all__ = ["CASES", "Case", "Draw"]

CASES: tuple[Case, ...] = (
    *convolution.CASES,
    *transposed.CASES,
    *pooling.CASES,
    *windows.CASES,
    *conv3d.CASES,
    *fused.CASES,
)
