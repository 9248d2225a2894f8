"""`Call`, a request as a value independent of any connection, and `Answer`, its result.

A Call holds validated arguments and knows how to read its outputs. Every operation is a pure
function of its arguments, so a Call can safely be sent again, or to another server.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from convgrad._display import described, fields_text, html_table
from convgrad.dtypes import DType
from convgrad.errors import InvalidAnswer, MalformedRequest

if TYPE_CHECKING:  # pydantic is imported with the first call, not with the package
    from convgrad.contract import Report

__all__ = [
    "Answer",
    "Call",
    "Outputs",
    "Stored",
    "TensorLike",
    "as_tensor",
    "check_call",
    "make_call",
    "one_output",
    "required",
    "select",
]

T = TypeVar("T")
Outputs: TypeAlias = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Stored:
    """A reference to a tensor stored on the server, accepted wherever an operation takes an array.

    Holds the tensor's name, shape and dtype, but not its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @classmethod
    def described(cls, description: Mapping[str, Any], name: str) -> Stored:
        """Build from the server's JSON description, which has ``shape`` and ``dtype``."""
        return cls(name, tuple(description["shape"]), DType(description["dtype"]))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Stored({self.name!r}, {described(self)})"

    def blank(self) -> NDArray[Any]:
        """Return an array of this shape and dtype that uses no memory, to validate requests."""
        return np.broadcast_to(np.empty((), self.dtype.numpy), self.shape)


TensorLike: TypeAlias = ArrayLike | Stored
"""What an operation accepts as a tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Call(Generic[T]):
    """A validated request, made by a function of `convgrad.calls`.

    ``read`` converts the named arrays of an answer into the operation's return value.
    """

    operation: str
    tensors: Mapping[str, NDArray[Any]]
    parameters: Mapping[str, Any]
    read: Callable[[Outputs], T] = field(repr=False)

    def __repr__(self) -> str:
        fields = [*self.tensors.items(), *self.parameters.items()]
        return fields_text(f"Call.{self.operation}", fields)

    def storing(self, outputs: Mapping[str, str]) -> Call[T]:
        """Return a copy whose outputs named here are stored on the server instead of sent."""
        if not outputs:
            return self
        return replace(self, parameters={**self.parameters, "store": dict(outputs)})


@dataclass(frozen=True, slots=True, eq=False)
class Answer(Generic[T]):
    """The result of `Client.call`: the outputs and how the server computed them.

    ``server_timing_s`` gives the seconds that the server spent in each stage (decode, queue,
    compute, …); ``attempts`` is the number of times the request was sent.
    """

    outputs: T
    report: Report
    request_id: str
    server_timing_s: Mapping[str, float]
    attempts: int

    def __repr__(self) -> str:
        return fields_text("Answer", self._rows())

    def _repr_html_(self) -> str:
        return html_table("Answer", self._rows())

    def _rows(self) -> Iterator[tuple[str, Any]]:
        yield "outputs", self.outputs
        report = self.report
        yield "kernel", f"{report.kernel} on {report.backend}"
        yield "compute_s", report.compute_s
        yield "attempts", self.attempts
        yield "request_id", self.request_id


def check_call(call: Any) -> Call[Any]:
    """Return ``call``, or raise TypeError if it is not a Call."""
    if not isinstance(call, Call):
        raise TypeError(
            "call: expected what a function of convgrad.calls makes, such as "
            f"convgrad.calls.conv_bwd_data(grad_output, weight); got {call!r:.80}"
        )
    return call


def make_call(
    operation: str, arguments: Mapping[str, Any], read: Callable[[Outputs], T]
) -> Call[T]:
    """Validate arguments against the operation's contract and make a Call of them.

    Arguments that are None count as omitted. Raises MalformedRequest with the same message as the
    server.
    """
    from convgrad.contract import OPERATIONS, validate

    request_model = OPERATIONS[operation].request
    tensor_names = frozenset(request_model.tensor_fields())
    given = {name: value for name, value in arguments.items() if value is not None}
    stored = {}
    for name in tensor_names & given.keys():
        if isinstance(given[name], Stored):
            stored[name], given[name] = given[name].name, given[name].blank()
        else:
            given[name] = as_tensor(name, given[name])
    request = validate(request_model, given)
    tensors = {name: array for name, array in request.tensors().items() if name not in stored}
    parameters = request.parameters()
    if stored:
        parameters["stored"] = stored
    return Call(operation, tensors, parameters, read)


def as_tensor(name: str, value: Any) -> NDArray[Any]:
    """Convert ``value`` to a C-contiguous NumPy array of native byte order.

    A contiguous array, or PyTorch tensor on the CPU, is not copied.

    Raises
    ------
    MalformedRequest
        NumPy cannot convert it, or no operation accepts its dtype.
    """
    bfloat16 = not isinstance(value, np.ndarray) and _is_torch_bfloat16(value)
    try:
        array: NDArray[Any] = np.asarray(_as_int16(value) if bfloat16 else value, order="C")
        if bfloat16:
            array = array.view(DType.BFLOAT16.numpy)
    # torch raises RuntimeError for a tensor that requires grad or is not on the CPU.
    except (TypeError, ValueError, RuntimeError) as refused:
        raise MalformedRequest(
            f"{name}: expected a numeric array, got {_what(value)}: {refused}"
        ) from refused
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if DType.of(array.dtype) is None:
        names = ", ".join(DType)
        raise MalformedRequest(f"{name}: expected a dtype of {names}; got {array.dtype}")
    return array


def _is_torch_bfloat16(value: Any) -> bool:
    return str(getattr(value, "dtype", "")) == "torch.bfloat16"


def _as_int16(value: Any) -> Any:
    """View a bfloat16 PyTorch tensor, which NumPy cannot convert, as int16.

    Raises
    ------
    RuntimeError
        It requires a gradient, which the view would drop; PyTorch refuses other dtypes itself.
    """
    if value.requires_grad:
        raise RuntimeError("it requires grad; pass tensor.detach()")
    return value.contiguous().view(sys.modules["torch"].int16)


def one_output(name: str) -> Callable[[Outputs], NDArray[Any]]:
    """Make the reader for an operation with one output."""

    def read(outputs: Outputs) -> NDArray[Any]:
        return required(outputs, name)

    return read


def required(outputs: Outputs, name: str) -> NDArray[Any]:
    """Return the output of that name; raise InvalidAnswer if it is missing."""
    if name not in outputs:
        found = ", ".join(outputs) or "no tensors"
        raise InvalidAnswer(f"the answer lacks {name}; it has {found}")
    return outputs[name]


def select(
    outputs: Outputs, names: Iterable[str], asked: Collection[str]
) -> Iterator[NDArray[Any] | None]:
    """Yield the named outputs in order, None for one not requested; raise if one is missing."""
    return (required(outputs, name) if name in asked else None for name in names)


def _what(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
