"""Encodes an answer in the protocol's JSON form, with Triton's binary data extension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad.wire.json_values import values_from_array
from convgrad.wire.shapes import data_view, dtype_of
from convgrad_service.long_json import blocks_of, dumps
from convgrad_service.oip.datatypes import IN_JSON, protocol_name
from convgrad_service.oip.fields import VERSION
from convgrad_service.oip.request import InferRequest
from convgrad_service.problems import Problem

__all__ = ["HttpAnswer", "encode_answer", "refuse_in_json"]

# A number in JSON takes about twenty characters and a microsecond.
_MAX_NUMBERS = 2**20
_ASK = 'ask for binary data with the parameter "binary_data_output": true'


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A body in ``chunks``. The first ``header_bytes`` are JSON; None if everything is."""

    chunks: list[bytes | memoryview]
    header_bytes: int | None


def refuse_in_json(request: InferRequest, problem: Problem) -> None:
    """Refuse outputs that cannot be sent as JSON, before anything is computed.

    Raises
    ------
    MalformedRequest
        An output's dtype can only be sent as binary data.
    ProblemTooLarge
        An output has too many elements.
    """
    for name in request.answer_names(problem.outputs):
        spec = problem.outputs[name]
        if request.wants_binary(name) or not request.sends(name):
            continue
        if spec.dtype not in IN_JSON:
            raise MalformedRequest(
                f"the output {name} is {protocol_name(spec.dtype)}, which cannot be sent as JSON; "
                f"{_ASK}"
            )
        if spec.elements > _MAX_NUMBERS:
            raise ProblemTooLarge(
                f"the output {name} has {spec.elements:,} elements, and at most {_MAX_NUMBERS:,} "
                f"are sent as JSON; {_ASK}"
            )


def encode_answer(
    request: InferRequest, outputs: Mapping[str, NDArray[Any]], report: Report
) -> HttpAnswer:
    """Encode the answer to ``request``; its binary data are views of the arrays.

    The elements of outputs in shared memory or in the tensor store are not read.
    """
    described: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    numbers: dict[int, NDArray[Any]] = {}
    for name, array in request.answer_outputs(outputs).items():
        dtype: DType = dtype_of(array)
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": protocol_name(dtype),
            "shape": list(array.shape),
        }
        if name in request.store:
            tensor["parameters"] = {"stored": request.store[name]}
        elif request.sends(name) and request.wants_binary(name):
            data = data_view(array)
            tensor["parameters"] = {"binary_data_size": len(data)}
            binary.append(data)
        elif request.sends(name):
            numbers[len(described)] = array
        # In shared memory: no parameters, as Triton, whose clients would expect binary data.
        described.append(tensor)
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    head["model_name"] = request.operation.name
    head["model_version"] = VERSION
    head["parameters"] = report.model_dump()
    text = b"".join(_text(head, described, numbers))
    return HttpAnswer([text, *binary], len(text) if binary else None)


def _text(
    head: Mapping[str, Any], described: list[dict[str, Any]], numbers: Mapping[int, NDArray[Any]]
) -> Iterator[bytes]:
    """Yield the JSON of the answer."""
    yield dumps(head)[:-1] + b',"outputs":['
    for index, tensor in enumerate(described):
        yield b"," if index else b""
        text = dumps(tensor)
        if index not in numbers:
            yield text
        else:
            yield text[:-1] + b',"data":'
            yield from blocks_of(values_from_array(numbers[index].reshape(-1)))
            yield b"}"
    yield b"]}"
