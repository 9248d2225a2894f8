"""The sizes of a problem and the layout of its tensors in a request's memory.

Clients send the same few problems again and again with other data, so both are computed once and
cached. A request adds only the offset of its lease, and a worker receives each layout once.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from convgrad.contract import Request
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.scheduling.partition import count_parts, partial_sums_of
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = [
    "ALIGNMENT_BYTES",
    "PlacedTensor",
    "ProblemSize",
    "TensorLayout",
    "clear_layout_cache",
    "has_index_inputs",
    "outputs_to_store",
    "pack_offsets",
    "problem_size",
    "region_parts",
    "tensor_layout_of",
    "unpack_layout",
]

# One byte of memory traffic counts as this many FLOPs: the balance of a machine with 100 GFLOP/s
# and 10 GB/s. It only has to rank pooling against convolution sensibly.
_FLOPS_PER_BYTE = 10

ALIGNMENT_BYTES = 256
"""Alignment of every tensor: whole cache lines, and what GPUs copy fastest."""

# Inputs of these types hold indices, which backends validate; floats may have any value.
_INDEX_DTYPES = (DType.INT32, DType.INT64)


@dataclass(frozen=True, slots=True)
class ProblemSize:
    """The attributes of `Problem` of the same names, and the number of ``parts`` it is split in."""

    operation: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    flops: int
    memory_bytes: int
    compulsory_bytes: int
    parts: int = 1


@lru_cache(maxsize=1024)
def problem_size(problem: Problem) -> ProblemSize:
    """Return the sizes of a problem."""
    return ProblemSize(
        problem.operation,
        dict(problem.inputs),
        dict(problem.outputs),
        problem.flops,
        problem.memory_bytes,
        problem.compulsory_bytes,
        count_parts(problem),
    )


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
    partial_sums
        The buffers for outputs that are sums over the problem's parts, see `PartialSums`.
    cost
        Of computing it, in FLOPs and their equivalent in memory traffic.
    packed
        What `unpack_layout` rebuilds the layout from in another process.
    """

    problem: Problem
    sizes: ProblemSize
    inputs: tuple[PlacedTensor, ...]
    outputs: tuple[PlacedTensor, ...]
    partial_sums: tuple[PlacedTensor, ...]
    size_bytes: int
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

    ``parts`` overrides the number of parts in `ProblemSize`.
    """
    sizes = problem_size(problem)
    if parts is not None and parts != sizes.parts:
        sizes = replace(sizes, parts=parts)
    specs = _arena_specs(sizes, shared)
    sums = partial_sums_of(problem, sizes.parts) if sizes.parts > 1 else {}
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
        sizes,
        placed(sizes.inputs),
        placed(sizes.outputs),
        tuple(
            PlacedTensor(name, each.spec, start, None)
            for (name, each), start in zip(sums.items(), starts[len(specs) :], strict=True)
        ),
        size_bytes,
        float(min(sizes.flops + _FLOPS_PER_BYTE * sizes.compulsory_bytes, 10**300)),
        pickle.dumps((problem, shared, sizes.parts), pickle.HIGHEST_PROTOCOL),
    )


def clear_layout_cache() -> None:
    """Forget all sizes and layouts, for tests that change how problems are split."""
    problem_size.cache_clear()
    tensor_layout_of.cache_clear()


def pack_offsets(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Return the offset of each tensor in one block, and the size of the block."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def _arena_specs(sizes: ProblemSize, shared: Collection[str]) -> dict[str, TensorSpec]:
    """Return the tensors that need memory in the arena, in order.

    Index inputs in shared memory are among them: they are copied before they are validated, because
    the client can change its own memory afterwards.
    """
    inputs = {
        name: spec
        for name, spec in sizes.inputs.items()
        if name not in shared or spec.dtype in _INDEX_DTYPES
    }
    return inputs | {name: spec for name, spec in sizes.outputs.items() if name not in shared}


def has_index_inputs(sizes: ProblemSize) -> bool:
    """Return whether an input holds indices, so that a problem can fail while it is computed."""
    return any(spec.dtype in _INDEX_DTYPES for spec in sizes.inputs.values())


def outputs_to_store(
    request: Request, sizes: ProblemSize, regions: Mapping[str, RegionPart]
) -> dict[str, TensorSpec]:
    """Return the outputs that the request wants stored on the server, by their new names."""
    specs: dict[str, TensorSpec] = {}
    for output, name in request.store.items():
        if output not in sizes.outputs:
            computed = ", ".join(sizes.outputs)
            raise InvalidProblem(f"store names {shown(output)}; this request computes {computed}")
        if output in regions or name in specs:
            raise InvalidProblem(
                f"store names {shown(name)} for {output}; expected distinct names, and no output "
                "that goes to shared memory"
            )
        specs[name] = sizes.outputs[output]
    return specs


def region_parts(sizes: ProblemSize, regions: Mapping[str, RegionPart]) -> dict[str, RegionPart]:
    """Return the parts of regions that a problem uses, each cut to the size of its tensor."""
    parts = {}
    for name, spec in (*sizes.inputs.items(), *sizes.outputs.items()):
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
