"""What a case is: a request to the server, and what should come back."""

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
    """Draws the tensors of a case: normal numbers, never zeros or constants."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, *shape: int, dtype: DTypeLike = np.float32) -> Array:
        return self._rng.normal(size=shape).astype(dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One case of one operation; ``run`` yields each answer with what it should be."""

    operation: str
    title: str
    run: Callable[[Client, Draw], Pairs]


class CaseTable(list[Case]):
    """The cases of a module, in the order in which it writes them down."""

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
