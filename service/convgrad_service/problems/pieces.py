"""Running a problem in pieces, one after another, and assembling its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad_service.problems.base import Piece, Problem

__all__ = ["Run", "assemble", "piece_tensors", "place_part", "run_in_pieces", "sum_of_shares"]

Run = Callable[[Problem, Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]
"""Computes one problem from its tensors; the caller owns the arrays that it returns."""


def run_in_pieces(
    problem: Problem, tensors: Mapping[str, NDArray[Any]], parts: int, run: Run
) -> dict[str, NDArray[Any]]:
    """Compute ``problem`` in its ``split(parts)``, one piece at a time, and return its outputs.

    Pieces read views of ``tensors``. In addition to the outputs, this needs memory for the outputs
    of one piece, and for one array in float32 (float64 for float64) for each output that is a sum.
    Pieces are added in order, so equal ``parts`` give equal bits.
    """
    pieces = problem.split(parts)
    if len(pieces) == 1:
        return dict(run(problem, tensors))
    computed = (run(piece.problem, piece_tensors(piece, tensors)) for piece in pieces)
    return assemble(problem, tensors, pieces, computed)


def assemble(
    problem: Problem,
    tensors: Mapping[str, NDArray[Any]],
    pieces: Sequence[Piece],
    computed: Iterable[Mapping[str, NDArray[Any]]],
) -> dict[str, NDArray[Any]]:
    """Return the outputs of ``problem`` from those of its pieces, in the pieces' order."""
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


def sum_of_shares(
    problem: Problem,
    name: str,
    shares: Iterable[NDArray[Any]],
    tensors: Mapping[str, NDArray[Any]],
) -> NDArray[Any]:
    """Return an output of ``problem`` from its pieces' shares of the sum, in the pieces' order.

    ``tensors`` are the inputs that only `Problem.finish` reads.
    """
    totals: dict[str, NDArray[Any]] = {}
    for share in shares:
        _add(totals, name, share)
    return _finished(problem, name, totals[name], tensors)


def piece_tensors(piece: Piece, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return a piece's inputs: views of the whole problem's, with indices relative to the piece."""
    own = {}
    for name, slices in piece.inputs.items():
        part = tensors[name][slices]
        shift = piece.shifts.get(name, 0)
        # An index outside the piece becomes out of range, which its kernel refuses.
        own[name] = part - part.dtype.type(shift) if shift else part
    return own


def place_part(piece: Piece, name: str, part: NDArray[Any], output: NDArray[Any]) -> None:
    """Write a piece's output into its part of the whole output."""
    taken = part[piece.take[name]] if name in piece.take else part
    target = output[piece.outputs[name]]
    shift = piece.shifts.get(name, 0)
    if shift:
        np.add(taken, output.dtype.type(shift), out=target)
    else:
        target[...] = taken


def _add(totals: dict[str, NDArray[Any]], name: str, part: NDArray[Any]) -> None:
    if name in totals:
        # Infinities of opposite signs give NaN, as within a kernel's sum.
        with np.errstate(invalid="ignore", over="ignore"):
            totals[name] += part
    else:
        # The array may be read-only.
        totals[name] = part if part.flags.writeable else part.copy()


def _finished(
    problem: Problem, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
) -> NDArray[Any]:
    # Values too large for float16 become infinity.
    with np.errstate(invalid="ignore", over="ignore"):
        return problem.finish(name, total, tensors)
