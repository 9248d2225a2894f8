"""Jobs in parts and jobs on shared memory of clients: their arrays, and how pieces are computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from convgrad_service.backends.base import ServingBackend
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import (
    PlacedTensor,
    TensorLayout,
    partial_sums_of,
    pieces_of,
)
from convgrad_service.engine.scheduling.job import (
    Job,
    JobResult,
    is_copied,
    merge_results,
    result_of,
)
from convgrad_service.engine.shm.mappings import RegionMappings
from convgrad_service.engine.shm.registry import RegionSlice
from convgrad_service.problems.base import Piece
from convgrad_service.problems.pieces import piece_tensors, place_part, sum_of_shares

Arrays = Mapping[str, Any]
"""Arrays by name; `DeviceTensor` for those in device memory."""


def _in_region(
    tensor: PlacedTensor, regions: tuple[RegionSlice, ...], mappings: RegionMappings
) -> Any:
    """Return a tensor in shared memory, as a `DeviceTensor` if that is on a device."""
    assert tensor.region is not None  # noqa: S101
    where = regions[tensor.region]
    if where.device is not None:
        return mappings.on_device(where, tensor.spec)
    return mappings.array(where, tensor.spec)


def pieces_of_part(layout: TensorLayout, part: int | None) -> Mapping[int, Piece]:
    """Return the pieces of one part of a split problem, or of all, by number."""
    pieces = dict(enumerate(pieces_of(layout.problem, layout.parts)))
    if part is None:
        return pieces
    return {part: pieces[part]} if part in pieces else {}


def run_pieces(
    backend: ServingBackend,
    arena: Arena,
    layout: TensorLayout,
    base: int,
    pieces: Mapping[int, Piece],
    part: int | None,
    inputs: Arrays,
    not_direct: frozenset[str],
    targets: Arrays,
    cancelled: threading.Event | None,
) -> tuple[Arrays, JobResult]:
    """Compute pieces and, in the last part or the whole, add up partial sums."""
    sums = {
        name: arena.array(base + offset, spec)
        for name, spec, offset, _ in layout.partial_sums
        if offset is not None
    }
    sums_of = partial_sums_of(layout.problem, layout.parts)
    results = []
    for number, piece in pieces.items():
        own_sums = {
            name: array[sums_of[name].positions[number]]
            for name, array in sums.items()
            if number in sums_of[name].positions
        }
        own = {**targets, **own_sums}
        results.append(_run_piece(backend, piece, inputs, not_direct, own, cancelled))
    computed: Arrays = targets
    if sums and (part is None or not pieces):
        began_s = time.perf_counter()
        computed = {**targets, **_add_up(layout, sums, inputs)}
        added_s = time.perf_counter() - began_s
        sum_bytes = sum(each.nbytes for each in sums.values())
        results.append(JobResult("", added_s, 0, sum_bytes, 0.0, 0.0))
    return computed, merge_results(results)


def _add_up(layout: TensorLayout, sums: Arrays, inputs: Arrays) -> Arrays:
    """Add up partial sums, leaving them unchanged so that another worker can start again."""
    problem = layout.problem
    pieces = pieces_of(problem, layout.parts)
    read_by_pieces = {name for piece in pieces for name in piece.inputs}
    others = {}
    for name in problem.inputs.keys() - read_by_pieces:
        others[name] = inputs[name]
        if not isinstance(inputs[name], np.ndarray):
            spec = problem.inputs[name]
            others[name] = np.empty(spec.shape, spec.dtype.numpy)
            inputs[name].read(others[name])
    totals = {}
    for name, array in sums.items():
        array.flags.writeable = False
        totals[name] = sum_of_shares(problem, name, array, others)
    return totals


def job_arrays(
    arena: Arena, mappings: RegionMappings, job: Job
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs, read-only, and the outputs of a job."""

    def array(tensor: PlacedTensor) -> Any:
        if tensor.offset is not None:
            return arena.array(job.base + tensor.offset, tensor.spec)
        return _in_region(tensor, job.regions, mappings)

    inputs = {}
    for tensor in job.layout.inputs:
        inputs[tensor.name] = each = array(tensor)
        if is_copied(tensor):
            source = _in_region(tensor, job.regions, mappings)
            if isinstance(source, np.ndarray):
                np.copyto(each, source)
            else:
                source.read(each)
        if isinstance(each, np.ndarray):
            each.flags.writeable = False
    return inputs, {tensor.name: array(tensor) for tensor in job.layout.outputs}


def use_resident(
    backend: ServingBackend,
    job: Job,
    pieces: Mapping[int, Piece],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
) -> None:
    """Replace the stored tensors of a job, of which ``pieces`` are computed, by resident copies."""
    layout = job.layout
    whole = layout.parts == 1
    read = {name for piece in pieces.values() for name in piece.inputs}
    sums = {tensor.name for tensor in layout.partial_sums}
    for name, _, offset, region in layout.inputs:
        if offset is not None or region is None or not (whole or name in read):
            continue
        if (where := job.regions[region]).stored:
            inputs[name] = backend.resident(where.region, where.version, inputs[name])
    for name, _, offset, region in layout.outputs:
        if offset is not None or region is None or not (where := job.regions[region]).stored:
            continue
        # An output whose parts are computed by several devices is complete on none of them.
        if whole or (not pieces if name in sums else backend.devices == 1):
            outputs[name] = backend.resident_place(where.region, where.version, outputs[name])


def _run_piece(
    backend: ServingBackend,
    piece: Piece,
    inputs: Arrays,
    not_direct: frozenset[str],
    outputs: Arrays,
    cancelled: threading.Event | None,
) -> JobResult:
    """Compute one piece from the whole inputs into its slices of the whole outputs."""
    own = {
        name: array.copy() if name in not_direct else array
        for name, array in piece_tensors(piece, inputs).items()
    }
    slices = {
        name: outputs[name][each]
        for name, each in piece.outputs.items()
        if name not in piece.take and not piece.shifts.get(name)
    }
    # Slices that are not contiguous, such as rows of one sample, are computed elsewhere.
    targets = {
        name: target
        for name, target in slices.items()
        if not isinstance(target, np.ndarray) or target.flags.c_contiguous
    }
    outcome = backend.run(piece.problem, own, cancelled, targets)
    for name, array in outcome.outputs.items():
        if array is targets.get(name):
            continue
        if isinstance(outputs[name], np.ndarray):
            place_part(piece, name, array, outputs[name])
        else:
            taken = array[piece.take[name]] if name in piece.take else array
            outputs[name][piece.outputs[name]].fill(taken)
    return result_of(outcome)
