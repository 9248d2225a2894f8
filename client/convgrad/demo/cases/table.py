"""The type of a case: requests to the server and the expected answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from convgrad import Client
from convgrad.demo.gate import Expected

__all__ = ["Array", "Case", "CaseTable", "Draw", "Pairs", "channels_last"]

Array: TypeAlias = NDArray[Any]
Pairs: TypeAlias = Iterator[tuple[Array | None, Expected]]


class Draw:
    """Generates the tensors of a case, with normally distributed elements."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, *shape: int, dtype: DTypeLike = np.float32) -> Array:
        return self._rng.normal(size=shape).astype(dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A case of an operation; ``run`` yields each answer with the expected one."""

    operation: str
    title: str
    run: Callable[[Client, Draw], Pairs]


class CaseTable(list[Case]):
    """The cases of a module, in order of definition."""

    def add(
        self, operation: str, title: str
    ) -> Callable[[Callable[[Client, Draw], Pairs]], Callable[[Client, Draw], Pairs]]:
        """Decorate the function that runs a case."""

        def register(run: Callable[[Client, Draw], Pairs]) -> Callable[[Client, Draw], Pairs]:
            self.append(Case(operation, title, run))
            return run

        return register


def channels_last(array: Array) -> Array:
    """(N, C, ...) → (N, ..., C), for activations and weights alike."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))
