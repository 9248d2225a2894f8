"""The sizes of a problem, its split into parts, and the layout of its tensors in memory.

Clients send the same few problems again and again with other data, so all of it is computed once
and cached. A request adds only the offset of its lease, and a worker receives each layout once.

The parts of a large problem run on one or several devices. The split depends on the problem's sizes
alone, so the number of devices and the order of execution change no bit of the answer. Outputs that
are sums over the parts (a weight's gradient) are added up at the end from partial sums, in float32
or wider and in the order of the parts. Only being split at all can change their last bits, and
every request of the same sizes is split alike.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from convgrad.contract import Request
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.problems import Piece, Problem
from convgrad_service.problems.base import TensorSpec

PART_BYTES = 64 * 2**20
"""Approximate size of a part's inputs and outputs: enough for a GPU's full throughput, small enough
that uploads, kernels and downloads of the parts overlap."""

_MAX_PARTS = 64
# Parts of a sum are larger by this factor: their split only pays off by using several devices, for
# which half or more of the time goes to uploading the inputs.
_SUM_PART_FACTOR = 2
# All partial sums together may take this fraction of the inputs. A second device saves half of an
# upload at 55 GB/s, 9 ms per GB. A GB of partial sums takes 18 ms to download and 68 ms to add up
# (four of them, one core: tests/perf/results/sums.jsonl), so a 32nd of the inputs costs 2.7 ms per
# GB of inputs.
_INPUTS_PER_PARTIAL_SUMS = 32
# One byte of memory traffic counts as this many FLOPs: the balance of a machine with 100 GFLOP/s
# and 10 GB/s. It only has to rank pooling against convolution sensibly.
_FLOPS_PER_BYTE = 10
ALIGNMENT_BYTES = 256
"""Alignment of every tensor: whole cache lines, and what GPUs copy fastest."""

# Inputs of these types hold indices, which backends validate; floats may have any value.
_INDEX_DTYPES = (DType.INT32, DType.INT64)


def count_parts(problem: Problem) -> int:
    """Return the number of parts that a problem is split into; 1 if it is not split."""
    parts = min(problem.memory_bytes // PART_BYTES, _MAX_PARTS)
    if parts < 2:
        return 1
    pieces = pieces_of(problem, parts)
    if len(pieces) == 1:
        return 1
    sums = {
        name: spec.size_bytes
        for piece in pieces
        for name, spec in piece.problem.outputs.items()
        if piece.combine[name] == "sum"
    }
    return _count_parts_of_sum(problem, sum(sums.values())) if sums else parts


def _count_parts_of_sum(problem: Problem, sum_bytes: int) -> int:
    if getattr(problem, "split_k", None) is not None:
        return 1  # which sets the number of partial sums
    parts = min(problem.memory_bytes // (_SUM_PART_FACTOR * PART_BYTES), _MAX_PARTS)
    input_bytes = sum(spec.size_bytes for spec in problem.inputs.values())
    affordable = input_bytes // (_INPUTS_PER_PARTIAL_SUMS * sum_bytes)
    return max(1, min(parts, affordable))


@lru_cache(maxsize=64)
def pieces_of(problem: Problem, parts: int) -> tuple[Piece, ...]:
    """Return `Problem.split`, cached; there may be a few more pieces than ``parts``."""
    return problem.split(parts)


class PartialSums(NamedTuple):
    """The buffer for an output that is a sum over pieces.

    ``spec`` is the output's, with a leading dimension for the partial sums; ``positions`` maps the
    number of a piece to its position in that dimension.
    """

    spec: TensorSpec
    positions: Mapping[int, int]


@lru_cache(maxsize=64)
def partial_sums_of(problem: Problem, parts: int) -> Mapping[str, PartialSums]:
    """Return the outputs that are sums over a problem's pieces."""
    pieces = pieces_of(problem, parts)
    found: dict[str, PartialSums] = {}
    for name in problem.outputs:
        numbers = [n for n, piece in enumerate(pieces) if piece.combine.get(name) == "sum"]
        if numbers:
            spec = pieces[numbers[0]].problem.outputs[name]
            found[name] = PartialSums(
                TensorSpec((len(numbers), *spec.shape), spec.dtype),
                {number: position for position, number in enumerate(numbers)},
            )
    return found


