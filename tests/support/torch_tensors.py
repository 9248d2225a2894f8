"""Random PyTorch tensors, and how close results must be."""

from __future__ import annotations

import math
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


def awkward(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> Tensor:
    """Ties, both zeros, infinities, NaNs, and a plane of each of them alone."""
    values = torch.randint(-3, 4, shape).to(dtype)
    places = torch.rand(shape)
    values[places < 0.2] = -0.0
    for share, value in ((0.06, -math.inf), (0.04, math.inf), (0.02, math.nan)):
        values[places < share] = value
    values[0, 0], values[0, 1] = -math.inf, math.nan
    memory = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return values.to(memory_format=memory) if last and len(shape) > 3 else values


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype is wanted.dtype
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    if found.is_floating_point():
        assert torch.equal(found.signbit() & (found == 0), wanted.signbit() & (wanted == 0))
