"""What every problem offers: its tensors, its cost, and how it divides.

A Problem is a frozen dataclass that knows sizes and no data. It is made from a request, and every
refusal about sizes is raised there; what comes after may rely on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import isfinite, prod
from typing import Any, ClassVar, Literal

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import InvalidProblem
from convgrad_service.problems.sizes import Size, show

__all__ = ["PLAIN", "Combine", "Epilogue", "Lane", "Piece", "Problem", "Slices", "TensorSpec"]

Combine = Literal["concatenate", "sum"]
Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape, in the request's layout, and the element type of one tensor."""

    shape: Size
    dtype: DType

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Epilogue:
    """out = alpha*grad + beta*accumulate, in float32 or wider, before the one rounding.

    ``accumulate`` says whether the tensor is read: it is not where it was left out or beta is 0.
    """

    alpha: float = 1.0
    beta: float = 0.0
    accumulate: bool = False

    @property
    def trivial(self) -> bool:
        return self.alpha == 1.0 and not self.accumulate

    @classmethod
    def of(cls, alpha: float, beta: float | None, accumulate: NDArray[Any] | None) -> Epilogue:
        """From a request's fields; beta defaults to 1 where there is something to accumulate.

        Raises
        ------
        InvalidProblem
            Beta without accumulate, or a number that is not finite.
        """
        if beta is not None and accumulate is None:
            raise InvalidProblem(
                f"beta is {show(beta)} but there is no accumulate; expected both or neither"
            )
        if beta is None:
            beta = 0.0 if accumulate is None else 1.0
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not isfinite(value):
                raise InvalidProblem(f"{name} is {value}; expected a finite number")
        return cls(float(alpha), float(beta), accumulate is not None and beta != 0)


class Lane(IntEnum):
    """How a problem is scheduled: by its size, as a long one whatever its size, or alone."""

    BY_SIZE = 0
    LONG = 1
    ALONE = 2


class Problem(ABC):
    """One operation on tensors of known sizes."""

    __slots__ = ()

    lane: ClassVar[Lane] = Lane.BY_SIZE

    dtype: DType
    """The type that the floating tensors share."""

    @property
    @abstractmethod
    def operation(self) -> str:
        """The operation's name."""

    @property
    def computes(self) -> tuple[Problem, ...]:
        """The problems that kernels are needed for."""
        return (self,)

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The tensors that are read, by name."""

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, TensorSpec]:
        """The tensors that are computed, by name, in the order of the answer."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Nominal floating-point operations; one comparison a tap in pooling."""

    @property
    @abstractmethod
    def valid_flops(self) -> int:
        """The same without the taps that fall wholly in padding."""

    def split(self, parts: int) -> tuple[Piece, ...]:
        """Independent pieces, at least `parts` of them where the sizes allow it.

        Along N first, then along the outermost spatial dimension. The boundaries follow from the
        sizes and `parts` alone, so equal `parts` give equal sums; one part is the problem itself.
        """
        return self._cut(parts) if parts > 1 else (Piece.whole(self),)

    @abstractmethod
    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """`split` for two parts or more."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of all inputs and outputs."""
        return sum(spec.size_bytes for spec in (*self.inputs.values(), *self.outputs.values()))

    @property
    def compulsory_bytes(self) -> int:
        """Bytes that must move: every input read once, every output written once."""
        return self.memory_bytes

    def finish(
        self, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        """What follows the sum of the pieces' parts of output `name`, before its one rounding."""
        return total


PLAIN = Epilogue()
"""The gradient as it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a problem, itself a problem.

    ``inputs`` and ``outputs`` say which part of the whole request's arrays each of its tensors
    is; a name that is missing there is not used. ``take`` says which part of its own output
    counts, where it computes more than that. ``shifts`` is what to add to its index tensors to
    make them the whole's: subtract it from an input, add it to an output.
    """

    problem: Problem
    inputs: Mapping[str, Slices]
    outputs: Mapping[str, Slices]
    combine: Mapping[str, Combine]
    take: Mapping[str, Slices] = field(default_factory=dict)
    shifts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def whole(cls, problem: Problem) -> Piece:
        """The one piece of a problem that is not divided."""
        everything = {
            name: (slice(None),) * len(spec.shape)
            for name, spec in (*problem.inputs.items(), *problem.outputs.items())
        }
        return cls(
            problem,
            {name: everything[name] for name in problem.inputs},
            {name: everything[name] for name in problem.outputs},
            dict.fromkeys(problem.outputs, "concatenate"),
        )
