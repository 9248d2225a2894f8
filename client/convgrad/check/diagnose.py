"""Diagnoses a wrong result: computes what typical bugs would give and compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from convgrad.check.bounds import FACTORS, Float
from convgrad.check.compare import Comparison, Wrong
from convgrad.check.references import Linear
from convgrad.check.terms import Terms, addend_at, channel_values, terms_at
from convgrad.contract.verification import Finding

__all__ = ["findings"]

_SAMPLES = 24
# A diagnosis must explain at least this share of the sampled elements, and this many of them.
_MOST, _LEAST = 0.66, 3
# Largest acceptable expected number of diagnoses that match an element by chance.
_CHANCE = 0.05
# A scale factor must move an element by at least this many bounds.
_FAR = 32
# Low precision must affect at least this share of the elements.
_SPREAD = 1e-4


def findings(comparison: Comparison) -> Iterator[Finding]:
    """Yield what is wrong with an output, if anything."""
    name = comparison.target.name

    def finding(code: str, sentence: str) -> Finding:
        return Finding(code=code, output=name, sentence=f"{name}: {sentence}")

    exact = comparison.exact
    if comparison.exceeding == 0:
        if exact.passed is False and exact.first is not None:
            yield finding(
                "not-exact",
                f"{exact.differing} of {comparison.elements} elements differ although every sum is "
                f"exact, first at {exact.first.index}: {exact.first.value!r}, expected "
                f"{exact.first.reference!r}",
            )
        return
    if comparison.mismatches:
        yield finding("non-finite", _non_finite(comparison))
    finite = comparison.exceeding - comparison.mismatches
    if finite:
        code, words = _named(comparison)
        yield finding(code, f"{_how_many(comparison)}; {words}")


def _non_finite(comparison: Comparison) -> str:
    first = comparison.first_mismatch
    assert first is not None  # noqa: S101
    where = f"{first.index}: {_said(first.value)} where {_said(first.reference)} belongs"
    count = comparison.mismatches
    if count == 1:
        return f"1 element is wrong: {where}"
    return f"{count} elements are NaN or infinite in the wrong places, first at {where}"


def _said(value: float) -> str:
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(value)


def _how_many(comparison: Comparison) -> str:
    worst = comparison.worst
    assert worst is not None  # noqa: S101
    return (
        f"{comparison.exceeding} of {comparison.elements} elements exceed the bound, the worst at "
        f"{worst.index}: {_said(worst.value)}, expected {_said(worst.reference)} within "
        f"{worst.bound:.3g} ({worst.share:.3g} of it)"
    )


def _named(comparison: Comparison) -> tuple[str, str]:
    region = _region(comparison)
    if comparison.target.is_integer:
        return "wrong-values", f"they lie {region}"
    if comparison.exceeding > 1 and comparison.zeros == comparison.exceeding:
        return "zeros", f"all of them are zero, {region}"
    wrong = _wrong(comparison)
    guesses: list[Callable[[], tuple[str, str] | None]] = []
    linear = comparison.target.linear
    if linear is not None:
        guesses += [
            lambda: _flipped(linear, wrong),
            lambda: _permuted(linear, wrong),
            lambda: _missing(linear, wrong),
        ]
    if region == "everywhere":
        guesses = [lambda: _scaled(wrong), *guesses, lambda: _coarse(comparison)]
    for guess in guesses:
        if (named := guess()) is not None:
            code, words = named
            return code, f"{words}; they lie {region}" if comparison.exceeding > 1 else words
    if comparison.exceeding == 1:
        return "single-element", "all others are right"
    narrow = region != "everywhere"
    return ("region" if narrow else "wrong-values"), f"they lie {region}"


def _wrong(comparison: Comparison) -> list[Wrong]:
    """Sample the finite elements that exceed their bounds."""
    kept = [
        one for one in comparison.kept if np.isfinite([one.found, one.reference, one.bound]).all()
    ]
    return kept[:: max(1, len(kept) // _SAMPLES)][:_SAMPLES]


def _enough(explained: int, of: int) -> bool:
    return explained >= min(of, _LEAST) and explained >= _MOST * of > 0


def _flipped(linear: Linear, wrong: Sequence[Wrong]) -> tuple[str, str] | None:
    if linear.kind == "backward_weight" or max(linear.geometry.kernel_size) == 1:
        return None
    if len(wrong) < _LEAST:
        return None
    right = 0
    for one in wrong:
        straight = float(terms_at(linear, one.index).products.sum())
        turned = float(terms_at(linear, one.index, flipped=True).products.sum())
        right += abs(one.found - (one.reference - straight + turned)) <= 2 * one.bound
    if not _enough(right, len(wrong)):
        return None
    return "flipped-kernel", "they are those of a kernel turned round: convolution, not correlation"


def _permuted(linear: Linear, wrong: Sequence[Wrong]) -> tuple[str, str] | None:
    """Diagnose channels that hold the values of others: first by group, then by channel."""
    if len(wrong) < _LEAST:
        return None
    weight = linear.kind == "backward_weight"
    places = [(one.index[0], one.index[1]) if weight else one.index[1:3] for one in wrong]
    values = [channel_values(linear, one.index) for one in wrong]
    groups = _mapping(
        [place[0] for place in places],
        [value[:, place[1]] for value, place in zip(values, places, strict=True)],
        wrong,
    )
    if groups is not None:
        return "permuted-channels", f"{_moved('group', groups)}"
    width = values[0].shape[1]
    channels = _mapping(
        [place[0] * width + place[1] for place in places],
        [value.reshape(-1) for value in values],
        wrong,
    )
    if channels is None:
        return None
    return "permuted-channels", f"{_moved('output channel' if weight else 'channel', channels)}"


def _mapping(
    own: Sequence[int], values: Sequence[Float], wrong: Sequence[Wrong]
) -> dict[int, int] | None:
    """Map each wrong row to the other row whose values it holds, if that explains enough."""
    votes: dict[int, Counter[int]] = {}
    for row, candidates, one in zip(own, values, wrong, strict=True):
        near = np.flatnonzero(np.abs(candidates - one.found) <= 2 * one.bound)
        votes.setdefault(row, Counter()).update(int(each) for each in near if each != row)
    found = {row: count.most_common(1)[0] for row, count in votes.items() if count}
    explained = sum(count for _, count in found.values())
    # Expected number of matches by chance.
    chance = np.mean(
        [
            np.count_nonzero(np.abs(candidates - one.reference) <= 2 * one.bound) - 1
            for candidates, one in zip(values, wrong, strict=True)
        ]
    )
    if not _enough(explained, len(wrong)) or chance > _MOST / 2:
        return None
    return {row: source for row, (source, _) in sorted(found.items())}


def _moved(what: str, mapping: dict[int, int]) -> str:
    first, source = next(iter(mapping.items()))
    if mapping.get(source) == first:
        return f"{what}s {first} and {source} are swapped"
    more = f", and {len(mapping) - 1} more are elsewhere" if len(mapping) > 1 else ""
    return f"{what} {first} holds what belongs to {what} {source}{more}"


def _missing(linear: Linear, wrong: Sequence[Wrong]) -> tuple[str, str] | None:
    """Diagnose terms that are missing from every sum, or added twice."""
    votes: Counter[tuple[str, str, Any]] = Counter()
    chance = 0.0
    terms: Terms | None = None
    for one in wrong:
        terms = terms_at(linear, one.index)
        error = one.found - one.reference
        matched, expected = _matches(terms, addend_at(linear, one.index), error, one.bound)
        votes.update(matched)
        chance += expected / len(wrong)
    if terms is None or not votes:
        return None
    (way, axis, label), count = _most(votes)
    if not _enough(count, len(wrong)) or (len(wrong) < _LEAST and chance > _CHANCE):
        return None
    code = "dropped-terms" if way == "missing" else "repeated-terms"
    verb = "missing from the sum" if way == "missing" else "in the sum twice"
    return code, f"{_label(axis, label)} {'are' if axis == 'tail' else 'is'} {verb}"


def _most(votes: Counter[tuple[str, str, Any]]) -> tuple[tuple[str, str, Any], int]:
    """Return the candidate with the most votes, and of equals the simplest."""
    order = {"addend": 0, "tap": 1, "sample": 1, "channel": 2, "position": 2, "line": 3}
    order |= {"tail": 4, "term": 5}
    return min(votes.items(), key=lambda item: (-item[1], order[item[0][1]]))


def _matches(
    terms: Terms, addend: float, error: float, bound: float
) -> tuple[set[tuple[str, str, Any]], float]:
    """Return the sets of terms that give this error if missing or repeated.

    Also return the expected number of matches by chance.
    """
    products = terms.products
    columns = products.sum(axis=0)
    sets: list[tuple[str, Sequence[Any], Float]] = [
        (terms.rows, terms.row_labels, products.sum(axis=1)),
        (terms.columns, range(len(columns)), columns),
        ("term", range(products.size), products.reshape(-1)),
        ("addend", [None], np.array([addend])),
        *_lines(terms),
    ]
    if terms.columns == "channel" and len(columns) > 1:
        tails = np.cumsum(columns[::-1])[::-1]
        sets.append(("tail", [(at, len(columns) - 1) for at in range(len(columns))], tails))
    found: set[tuple[str, str, Any]] = set()
    chance = 0.0
    for axis, labels, sums in sets:
        # Changes below the bound cannot be detected.
        large = np.abs(sums) > 2 * bound
        spread = float(np.abs(sums[large]).max(initial=0.0))
        if spread:
            chance += 2 * bound * np.count_nonzero(large) / spread
        for way, sign in (("missing", -1.0), ("repeated", 1.0)):
            for at in np.flatnonzero(large & (np.abs(sign * sums - error) <= 2 * bound)):
                label: Any = labels[int(at)]
                if axis == "term":
                    row, column = divmod(int(at), products.shape[1])
                    label = (terms.rows, terms.row_labels[row], terms.columns, column)
                found.add((way, axis, label))
    return found, chance


def _lines(terms: Terms) -> Iterator[tuple[str, Sequence[Any], Float]]:
    """Yield the sums over the taps with one coordinate in common: rows or planes of the kernel."""
    ndim = len(terms.row_labels[0]) if terms.rows == "tap" and terms.row_labels else 0
    if ndim < 2:
        return
    by_tap = terms.products.sum(axis=1)
    for axis, name in enumerate(("depth", "row", "column")[3 - ndim :]):
        places = np.array([tap[axis] for tap in terms.row_labels])
        if 0 < places.max() < len(places) - 1:  # otherwise it is one tap, or all of them
            labels = [(name, at) for at in range(int(places.max()) + 1)]
            yield "line", labels, np.bincount(places, by_tap).astype(np.float64)


def _label(axis: str, label: Any) -> str:
    if axis == "addend":
        return "the bias or the accumulated tensor"
    if axis == "line":
        return f"{label[0]} {label[1]} of the kernel"
    if axis == "term":
        rows, row, columns, column = label
        return f"the term of {rows} {row} and {columns} {column}"
    if axis == "tail":
        return (
            f"channels {label[0]} to {label[1]}" if label[0] != label[1] else f"channel {label[0]}"
        )
    return f"{axis} {label}"


def _scaled(wrong: Sequence[Wrong]) -> tuple[str, str] | None:
    if len(wrong) < _LEAST:
        return None
    surest = max(wrong, key=lambda one: abs(one.reference) / max(one.bound, 1e-300))
    if surest.reference == 0:
        return None
    factor = surest.found / surest.reference
    if abs(surest.found - surest.reference) < _FAR * surest.bound:
        return None  # low precision alone could explain it
    right = sum(
        abs(one.found - factor * one.reference) <= (1 + abs(factor)) * 2 * one.bound
        for one in wrong
    )
    if not _enough(right, len(wrong)) or right < len(wrong) or factor == 0:
        return None
    return "scaled", f"they are the right ones times {factor:.6g}"


def _coarse(comparison: Comparison) -> tuple[str, str] | None:
    """Diagnose factors that were rounded to fewer bits."""
    if comparison.exceeding < max(2, _SPREAD * comparison.elements):
        return None
    known = {"tf32": "TF32", "tf32_truncated": "truncated TF32", "bfloat16": "bfloat16"}
    for name, words in known.items():
        if comparison.factor_error <= FACTORS[name]:
            return "low-precision", f"factors rounded to {words} would explain all of them"
    return None


def _region(comparison: Comparison) -> str:
    """Describe the bounding box of the elements that exceed their bounds."""
    low, high = comparison.low, comparison.high
    assert low is not None and high is not None  # noqa: PT018, S101
    words = []
    for axis, begin, end, extent in zip(
        comparison.seen.axes, low, high, comparison.seen.array.shape, strict=True
    ):
        if extent == 1 or (begin == 0 and end == extent - 1):
            continue
        words.append(f"{axis} {begin}" if begin == end else f"{axis}s {begin} to {end}")
    return f"in {', '.join(words)}" if words else "everywhere"
