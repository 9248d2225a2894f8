"""Where each tensor of a problem lies in a request's place: worked out once for all alike.

Clients send the same few problems again and again, with other data. What does not change between
them is made here and remembered; a request adds where its place begins, and a worker is told of an
arrangement once and knows it by a number from then on.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from convgrad_service.engine.memory.arena import arranged
from convgrad_service.engine.memory.placement import arena_specs
from convgrad_service.engine.memory.problem_size import ProblemSize, problem_size
from convgrad_service.engine.scheduling.cost_model import CostModel
from convgrad_service.engine.scheduling.partition import shares_of
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = ["PackedTensorLayout", "Tensor", "TensorLayout", "forget_sizes", "tensor_layout_of"]


class Tensor(NamedTuple):
    """One tensor of a problem: in the arena from ``offset`` of the request's place on, in shared
    memory as the ``region``-th of the request's regions, or, to be copied from there, both."""

    name: str
    spec: TensorSpec
    offset: int | None
    region: int | None


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayout:
    """A problem with its sizes, and a place of ``size_bytes`` for what lies in the arena.

    ``shares`` are those of outputs that are sums over the problem's parts, see `Shares`. ``text``
    is what another process makes the same of; ``cost`` is in units of `CostModel`.
    """

    problem: Problem
    sizes: ProblemSize
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    shares: tuple[Tensor, ...]
    size_bytes: int
    cost: float
    text: bytes

    def unpacked(self) -> TensorLayout:
        """Itself."""
        return self


class PackedTensorLayout(NamedTuple):
    """An arrangement as the hub passes it on, without looking into it."""

    text: bytes
    cost: float = 0.0

    def unpacked(self) -> TensorLayout:
        """The arrangement itself."""
        problem, shared, parts = pickle.loads(self.text)  # noqa: S301 - from one of our processes
        return tensor_layout_of(problem, shared, parts)


@lru_cache(maxsize=1024)
def tensor_layout_of(
    problem: Problem, shared: tuple[str, ...] = (), parts: int | None = None
) -> TensorLayout:
    """Where a problem's tensors lie, of which those that are ``shared`` lie in shared memory.

    ``parts`` is what `ProblemSize` says unless another process has said otherwise.
    """
    sizes = problem_size(problem)
    if parts is not None and parts != sizes.parts:
        sizes = replace(sizes, parts=parts)
    specs = arena_specs(sizes, shared)
    shares = shares_of(problem, sizes.parts) if sizes.parts > 1 else {}
    shared_out = [share.spec for share in shares.values()]
    starts, size_bytes = arranged([*specs.values(), *shared_out])
    offsets = dict(zip(specs, starts, strict=False))
    behind = starts[len(specs) :]

    def tensors(named: Mapping[str, TensorSpec]) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(name, spec, offsets.get(name), shared.index(name) if name in shared else None)
            for name, spec in named.items()
        )

    return TensorLayout(
        problem,
        sizes,
        tensors(sizes.inputs),
        tensors(sizes.outputs),
        tuple(
            Tensor(name, share.spec, start, None)
            for (name, share), start in zip(shares.items(), behind, strict=True)
        ),
        size_bytes,
        CostModel.cost(sizes),
        pickle.dumps((problem, shared, sizes.parts), pickle.HIGHEST_PROTOCOL),
    )


def forget_sizes() -> None:
    """Work everything out again, as tests need that change how problems are cut."""
    problem_size.cache_clear()
    tensor_layout_of.cache_clear()
