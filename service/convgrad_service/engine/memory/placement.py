"""Where each tensor of a request is to lie: the arena, a client's shared memory, or to stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from convgrad.contract import Request
from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad.wire.sentences import shown
from convgrad_service.engine.memory.problem_size import ProblemSize
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.problems.base import TensorSpec

__all__ = ["arena_specs", "names_elements", "shared_parts", "to_store"]

# Elements that say where to write; floating-point ones may be anything.
_VALIDATED = (DType.INT32, DType.INT64)


def names_elements(sizes: ProblemSize) -> bool:
    """Whether an input says where to write, so that computing it may still refuse it."""
    return any(spec.dtype in _VALIDATED for spec in sizes.inputs.values())


def to_store(
    request: Request, sizes: ProblemSize, regions: Mapping[str, RegionPart]
) -> dict[str, TensorSpec]:
    """What is to be kept of the outputs, by the names that it is to have."""
    specs: dict[str, TensorSpec] = {}
    for output, name in request.store.items():
        if output not in sizes.outputs:
            computed = ", ".join(sizes.outputs)
            raise InvalidProblem(f"store names {shown(output)}; this request computes {computed}")
        if output in regions or name in specs:
            raise InvalidProblem(
                f"the output {output} can go to one place, and one output to each name; "
                f"{shown(name)} would be a second"
            )
        specs[name] = sizes.outputs[output]
    return specs


def shared_parts(sizes: ProblemSize, regions: Mapping[str, RegionPart]) -> dict[str, RegionPart]:
    """The parts of regions that a problem needs, each cut to its tensor's size."""
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


def arena_specs(sizes: ProblemSize, shared: Collection[str]) -> dict[str, TensorSpec]:
    """Of all that a request's place in the arena holds, in order.

    Of what is in shared memory those are the inputs whose elements are validated: a client may
    change its memory after that, and the arena it may not.
    """
    validated = {
        name: spec
        for name, spec in sizes.inputs.items()
        if name not in shared or spec.dtype in _VALIDATED
    }
    return validated | {name: spec for name, spec in sizes.outputs.items() if name not in shared}