class PlacedTensor(NamedTuple):
    """A tensor of a layout.

    ``offset`` is relative to the lease, None if the tensor is not in the arena. ``region`` is an
    index into the request's regions, None if it is not in shared memory. A tensor with both is
    copied from shared memory to the arena first.
    """

    name: str
    spec: TensorSpec
    offset: int | None
    region: int | None


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """A problem and the offsets of its tensors in ``size_bytes`` of the arena.

    Attributes
    ----------
    parts
        The number of parts that the problem is split in.
    partial_sums
        The buffers for outputs that are sums over the problem's parts, see `PartialSums`.
    output_bytes
        The size of the outputs that are in the lease.
    flops, compulsory_bytes
        The problem's.
    cost
        Of computing it, in FLOPs and their equivalent in memory traffic.
    packed
        What `unpack_layout` rebuilds the layout from in another process.
    """

    problem: Problem
    parts: int
    inputs: tuple[PlacedTensor, ...]
    outputs: tuple[PlacedTensor, ...]
    partial_sums: tuple[PlacedTensor, ...]
    size_bytes: int
    output_bytes: int
    flops: int
    compulsory_bytes: int
    cost: float
    packed: bytes


def unpack_layout(packed: bytes) -> TensorLayout:
    """Rebuild a layout from its ``packed``."""
    return tensor_layout_of(*pickle.loads(packed))  # noqa: S301 - from our own processes


@lru_cache(maxsize=1024)
def tensor_layout_of(
    problem: Problem, shared: tuple[str, ...] = (), parts: int | None = None
) -> TensorLayout:
    """Lay out a problem's tensors; those named in ``shared`` are in shared memory.

    ``parts`` overrides the number of parts.
    """
    parts = parts or count_parts(problem)
    specs = _arena_specs(problem, shared)
    sums = partial_sums_of(problem, parts) if parts > 1 else {}
    starts, size_bytes = pack_offsets([*specs.values(), *(each.spec for each in sums.values())])
    offsets = dict(zip(specs, starts, strict=False))

    def placed(named: Mapping[str, TensorSpec]) -> tuple[PlacedTensor, ...]:
        return tuple(
            PlacedTensor(
                name, spec, offsets.get(name), shared.index(name) if name in shared else None
            )
            for name, spec in named.items()
        )

    return TensorLayout(
        problem,
        parts,
        placed(problem.inputs),
        placed(problem.outputs),
        tuple(
            PlacedTensor(name, each.spec, start, None)
            for (name, each), start in zip(sums.items(), starts[len(specs) :], strict=True)
        ),
        size_bytes,
        sum(spec.size_bytes for name, spec in problem.outputs.items() if name in offsets),
        problem.flops,
        problem.compulsory_bytes,
        float(min(problem.flops + _FLOPS_PER_BYTE * problem.compulsory_bytes, 10**300)),
        pickle.dumps((problem, shared, parts), pickle.HIGHEST_PROTOCOL),
    )


def pack_offsets(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Return the offset of each tensor in one block, and the size of the block."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def _arena_specs(problem: Problem, shared: Collection[str]) -> dict[str, TensorSpec]:
    """Return the tensors that need memory in the arena, in order.

    Index inputs in shared memory are among them: they are copied before they are validated, because
    the client can change its own memory afterwards.
    """
    inputs = {
        name: spec
        for name, spec in problem.inputs.items()
        if name not in shared or spec.dtype in _INDEX_DTYPES
    }
    return inputs | {name: spec for name, spec in problem.outputs.items() if name not in shared}


def has_index_inputs(problem: Problem) -> bool:
    """Return whether an input holds indices, so that a problem can fail while it is computed."""
    return any(spec.dtype in _INDEX_DTYPES for spec in problem.inputs.values())


def outputs_to_store(
    request: Request, problem: Problem, regions: Mapping[str, RegionPart]
) -> dict[str, TensorSpec]:
    """Return the outputs that the request wants stored on the server, by their new names."""
    specs: dict[str, TensorSpec] = {}
    for output, name in request.store.items():
        if output not in problem.outputs:
            computed = ", ".join(problem.outputs)
            raise InvalidProblem(f"store names {shown(output)}; this request computes {computed}")
        if output in regions or name in specs:
            raise InvalidProblem(
                f"store names {shown(name)} for {output}; expected distinct names, and no output "
                "that goes to shared memory"
            )
        specs[name] = problem.outputs[output]
    return specs


def region_parts(problem: Problem, regions: Mapping[str, RegionPart]) -> dict[str, RegionPart]:
    """Return the parts of regions that a problem uses, each cut to the size of its tensor."""
    parts = {}
    for name, spec in (*problem.inputs.items(), *problem.outputs.items()):
        part = regions.get(name)
        if part is None:
            continue
        if part.size_bytes < spec.size_bytes:
            raise InvalidProblem(
                f"{name} takes {spec.size_bytes:,} bytes; its part of shared memory has "
                f"{part.size_bytes:,}"
            )
        parts[name] = part._replace(size_bytes=spec.size_bytes)
    return parts
