"""The interface of problems: their tensors, their cost, and how they are split.

A Problem is a frozen dataclass of sizes without data. It is made from a request, whose sizes are
checked there and nowhere else.
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
    """The shape of a tensor, in the request's layout, and its element type."""

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

    ``accumulate`` is whether the tensor is read: it was sent, and beta is not 0.
    """

    alpha: float = 1.0
    beta: float = 0.0
    accumulate: bool = False

    @property
    def trivial(self) -> bool:
        return self.alpha == 1.0 and not self.accumulate

    @classmethod
    def of(cls, alpha: float, beta: float | None, accumulate: NDArray[Any] | None) -> Epilogue:
        """Make an epilogue from a request's fields; beta defaults to 1 if accumulate was sent.

        Raises
        ------
        InvalidProblem
            There is beta without accumulate, or a number that is not finite.
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
    """How a problem is scheduled: by its size, as a long one, or with nothing else running."""

    BY_SIZE = 0
    LONG = 1
    ALONE = 2


class Problem(ABC):
    """One operation on tensors of known sizes."""

    __slots__ = ()

    lane: ClassVar[Lane] = Lane.BY_SIZE

    dtype: DType
    """The dtype of all floating-point tensors."""

    @property
    @abstractmethod
    def operation(self) -> str:
        """The operation's name."""

    @property
    def computes(self) -> tuple[Problem, ...]:
        """The problems whose kernels are needed."""
        return (self,)

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The tensors that are read, by name."""

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, TensorSpec]:
        """The tensors that are computed, by name, in the order of the response."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Nominal floating-point operations; in pooling, one comparison per tap."""

    @property
    @abstractmethod
    def valid_flops(self) -> int:
        """Floating-point operations without the taps that read padding."""

    def split(self, parts: int) -> tuple[Piece, ...]:
        """Split into independent pieces, at least ``parts`` of them where the sizes allow it.

        The split is along N first, then along the outermost spatial dimension. It depends only on
        the sizes and ``parts``, so equal ``parts`` give equal bits.
        """
        return self._cut(parts) if parts > 1 else (Piece.whole(self),)

    @abstractmethod
    def _cut(self, parts: int) -> tuple[Piece, ...]:
        """Do `split` for two parts or more."""

    @property
    def memory_bytes(self) -> int:
        """Size of all inputs and outputs."""
        return sum(spec.size_bytes for spec in (*self.inputs.values(), *self.outputs.values()))

    @property
    def compulsory_bytes(self) -> int:
        """Least memory traffic: every input read once, every output written once."""
        return self.memory_bytes

    def finish(
        self, name: str, total: NDArray[Any], tensors: Mapping[str, NDArray[Any]]
    ) -> NDArray[Any]:
        """Apply the epilogue to the sum of the pieces' parts of output ``name``, and round once."""
        return total


PLAIN = Epilogue()
"""The epilogue that leaves the gradient unchanged."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a problem, itself a problem.

    Attributes
    ----------
    inputs, outputs : mapping of str to tuple of slice
        The parts of the whole problem's arrays that are its tensors. Inputs that are missing are
        not read.
    combine : mapping of str to {"concatenate", "sum"}
        How pieces form each output.
    take : mapping of str to tuple of slice
        The part of its own output to use, if it computes more than that.
    shifts : mapping of str to int
        What to add to its index tensors to get indices into the whole.
    """

    problem: Problem
    inputs: Mapping[str, Slices]
    outputs: Mapping[str, Slices]
    combine: Mapping[str, Combine]
    take: Mapping[str, Slices] = field(default_factory=dict)
    shifts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def whole(cls, problem: Problem) -> Piece:
        """Return the only piece of a problem that is not split."""
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
