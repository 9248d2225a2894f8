"""Convolutions for tests of `convgrad.jax`, and random arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["LAYERS", "NHWC", "draw"]

NHWC = ("NHWC", "HWIO", "NHWC")
LAYERS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "1d": ({"window_strides": (2,), "padding": [(2, 0)]}, (2, 4, 9), (6, 4, 3)),
    "1d NWC": (
        {"window_strides": (1,), "padding": "SAME", "dimension_numbers": ("NWC", "WIO", "NWC")},
        (2, 9, 4),
        (4, 4, 6),
    ),
    "strided SAME, groups": (
        {"window_strides": (2, 1), "padding": "SAME", "feature_group_count": 2},
        (2, 4, 9, 8),
        (6, 2, 3, 2),
    ),
    "dilated NHWC": (
        {
            "window_strides": (1, 2),
            "padding": [(1, 2), (0, 3)],
            "rhs_dilation": (2, 1),
            "dimension_numbers": NHWC,
        },
        (2, 9, 8, 4),
        (3, 2, 4, 6),
    ),
    "depthwise NHWC": (
        {
            "window_strides": (1, 1),
            "padding": "SAME",
            "feature_group_count": 4,
            "dimension_numbers": NHWC,
        },
        (2, 5, 6, 4),
        (3, 3, 1, 8),
    ),
    "other orders": (
        {
            "window_strides": (1, 1),
            "padding": "VALID",
            "dimension_numbers": ("CHWN", "IHWO", "HNWC"),
        },
        (4, 6, 5, 2),
        (4, 3, 2, 6),
    ),
    "groups of images": (
        {"window_strides": (2, 1), "padding": "SAME", "batch_group_count": 2},
        (4, 3, 6, 5),
        (6, 3, 3, 2),
    ),
    "groups of images, other orders": (
        {
            "window_strides": (1, 1),
            "padding": "VALID",
            "batch_group_count": 3,
            "dimension_numbers": ("HWCN", "HWIO", "HWNC"),
        },
        (5, 6, 2, 6),
        (3, 2, 2, 6),
    ),
    "negative padding": (
        {"window_strides": (2, 1), "padding": [(-1, 2), (1, -2)]},
        (2, 3, 9, 8),
        (4, 3, 3, 2),
    ),
    "transposed, groups": (
        {
            "window_strides": (1, 1),
            "padding": [(1, 3), (2, 1)],
            "lhs_dilation": (3, 2),
            "feature_group_count": 2,
        },
        (2, 4, 5, 4),
        (6, 2, 3, 3),
    ),
    "transposed NHWC": (
        {
            "window_strides": (1, 1),
            "padding": [(2, 2), (1, 2)],
            "lhs_dilation": (2, 1),
            "rhs_dilation": (1, 2),
            "dimension_numbers": NHWC,
        },
        (2, 5, 4, 4),
        (3, 2, 4, 6),
    ),
    "transposed and strided": (
        {"window_strides": (2, 1), "padding": [(2, 2), (2, 3)], "lhs_dilation": (3, 2)},
        (2, 4, 5, 4),
        (6, 4, 3, 3),
    ),
    "3d NDHWC": (
        {
            "window_strides": (1, 2, 1),
            "padding": "SAME_LOWER",
            "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"),
        },
        (1, 4, 5, 4, 2),
        (2, 3, 2, 2, 3),
    ),
}


def draw(seed: int, *shapes: tuple[int, ...], dtype: Any = jnp.float64) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)
    ]
