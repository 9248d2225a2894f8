"""What a worker is given to do, and what it says when it is done: sizes and places, no data."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from convgrad.errors import InvalidProblem
from convgrad_service.backends.base import Outcome, ServingBackend
from convgrad_service.engine.memory.arena import Arena
from convgrad_service.engine.memory.tensor_layout import PackedTensorLayout, Tensor, TensorLayout
from convgrad_service.engine.scheduling.finished import Finished
from convgrad_service.engine.scheduling.partition import joined, pieces_of, shares_of
from convgrad_service.engine.shm.mappings import RegionMappings, apart
from convgrad_service.engine.shm.registry import InRegion
from convgrad_service.examination import examined
from convgrad_service.problems.base import Lane, Piece
from convgrad_service.problems.pieces import piece_tensors, place_part, sum_of_shares

__all__ = ["Finished", "Job", "compile_ahead", "run_job"]

Arrays = Mapping[str, Any]
"""Arrays by name; of those on a device `DeviceTensor`s."""


class Job(NamedTuple):
    """An arrangement, where its place in the arena begins, and the shared memory that it uses.

    It makes so many ``tasks``, each a part of it. ``sums`` says that one more follows them, which
    adds up what they leave.
    """

    layout: TensorLayout | PackedTensorLayout
    base: int
    regions: tuple[InRegion, ...] = ()
    tasks: int = 1
    sums: bool = False
    lane: Lane = Lane.BY_SIZE

    @property
    def cost(self) -> float:
        """In units of `Pace`."""
        return self.layout.cost

    @property
    def device(self) -> int | None:
        """The one on which it must be computed; None where any will do.

        Raises InvalidProblem where its tensors lie on several.
        """
        if not self.regions:
            return None
        devices = {place.device for place in self.regions} - {None}
        if len(devices) > 1:
            listed = " and ".join(map(str, sorted(each for each in devices if each is not None)))
            raise InvalidProblem(f"the tensors lie on the devices {listed}; expected one device")
        return next(iter(devices), None)

    @classmethod
    def of(cls, layout: TensorLayout, base: int, regions: tuple[InRegion, ...]) -> Job:
        """A job of as many tasks as it can be."""
        tasks = 1
        if layout.sizes.parts > 1:
            outputs = {tensor.name for tensor in layout.outputs}
            # A part could overwrite what another has still to read: outputs in a client's memory
            # may lie where inputs do. And what is copied from there first is copied once.
            taken = any(_is_taken(tensor) for tensor in layout.inputs)
            if not taken and not outputs & _unfit(layout, regions):
                tasks = len(pieces_of(layout.problem, layout.sizes.parts))
        sums = tasks > 1 and bool(layout.shares)
        return cls(layout, base, regions, tasks, sums, layout.problem.lane)


def _is_taken(tensor: Tensor) -> bool:
    """Whether a tensor is copied out of shared memory before anything is made of it."""
    return tensor.offset is not None and tensor.region is not None


def _in_region(tensor: Tensor, regions: tuple[InRegion, ...], segments: RegionMappings) -> Any:
    """A tensor in shared memory; on a device a `DeviceTensor`."""
    assert tensor.region is not None  # noqa: S101
    place = regions[tensor.region]
    if place.device is not None:
        return segments.on_device(place, tensor.spec)
    return segments.array(place, tensor.spec)


@lru_cache(maxsize=256)
def _unfit(layout: TensorLayout, regions: tuple[InRegion, ...]) -> frozenset[str]:
    """The tensors in shared memory that cannot be computed where they lie."""
    inside = [tensor for tensor in (*layout.inputs, *layout.outputs) if tensor.offset is None]
    found = apart(
        {name: regions[region] for name, _, _, region in inside if region is not None},
        layout.sizes.outputs,
        {tensor.name: tensor.spec for tensor in inside},
    )
    return frozenset(found)


def compile_ahead(
    backend: ServingBackend, layout: TensorLayout, part: int | None = None
) -> Future[None] | None:
    """See `ServingBackend.compile_ahead`; of what `run_job` would compute."""
    chosen = _chosen(layout, part).values()
    whole = layout.problem.computes if layout.sizes.parts == 1 else ()
    return backend.compile_ahead([*whole, *(piece.problem for piece in chosen)])


def run_job(
    backend: ServingBackend,
    arena: Arena,
    segments: RegionMappings,
    job: Job,
    cancelled: threading.Event,
    part: int | None = None,
) -> Finished:
    """Compute a job, or one ``part`` of it, in the calling thread, with its regions open.

    The part behind the last piece is to add up what the others left.

    Raises what the backend raises, and InvalidProblem if a client shortened its shared memory.
    """
    layout = job.layout.unpacked()
    chosen = _chosen(layout, part)
    if job.regions:
        inputs, outputs = _with_regions(backend, arena, segments, layout, job, chosen)
        unfit = _unfit(layout, job.regions)
    else:
        inputs, outputs = _in_arena(arena, layout, job.base)
        unfit = frozenset()
    # Rare: places that kernels cannot take as they are. They get a copy, or make one.
    direct = dict(outputs)
    for name in unfit & outputs.keys():
        if not isinstance(outputs[name], np.ndarray):
            raise InvalidProblem(
                f"{name} is to be written where another tensor of the request lies"
            )
        direct[name] = np.empty_like(outputs[name])
    if layout.sizes.parts == 1:
        given = {name: array.copy() if name in unfit else array for name, array in inputs.items()}
        outcome = examined(backend, layout.problem, given, cancelled, direct)
        found: Arrays = outcome.outputs
        finished = _finished(outcome)
    else:
        shares = {
            name: arena.array(job.base + offset, spec)
            for name, spec, offset, _ in layout.shares
            if offset is not None
        }
        done = []
        for number, piece in chosen.items():
            own = {**direct, **_own_shares(layout, shares, number)}
            done.append(_run_piece(backend, piece, inputs, unfit, own, cancelled))
        found = direct
        if shares and (part is None or not chosen):
            began_s = time.perf_counter()
            found = {**direct, **_sums(layout, shares, inputs)}
            added_s = time.perf_counter() - began_s
            held_bytes = sum(each.nbytes for each in shares.values())
            done.append(Finished("", added_s, 0, held_bytes, 0.0, 0.0))
        finished = joined(done)
    for name, place in outputs.items():
        # A backend may compute where it likes; most write to the place itself.
        if found[name] is place:
            continue
        if isinstance(place, np.ndarray):
            np.copyto(place, found[name], casting="no")
        else:
            place.fill(found[name])
    if job.regions:
        segments.check({region.file for region in job.regions})
    return finished


def _chosen(layout: TensorLayout, part: int | None) -> Mapping[int, Piece]:
    """The pieces to be computed, by their numbers."""
    if layout.sizes.parts == 1:
        return {}
    pieces = dict(enumerate(pieces_of(layout.problem, layout.sizes.parts)))
    if part is None:
        return pieces
    return {part: pieces[part]} if part in pieces else {}


def _own_shares(layout: TensorLayout, shares: Arrays, number: int) -> Arrays:
    """Where a piece leaves its shares of sums."""
    known = shares_of(layout.problem, layout.sizes.parts)
    return {
        name: array[known[name].places[number]]
        for name, array in shares.items()
        if number in known[name].places
    }


def _sums(layout: TensorLayout, shares: Arrays, inputs: Arrays) -> Arrays:
    """Outputs from the shares that all pieces have left, which stay as they are: if the worker
    dies meanwhile, another one begins again."""
    problem = layout.problem
    pieces = pieces_of(problem, layout.sizes.parts)
    read = {name for piece in pieces for name in piece.inputs}
    others = {}
    for name in problem.inputs.keys() - read:
        others[name] = inputs[name]
        if not isinstance(inputs[name], np.ndarray):
            spec = problem.inputs[name]
            others[name] = np.empty(spec.shape, spec.dtype.numpy)
            inputs[name].read(others[name])
    result = {}
    for name, array in shares.items():
        array.flags.writeable = False
        result[name] = sum_of_shares(problem, name, array, others)
    return result


def _in_arena(arena: Arena, layout: TensorLayout, base: int) -> tuple[Arrays, Arrays]:
    """Inputs, which may not be written, and outputs of a job that lies in the arena alone.

    One request after another is given the same place, so they are remembered.
    """

    def made() -> tuple[Arrays, Arrays]:
        inputs, outputs = (
            {
                name: arena.array(base + offset, spec)
                for name, spec, offset, _ in tensors
                if offset is not None
            }
            for tensors in (layout.inputs, layout.outputs)
        )
        for array in inputs.values():
            array.flags.writeable = False
        return inputs, outputs

    return arena.tensors.get((layout, base), made)


def _with_regions(
    backend: ServingBackend,
    arena: Arena,
    segments: RegionMappings,
    layout: TensorLayout,
    job: Job,
    chosen: Mapping[int, Piece],
) -> tuple[Arrays, Arrays]:
    """The same of a job of which something lies in shared memory; its ``chosen`` pieces, if it has
    any, are to be computed."""

    def array(tensor: Tensor) -> Any:
        if tensor.offset is not None:
            return arena.array(job.base + tensor.offset, tensor.spec)
        return _in_region(tensor, job.regions, segments)

    def made() -> tuple[dict[str, Any], dict[str, Any]]:
        inputs = {tensor.name: array(tensor) for tensor in layout.inputs}
        for given in inputs.values():
            if isinstance(given, np.ndarray):
                given.flags.writeable = False
        return inputs, {tensor.name: array(tensor) for tensor in layout.outputs}

    for tensor in filter(_is_taken, layout.inputs):
        source = _in_region(tensor, job.regions, segments)
        if isinstance(source, np.ndarray):
            np.copyto(array(tensor), source)
        else:
            source.read(array(tensor))
    if all(place.device is None and not place.kept for place in job.regions):
        return segments.tensors.get((layout, job.base, job.regions), made)
    inputs, outputs = made()
    whole = layout.sizes.parts == 1
    read = {name for piece in chosen.values() for name in piece.inputs}
    for name, _, offset, region in layout.inputs:
        if offset is not None or region is None or not (whole or name in read):
            continue
        if (place := job.regions[region]).kept:
            inputs[name] = backend.resident(place.file, place.version, inputs[name])
    sums = {tensor.name for tensor in layout.shares}
    for name, _, offset, region in layout.outputs:
        if offset is not None or region is None or not (place := job.regions[region]).kept:
            continue
        # A result whose parts come from several devices is on none of them.
        if whole or (not chosen if name in sums else backend.devices == 1):
            outputs[name] = backend.resident_place(place.file, place.version, outputs[name])
    return inputs, outputs


def _run_piece(
    backend: ServingBackend,
    piece: Piece,
    inputs: Arrays,
    unfit: frozenset[str],
    outputs: Arrays,
    cancelled: threading.Event,
) -> Finished:
    """Compute a piece of a problem from the whole's inputs into its place in the outputs, of which
    sums are those of the piece alone."""
    own = {
        name: array.copy() if name in unfit else array
        for name, array in piece_tensors(piece, inputs).items()
    }
    places = {
        name: outputs[name][slices]
        for name, slices in piece.outputs.items()
        if name not in piece.take and not piece.shifts.get(name)
    }
    # Rows of one sample, say, do not lie side by side; a backend computes those elsewhere.
    offered = {
        name: place
        for name, place in places.items()
        if not isinstance(place, np.ndarray) or place.flags.c_contiguous
    }
    outcome = backend.run(piece.problem, own, cancelled, offered)
    for name, array in outcome.outputs.items():
        if array is offered.get(name):
            continue
        if isinstance(outputs[name], np.ndarray):
            place_part(piece, name, array, outputs[name])
        else:
            kept = array[piece.take[name]] if name in piece.take else array
            outputs[name][piece.outputs[name]].fill(kept)
    return _finished(outcome)


def _finished(outcome: Outcome) -> Finished:
    return Finished(
        outcome.kernel,
        outcome.compute_s,
        outcome.pieces,
        outcome.workspace_bytes,
        outcome.upload_s,
        outcome.download_s,
        outcome.words,
    )
