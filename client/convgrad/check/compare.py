"""Compares a result with its reference, part by part, and collects statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.check.bounds import FACTORS, SUMS, Float, Reference, allowed_error, rounded, shares
from convgrad.check.references import Span, Target
from convgrad.contract.verification import (
    Bits,
    Element,
    ExactGate,
    HeatMap,
    Histogram,
    NonFinite,
    OutputVerification,
    Ulps,
)

__all__ = ["EXACT_BELOW", "Comparison", "Wrong", "digest", "ulps_between"]

Array = NDArray[Any]
Index = tuple[int, ...]

_SHARE_EDGES = (0.0, *(2.0**power for power in range(-10, 11)))
_ULP_EDGES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 65536)
_EXAMPLES = 8
_CELLS = 64
# Most elements over their bound whose positions are kept for the diagnosis.
_KEPT = 256
# Sums of integers below this are exact: 2^24 in float32, 2^53 in float64.
EXACT_BELOW = {"float64": 2.0**53}
_EXACT_BELOW = 2.0**24
_INTEGERS: dict[int, Any] = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Wrong:
    """An element that exceeds its bound; ``index`` refers to the `Seen` array."""

    index: Index
    found: float
    reference: float
    bound: float


class Comparison:
    """Comparison of one output: call `add` with every part, in any order, and then `verified`.

    ``exact_inputs`` is None if all inputs are integers, otherwise the reason why the exact gate
    does not apply.
    """

    def __init__(
        self, target: Target, result: Array, factors: str, sums: str, exact_inputs: str | None
    ) -> None:
        self.target, self.result = target, result
        self.seen = target.see(result)
        self._c, self._coarser = FACTORS[factors], SUMS[sums]
        self._exact_inputs = exact_inputs
        self.elements = int(result.size)
        self.exceeding = 0
        self.mismatches = 0
        self._finite_expected = self._finite_found = 0
        self._differing = 0
        self._first_differing: Element | None = None
        self.first_mismatch: Element | None = None
        self.largest_magnitude = 0.0
        self.worst: Element | None = None
        self.examples: list[Element] = []
        self.kept: list[Wrong] = []
        """A sample of the elements that exceed the bound."""
        self.low: NDArray[np.int64] | None = None
        self.high: NDArray[np.int64] | None = None
        """Inclusive bounding box, in the `Seen` array, of all elements that exceed the bound."""
        self.zeros = 0
        """Number of elements that exceed the bound and are zero."""
        self.factor_error = 0.0
        """The error of the factors that would explain all elements over the bound."""
        self._share_counts = np.zeros(len(_SHARE_EDGES) + 1, np.int64)
        self._ulp_counts = np.zeros(len(_ULP_EDGES) + 1, np.int64)
        self._most_ulps = 0
        self._cells: Float | None = None
        self._extents = (0, 0)

    def add(self, span: Span, ref: Reference) -> None:
        """Add a part: the rows ``span`` of the first axis of the `Seen` array."""
        part = self.seen.array[slice(*span)]
        if part.size == 0:
            return
        found = part.astype(np.float64)
        if self.target.is_integer:
            allowed = np.zeros(found.shape)
            share = np.where(found == ref.value, 0.0, np.inf)
        else:
            allowed = allowed_error(ref, part.dtype, self._c, self._coarser)
            share = shares(found, part.dtype, ref, allowed)
        self._count_shares(span, found, ref, allowed, share)
        if not self.target.is_integer:
            self._count_roundings(span, part, found, ref, allowed, share)
        self._color(span, share)

    def _count_shares(
        self, span: Span, found: Float, ref: Reference, allowed: Float, share: Float
    ) -> None:
        self._share_counts += _counted(share, _SHARE_EDGES)
        at = int(np.argmax(share))
        if self.worst is None or share.flat[at] > self.worst.share:
            self.worst = self._element(span, at, found, ref, allowed, share)
        wrong = np.flatnonzero(share > 1.0)
        if not len(wrong):
            return
        self.exceeding += len(wrong)
        for one in wrong[: _EXAMPLES - len(self.examples)]:
            self.examples.append(self._element(span, int(one), found, ref, allowed, share))
        places = np.stack(np.unravel_index(wrong, found.shape), axis=1)
        places[:, 0] += span[0]
        room = min(_KEPT - len(self.kept), _KEPT // 8)
        if room > 0:
            step = max(1, len(wrong) // room)
            numbers = (array.reshape(-1)[wrong] for array in (found, ref.value, allowed))
            rows = zip(places, *numbers, strict=True)
            self.kept += [
                Wrong(tuple(map(int, place)), *map(float, values))
                for place, *values in list(rows)[::step][:room]
            ]
        low, high = places.min(axis=0), places.max(axis=0)
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)
        values = found.reshape(-1)[wrong]
        self.zeros += int((values == 0).sum())
        with np.errstate(all="ignore"):
            error = np.abs(values - ref.value.reshape(-1)[wrong]) - allowed.reshape(-1)[wrong]
            needed = error / ref.magnitude.reshape(-1)[wrong]
        worst = float(np.max(np.where(np.isnan(needed), np.inf, needed)))
        self.factor_error = max(self.factor_error, worst)

    def _count_roundings(
        self, span: Span, part: Array, found: Float, ref: Reference, allowed: Float, share: Float
    ) -> None:
        wanted = rounded(ref.value, part.dtype)
        finite_found, finite_wanted = np.isfinite(found), np.isfinite(wanted)
        self._finite_found += int(finite_found.sum())
        self._finite_expected += int(finite_wanted.sum())
        odd = np.flatnonzero(np.isinf(share) & ~(finite_found & finite_wanted))
        if len(odd):
            self.mismatches += len(odd)
            if self.first_mismatch is None:
                self.first_mismatch = self._element(span, int(odd[0]), found, ref, allowed, share)
        magnitude = np.where(np.isfinite(ref.magnitude), ref.magnitude, 0.0)
        self.largest_magnitude = max(self.largest_magnitude, float(magnitude.max()))
        differs = ~((found == wanted) | (np.isnan(found) & np.isnan(wanted)))
        count = int(differs.sum())
        if count and self._first_differing is None:
            at = int(np.argmax(differs))
            self._first_differing = self._element(span, at, found, ref, allowed, share)
        self._differing += count
        both = finite_found & finite_wanted
        if both.all():
            apart = ulps_between(part, wanted.astype(part.dtype))
        else:
            apart = ulps_between(part[both], wanted[both].astype(part.dtype))
        self._ulp_counts += _counted(apart, _ULP_EDGES)
        if apart.size:
            self._most_ulps = max(self._most_ulps, int(apart.max()))

    def _element(
        self, span: Span, flat: int, found: Float, ref: Reference, allowed: Float, share: Float
    ) -> Element:
        place = [int(each) for each in np.unravel_index(flat, found.shape)]
        place[0] += span[0]
        return Element(
            index=self.seen.index(place),
            value=float(found.flat[flat]),
            reference=float(ref.value.flat[flat]),
            bound=float(allowed.flat[flat]),
            share=float(share.flat[flat]),
        )

    def _color(self, span: Span, share: Float) -> None:
        """Update the largest shares by channel and position (weights: output channel and rest)."""
        if share.ndim < 3:
            grid = share.reshape(1, -1)
            first_row, rows = 0, 1
        elif self.seen.axes[0] == "sample":
            grid = share.max(axis=0).reshape(prod(share.shape[1:3]), -1)
            first_row, rows = 0, grid.shape[0]
        else:
            grid = share.reshape(prod(share.shape[:2]), -1)
            first_row = span[0] * share.shape[1]
            rows = self.target.shape[0] * self.target.shape[1]
        self._extents = rows, grid.shape[1]
        down, across = _bins(rows), _bins(grid.shape[1])
        if self._cells is None:
            self._cells = np.zeros((len(down), len(across)))
        columns = np.maximum.reduceat(grid, across, axis=1)
        for row, cells in enumerate(columns):
            at = int(np.searchsorted(down, first_row + row, side="right")) - 1
            np.maximum(self._cells[at], cells, out=self._cells[at])

    @property
    def exact(self) -> ExactGate:
        """Outcome of the exact gate, if it applies."""
        below = EXACT_BELOW.get(self.result.dtype.name, _EXACT_BELOW)
        reason = self.target.why_not_exact or self._exact_inputs
        if self.target.is_integer:
            reason = "the output holds indices, each of which must be equal"
        elif reason is None and self.largest_magnitude >= below:
            reason = (
                f"the magnitudes of one element's terms add up to {self.largest_magnitude:.4g}; "
                f"sums are exact below {below:.4g}"
            )
        if reason is not None:
            return ExactGate(applies=False, reason=reason)
        return ExactGate(
            applies=True,
            passed=self._differing == 0,
            differing=self._differing,
            first=self._first_differing,
        )

    @property
    def passed(self) -> bool:
        """Whether no element exceeds its bound and, if sums are exact, none differs."""
        return self.exceeding == 0 and self.exact.passed is not False

    def verified(self, bits: Bits) -> OutputVerification:
        """Return the result of the comparison."""
        ulps = None
        if not self.target.is_integer:
            histogram = Histogram(
                edges=tuple(map(float, _ULP_EDGES)), counts=tuple(map(int, self._ulp_counts))
            )
            ulps = Ulps(max=self._most_ulps, histogram=histogram)
        counted = 0 if self.target.is_integer else self.elements
        return OutputVerification(
            dtype=self.result.dtype.name,
            shape=self.result.shape,
            elements=self.elements,
            passed=self.passed,
            exceeding=self.exceeding,
            worst=self.worst,
            examples=tuple(self.examples),
            shares=Histogram(edges=_SHARE_EDGES, counts=tuple(map(int, self._share_counts))),
            ulps=ulps,
            non_finite=NonFinite(
                expected=max(0, counted - self._finite_expected),
                found=max(0, counted - self._finite_found),
                mismatches=self.mismatches,
                first=self.first_mismatch,
            ),
            exact=self.exact,
            bits=bits,
            heat_map=self._heat_map(),
        )

    def _heat_map(self) -> HeatMap | None:
        if self._cells is None:
            return None
        axes = (
            ("channel", "position") if self.seen.axes[0] == "sample" else ("output channel", "rest")
        )
        return HeatMap(
            axes=axes,
            extents=self._extents,
            values=tuple(tuple(float(f"{each:.4g}") for each in row) for row in self._cells),
        )


def _bins(extent: int) -> NDArray[np.intp]:
    """Return the starts of at most 64 bins."""
    count = min(extent, _CELLS)
    return (np.arange(count) * extent) // count


def _counted(values: NDArray[Any], edges: Sequence[float]) -> NDArray[np.int64]:
    places = np.searchsorted(np.asarray(edges, np.float64), values.reshape(-1), side="left")
    return np.bincount(places, minlength=len(edges) + 1).astype(np.int64)


def ulps_between(a: Array, b: Array) -> NDArray[np.uint64]:
    """Return the distance of each pair in ULPs; zeros of either sign are equal."""
    left, right = _ordinals(a), _ordinals(b)
    high, low = np.maximum(left, right), np.minimum(left, right)
    return np.ascontiguousarray(high).view(np.uint64) - np.ascontiguousarray(low).view(np.uint64)


def _ordinals(array: Array) -> NDArray[np.int64]:
    """Map floats to integers of the same order, adjacent floats to adjacent integers."""
    kind = _INTEGERS[array.dtype.itemsize]
    bits = np.ascontiguousarray(array).view(kind).astype(np.int64)
    lowest = np.int64(np.iinfo(kind).min)
    ordinals: NDArray[np.int64] = np.where(bits < 0, lowest - bits, bits)
    return ordinals


def digest(array: Array) -> str:
    """Return the 128-bit BLAKE2b digest of an array's bytes in row-major order."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()
