"""Running a problem in pieces, one after another, and putting the parts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.problems.base import Piece, Problem

__all__ = ["Run", "added_up", "piece_tensors", "place_part", "put_together", "run_in_pieces"]

Run = Callable[[Problem, Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""Computes one problem from its tensors; the arrays that it returns are the caller's to keep."""


def run_in_pieces(
    problem: Problem, tensors: Mapping[str, NDArray[Any]], parts: int, run: Run
) -> dict[str, NDArray[Any]]:
    """The outputs of `problem`, computed in its `split(parts)` one piece at a time.

    Inputs are views of `tensors`. Beyond the outputs there is memory for one piece's, and where
    parts are summed for one sum in float32 (float64 for float64). The order of the sum is that of
    the pieces, so equal `parts` give equal bits.
    """
    pieces = problem.split(parts)
    if len(pieces) == 1:
        return dict(run(problem, tensors))
    computed = (run(piece.problem, piece_tensors(piece, tensors)) for piece in pieces)
    return put_together(problem, tensors, pieces, computed)


def put_together(
    problem: Problem,
    tensors: Mapping[str, NDArray[Any]],
    pieces: Sequence[Piece],
    computed: Iterable[Mapping[str, NDArray[Any]]],
) -> dict[str, NDArray[Any]]:
    """The outputs of `problem` from those of its pieces, which come in the pieces' order."""
    outputs: dict[str, NDArray[Any]] = {}
    totals: dict[str, NDArray[Any]] = {}
    for piece, parts in zip(pieces, computed, strict=True):
        for name, part in parts.items():
            if piece.combine[name] == "sum":
                _add(totals, name, part)
                continue
            if name not in outputs:
                spec = problem.outputs[name]
                outputs[name] = np.empty(spec.shape, spec.dtype.numpy)
            place_part(piece, name, part, outputs[name])
    for name, total in totals.items():
        outputs[name] = _finished(problem, name, total, tensors)
    return {name: outputs[name] for name in problem.outputs}


def added_up(
    problem: Problem,
    name: str,
    shares: Iterable[NDArray[Any]],
    tensors: Mapping[str, NDArray[Any]],
) -> NDArray[Any]:
    """An output of `problem` from its pieces' shares of the sum, which come in the pieces' order.

    ``tensors`` are those inputs of `problem` that none of its pieces reads: its `finish` does.
    """
    totals: dict[str, NDArray[Any]] = {}
    for share in shares:
        _add(totals, name, share)
    return _finished(problem, name, totals[name], tensors)


def piece_tensors(piece: Piece, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The piece's own inputs: views of the whole's, indices made its own."""
    own = {}
    for name, slices in piece.inputs.items():
        part = tensors[name][slices]
        shift = piece.shifts.get(name, 0)
        # An index beyond the piece becomes one out of its range, which its kernel refuses.
        own[name] = part - part.dtype.type(shift) if shift else part
    return own


def place_part(piece: Piece, name: str, part: NDArray[Any], output: NDArray[Any]) -> None:
    """Write what a piece computed where it belongs in the whole output."""
    kept = part[piece.take[name]] if name in piece.take else part
    target = output[piece.outputs[name]]
    shift = piece.shifts.get(name, 0)
    if shift:
        np.add(kept, output.dtype.type(shift), out=target)
    else:
        target[...] = kept


def _add(totals: dict[str, NDArray[Any]], name: str, part: NDArray[Any]) -> None:
    if name in totals:
        # Infinities of opposite signs are a NaN, as they are within a kernel's sum.
        with np.errstate(invalid="ignore", over="ignore"):
            totals[name] += part
    else:
        # The caller's array may be one that nobody may write to.
        totals[name] = part if part.flags.writeable else part.copy()


def _finished(
    problem: Problem, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
) -> NDArray[Any]:
    # What is too large for float16 is an infinity there.
    with np.errstate(invalid="ignore", over="ignore"):
        return problem.finish(name, total, tensors)
