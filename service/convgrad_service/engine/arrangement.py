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

from convgrad_service.engine.arena import arranged
from convgrad_service.engine.pace import Pace
from convgrad_service.engine.parts import shares_of
from convgrad_service.engine.placement import arena_specs
from convgrad_service.engine.sized import Sized, sized
from convgrad_service.problems.base import Problem, TensorSpec

__all__ = ["Arrangement", "PackedArrangement", "Tensor", "arrangement_of", "forget_sizes"]


class Tensor(NamedTuple):
    """One tensor of a problem: in the arena from ``offset`` of the request's place on, in shared
    memory as the ``region``-th of the request's regions, or, to be copied from there, both."""

    name: str
    spec: TensorSpec
    offset: int | None
    region: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A problem with its sizes, and a place of ``size_bytes`` for what lies in the arena.

    ``shares`` are those of outputs that are sums over the problem's parts, see `Shares`. ``text``
    is what another process makes the same of; ``cost`` is in units of `Pace`.
    """

    problem: Problem
    sizes: Sized
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    shares: tuple[Tensor, ...]
    size_bytes: int
    cost: float
    text: bytes

    def unpacked(self) -> Arrangement:
        """Itself."""
        return self


class PackedArrangement(NamedTuple):
    """An arrangement as the hub passes it on, without looking into it."""

    text: bytes
    cost: float = 0.0

    def unpacked(self) -> Arrangement:
        """The arrangement itself."""
        problem, shared, parts = pickle.loads(self.text)  # noqa: S301 - from one of our processes
        return arrangement_of(problem, shared, parts)


@lru_cache(maxsize=1024)
def arrangement_of(
    problem: Problem, shared: tuple[str, ...] = (), parts: int | None = None
) -> Arrangement:
    """Where a problem's tensors lie, of which those that are ``shared`` lie in shared memory.

    ``parts`` is what `Sized` says unless another process has said otherwise.
    """
    sizes = sized(problem)
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

    return Arrangement(
        problem,
        sizes,
        tensors(sizes.inputs),
        tensors(sizes.outputs),
        tuple(
            Tensor(name, share.spec, start, None)
            for (name, share), start in zip(shares.items(), behind, strict=True)
        ),
        size_bytes,
        Pace.cost(sizes),
        pickle.dumps((problem, shared, sizes.parts), pickle.HIGHEST_PROTOCOL),
    )


def forget_sizes() -> None:
    """Work everything out again, as tests need that change how problems are cut."""
    sized.cache_clear()
    arrangement_of.cache_clear()
