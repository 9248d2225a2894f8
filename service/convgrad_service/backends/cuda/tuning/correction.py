"""Corrections of the kernels' cost models, learned from measurements.

A cost model ranks a family's configurations by a few constants. What it misses, such as how a
number of waves, a cluster and a memory-bound layer meet, a correction adds: an ensemble of decision
trees for the logarithm of measured over expected time, fitted on half of many layers
(`tests/perf/fit_dense.py`) and shipped as a table. Trees are oblivious: all nodes of one level
compare the same feature with the same threshold, so that all trees are evaluated at once. The
choice depends on the problem, the device model and this table alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from convgrad_service.backends.cuda.tuning.features import NAMES
from convgrad_service.plans.cuda.device import HOPPER, CudaDevice

__all__ = ["MOST_CORRECTED", "Correction", "correction_of", "fastest"]

C = TypeVar("C")

MOST_CORRECTED = 24
"""Configurations, fastest first by the cost model, whose times are corrected."""

TABLE = Path(__file__).resolve().parent / "hopper.json"


@dataclass(frozen=True, slots=True)
class Correction:
    """An ensemble of oblivious trees.

    Attributes
    ----------
    feature : numpy.ndarray
        int64, trees x levels: the feature that a level compares.
    threshold : numpy.ndarray
        float64, trees x levels: above it, the level's bit is 1.
    leaves : numpy.ndarray
        float64, trees x 2^levels: what is added to the logarithm to base 2, by the bits.
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    leaves: NDArray[np.float64]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Correction:
        """Make it from its entry in a table."""
        feature = np.array([[NAMES.index(name) for name in tree] for tree in table["features"]])
        return cls(feature, np.array(table["thresholds"]), np.array(table["leaves"]))

    def factors(self, lines: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return measured over expected time for lines of features."""
        bits = lines[:, self.feature] > self.threshold
        leaf = bits @ (1 << np.arange(self.feature.shape[1]))
        trees = np.arange(len(self.leaves))
        total: NDArray[np.float64] = np.exp2(self.leaves[trees, leaf].sum(axis=1))
        return total


@cache
def _shipped() -> dict[str, Correction]:
    if not TABLE.exists():
        return {}
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Correction.of(entry) for name, entry in table["corrections"].items()}


def correction_of(name: str, device: CudaDevice) -> Correction | None:
    """Return the shipped correction of a cost model, if there is one for this architecture."""
    return _shipped().get(name) if device.architecture in HOPPER else None


def fastest(
    name: str,
    every: Iterable[tuple[float, C]],
    lines: Callable[[list[tuple[float, C]]], NDArray[np.float64]],
    device: CudaDevice,
    *,
    corrected: bool = True,
) -> tuple[float, C]:
    """Return the configuration with the least expected time, and that in seconds.

    Parameters
    ----------
    name
        The correction.
    every
        Configurations with the cost model's seconds; at least one.
    lines
        Returns the `features` of some of them.
    corrected
        Whether the correction was fitted to such work.
    """
    found = sorted(every, key=lambda one: one[0])[:MOST_CORRECTED]
    correction = correction_of(name, device) if corrected else None
    if correction is None:
        return found[0]
    factors = correction.factors(lines(found))
    times = [time_s * float(factor) for (time_s, _), factor in zip(found, factors, strict=True)]
    best = min(range(len(found)), key=times.__getitem__)
    return times[best], found[best][1]
