"""Random PyTorch tensors, and how close results must be."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1.5e-1,
}


def normal(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, *, grad: bool = True
) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def same(found: Any, wanted: Any, dtype: torch.dtype) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)
