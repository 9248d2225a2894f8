"""Choose the tile and the splits of pointwise_gemm by expected times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_table import (
    TRANSPOSED_KINDS,
    WEIGHT_KINDS,
    Table,
    table_of_kind,
)
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import TF32, Config, Product
from convgrad_service.backends.cuda.tuning.correction import MOST_CORRECTED, correction_of
from convgrad_service.plans.cuda.device import CudaDevice

__all__ = ["SHARING", "chosen", "line_of", "prepare", "sharing_line_of", "timed"]

SHARING = "pointwise_gemm_sharing"
"""The correction of the ways to run a configuration."""
# Configurations that take longer than so many times the fastest are not run in other ways.
NEAR = 1.3


def _table_of(product: Product) -> Table:
    return table_of_kind(product.kind, product.a.mn, product.b.mn)


def prepare() -> None:
    """Make what all plans share, which takes a tenth of a second."""
    for b_mn in (False, True):
        table_of_kind("gather", False, b_mn)
        table_of_kind("transposed", b_mn, False)
        table_of_kind("planes", True, b_mn)
    table_of_kind(TRANSPOSED_KINDS[1], True, True)
    table_of_kind(f"gather{TF32}", False, False)
    table_of_kind(f"transposed{TF32}", True, False)
    table_of_kind(f"planes{TF32}", True, False)
    for kind, mn in WEIGHT_KINDS.items():
        table_of_kind(kind, mn, mn)


def timed(
    product: Product, device: CudaDevice, counters: int, most: int | None = None
) -> list[tuple[float, Config]]:
    """Return the candidate configurations with their expected seconds, fastest first.

    With ``most``, at most that number, with corrected times but in the order of the uncorrected.
    Then the ways to run those that are nearly the fastest (`sharing`).
    """
    table = _table_of(product)
    times, parts = table.times(product, device, counters)
    order = np.argsort(times, kind="stable")[:most]
    order = order[np.isfinite(times[order])]
    expected, parts = times[order] * 1e-6, np.maximum(parts[order], 1)
    seconds = expected
    name = f"pointwise_gemm_{product.kind}"
    correction = None if most is None or not len(order) else correction_of(name, device)
    if correction is not None:
        seconds = seconds * correction.factors(table.lines(product, device, order, seconds, parts))
    found = [
        (float(time_s), replace(table.configs[i], parts=int(part)))
        for i, time_s, part in zip(order, seconds, parts, strict=True)
    ]
    ways = correction_of(SHARING, device) if product.shares and len(order) else None
    if ways is not None:
        near = seconds <= NEAR * seconds.min()
        places, configs, lines = table.sharing(product, device, order[near], expected[near])
        seconds = seconds[near][places] * ways.factors(lines)
        found += zip(seconds.tolist(), configs, strict=True)
    return found


def line_of(
    product: Product, device: CudaDevice, config: Config, time_s: float
) -> NDArray[np.float64]:
    """Return the `features` of one configuration, or of that which it is a way to run."""
    table = _table_of(product)
    index = table.configs.index(_stored_as(product, config))
    order, times, parts = np.array([index]), np.array([time_s]), np.array([config.parts])
    found: NDArray[np.float64] = table.lines(product, device, order, times, parts)[0]
    return found


def sharing_line_of(
    product: Product, device: CudaDevice, config: Config, time_s: float
) -> NDArray[np.float64] | None:
    """Return the `features` of a way to run a configuration, which takes ``time_s``; None if
    ``config`` is no such way."""
    table = _table_of(product)
    index = table.configs.index(_stored_as(product, config))
    _, ways, lines = table.sharing(product, device, np.array([index]), np.array([time_s]))
    return lines[ways.index(config)] if config in ways else None


def _stored_as(product: Product, config: Config) -> Config:
    """Return the table's configuration for it."""
    one = replace(config, parts=2 if config.in_grid else 1)
    return replace(one, multicast=1, alternate=False) if product.shares else one


@lru_cache(maxsize=1024)
def chosen(
    products: Sequence[Product], device: CudaDevice, counters: int
) -> tuple[float, Product, Config] | None:
    """Return the least expected time in seconds, its product and its configuration.

    ``products`` are equivalent GEMMs. None if no configuration fits. The choice depends on sizes
    and the device model only.
    """
    every = [
        (time_s, product, config)
        for product in products
        for time_s, config in timed(product, device, counters, MOST_CORRECTED)
    ]
    return min(every, key=lambda one: one[0], default=None)
