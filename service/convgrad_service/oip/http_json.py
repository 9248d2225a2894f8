"""The JSON form of inference requests and answers, with Triton's binary data extension.

With the extension the JSON comes first in a body, followed by the bytes of the tensors; without it
the JSON is the whole body, and holds the elements as numbers.
Long lists of numbers are parsed later, in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Operation, Report
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad.wire import strict_json
from convgrad.wire.json_values import array_from_values, values_from_array
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import checked_shape, data_view, dtype_of, reshaped
from convgrad.wire.strict_json import dumps
from convgrad_service.engine.execution import Filler
from convgrad_service.long_json import LongValues, blocks_of
from convgrad_service.oip.fields import VERSION, operation_named
from convgrad_service.oip.request import (
    IN_JSON,
    InferInput,
    InferOutput,
    InferRequest,
    Span,
    dtype_named,
    input_region,
    output_region,
    protocol_name,
    refuse_unknown_keys,
    require_size,
    require_type,
    split_reserved,
)
from convgrad_service.problems import Problem

_REQUEST_KEYS = ("id", "model_name", "model_version", "parameters", "inputs", "outputs")
_INPUT_KEYS = ("name", "shape", "datatype", "parameters", "data")
_OUTPUT_KEYS = ("name", "parameters")
# A number in JSON takes about twenty characters and a microsecond.
_MAX_NUMBERS = 2**20
_ASK = 'ask for binary data with the parameter "binary_data_output": true'
# A block takes the parser a few milliseconds, in which no other thread runs.
_BLOCK_BYTES = 64 * 1024


class _NumberList:
    """A long flat list of JSON numbers, not parsed yet; ``text`` is what its brackets enclose."""

    def __init__(self, text: memoryview) -> None:
        self._text = text

    def check(self, shape: tuple[int, ...], *, name: str) -> None:
        """Raise MalformedRequest if the text is too short for a tensor of ``shape``."""
        # A number and its comma take at least two characters.
        if math.prod(shape) > len(self._text) // 2 + 1:
            raise self._refused(shape, name, "fewer")

    def fill(self, target: NDArray[Any], dtype: DType, *, name: str) -> None:
        """Parse the numbers into ``target``, a contiguous array of ``dtype``.

        Raises
        ------
        MalformedRequest
            The list has another length, or an element that is not a number of ``dtype``.
        """
        flat = target.reshape(-1)
        filled = 0
        for block in self._blocks():
            numbers = strict_json.loads(b"[" + block + b"]", f"{name}: data")
            if filled + len(numbers) > flat.size:
                raise self._refused(target.shape, name, "more")
            flat[filled : filled + len(numbers)] = array_from_values(numbers, dtype, name=name)
            filled += len(numbers)
        if filled < flat.size:
            raise self._refused(target.shape, name, "fewer")

    def _blocks(self) -> Iterator[bytes]:
        at = 0
        while at < len(self._text):
            block = bytes(self._text[at : at + _BLOCK_BYTES])
            more = at + len(block) < len(self._text)
            if more:
                comma = block.rfind(b",")
                if comma < 0:
                    raise MalformedRequest("data is not JSON: an element of its list does not end")
                block = block[:comma]
            if not block.strip() or (more and at + len(block) + 1 == len(self._text)):
                raise MalformedRequest("data is not JSON: its list has an empty element")
            yield block
            at += len(block) + more

    def _refused(self, shape: tuple[int, ...], name: str, how: str) -> MalformedRequest:
        return MalformedRequest(
            f"{name}: data holds {how} numbers than the {shown(math.prod(shape))} of its shape "
            f"{shown(shape)}"
        )


_NUMBERS = LongValues(
    ("data",),
    "[]",
    min_bytes=16 * 1024,
    wrap=_NumberList,
    advice="send tensors as binary data, or data as one flat list",
)


def read_infer_head(text: memoryview, operation: Operation, data_bytes: int | None) -> InferRequest:
    """Parse the JSON ``text``, which ``data_bytes`` of binary data follow; None if not known yet.

    Spans are relative to the end of the text.

    Raises
    ------
    MalformedRequest
        The text is not JSON, has an unknown key, or its sizes are inconsistent.
    NotFound
        It names a version of the model that there is not.
    """
    fields = _NUMBERS.parse_object(text, "the request")
    refuse_unknown_keys(fields, _REQUEST_KEYS, "the request")
    if fields.get("model_name", operation.name) != operation.name:
        raise MalformedRequest(
            f"model_name is {shown(fields['model_name'])}; the path names {operation.name}"
        )
    operation_named(operation.name, _string(fields.get("model_version", ""), "model_version"))
    parameters = _object(fields.get("parameters", {}), "parameters")
    if "triton_enable_empty_final_response" in parameters:
        raise MalformedRequest("triton_enable_empty_final_response is for streams, in gRPC")
    reserved = split_reserved(parameters)
    inputs, used_bytes = [], 0
    for item in _objects(fields.get("inputs"), "inputs"):
        tensor = _input(item, used_bytes)
        if isinstance(tensor.source, Span):
            used_bytes += tensor.source.size_bytes
        inputs.append(tensor)
    if data_bytes is not None and used_bytes != data_bytes:
        raise MalformedRequest(
            f"the inputs name {used_bytes:,} bytes of binary data (binary_data_size), and "
            f"{data_bytes:,} follow the JSON; Inference-Header-Content-Length says where it ends"
        )
    outputs = [
        _output(item, reserved.binary_data_output)
        for item in _objects(fields.get("outputs", []), "outputs")
    ]
    return InferRequest(
        operation,
        _string(fields.get("id", ""), "id"),
        tuple(inputs),
        tuple(outputs),
        reserved.operation,
        binary_by_default=reserved.binary_data_output,
        timeout_s=reserved.timeout_s,
    )


def _input(item: Mapping[str, Any], start: int) -> InferInput:
    name = _string(item.get("name"), "the name of an input")
    refuse_unknown_keys(item, _INPUT_KEYS, f"the input {shown(name)}")
    dtype = dtype_named(item.get("datatype"), tensor=name)
    shape = checked_shape(item.get("shape"), name=name)
    parameters = _object(item.get("parameters", {}), f"{name}: parameters")
    region = input_region(parameters, name)
    found = [
        key
        for key, there in (
            ("data", "data" in item),
            ("binary_data_size", "binary_data_size" in parameters),
            ("shared_memory_region", region is not None),
        )
        if there
    ]
    if len(found) != 1:
        raise MalformedRequest(
            f"{name}: expected one of data, binary_data_size and shared_memory_region, got "
            f"{' and '.join(found) or 'none of them'}"
        )
    if region is not None:
        return InferInput(name, dtype, shape, region)
    if "data" in item:
        return InferInput(name, dtype, shape, _numbers(item["data"], dtype, shape, name))
    size_bytes = require_size(parameters["binary_data_size"], f"{name}: binary_data_size")
    return InferInput(name, dtype, shape, Span(start, size_bytes))


def _numbers(data: Any, dtype: DType, shape: tuple[int, ...], name: str) -> NDArray[Any] | Filler:
    """Return the array of JSON numbers, nested or flat in row-major order, or what parses them."""
    if dtype not in IN_JSON:
        raise MalformedRequest(
            f"{name}: {protocol_name(dtype)} cannot be sent as JSON; send it as binary data"
        )
    if isinstance(data, _NumberList):
        data.check(shape, name=name)
        return partial(data.fill, dtype=dtype, name=name)
    numbers = require_type(data, list, f"{name}: expected data to be a list")
    array = array_from_values(numbers, dtype, name=name)
    if array.shape != shape and array.shape != (math.prod(shape),):
        raise MalformedRequest(
            f"{name}: data has the shape {shown(array.shape)}; expected {shown(shape)}, or all "
            f"{shown(math.prod(shape))} elements in one list"
        )
    return reshaped(array, shape, name=name)


def _output(item: Mapping[str, Any], binary_by_default: bool) -> InferOutput:
    name = _string(item.get("name"), "the name of an output")
    refuse_unknown_keys(item, _OUTPUT_KEYS, f"the output {shown(name)}")
    parameters = _object(item.get("parameters", {}), f"{name}: parameters")
    region = output_region(parameters, name)
    binary = parameters.get("binary_data", binary_by_default)
    require_type(binary, bool, f"{name}: expected binary_data to be a bool")
    # Triton's client sends binary_data: false together with a region.
    if region is not None and parameters.get("binary_data"):
        raise MalformedRequest(f"{name}: expected binary_data or shared_memory_region, got both")
    return InferOutput(name, binary, region)


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    items = require_type(value, list, f"{what}: expected a list of objects")
    return [_object(item, f"an item of {what}") for item in items]


def _object(value: Any, what: str) -> dict[str, Any]:
    return require_type(value, dict, f"{what}: expected an object")


def _string(value: Any, what: str) -> str:
    return require_type(value, str, f"{what}: expected a string")


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


def binary_outputs(request: InferRequest, outputs: Mapping[str, NDArray[Any]]) -> list[memoryview]:
    """Return the outputs that follow the JSON of the answer to ``request``, as views."""
    return [
        data_view(outputs[name])
        for name in request.answer_names(outputs)
        if request.sends(name) and request.wants_binary(name)
    ]


def encode_answer(
    request: InferRequest, outputs: Mapping[str, NDArray[Any]], report: Report
) -> bytes:
    """Return the JSON of the answer to ``request``, which its `binary_outputs` follow.

    The elements of outputs in shared memory or in the tensor store are not read.
    """
    described: list[bytes] = []
    for name in request.answer_names(outputs):
        array = outputs[name]
        tensor: dict[str, Any] = {
            "name": name,
            "datatype": protocol_name(dtype_of(array)),
            "shape": list(array.shape),
        }
        numbers: Iterable[bytes] = ()
        if name in request.store:
            tensor["parameters"] = {"stored": request.store[name]}
        elif request.sends(name) and request.wants_binary(name):
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        elif request.sends(name):
            numbers = blocks_of(values_from_array(array.reshape(-1)))
        # In shared memory: no parameters, as Triton, whose clients would expect binary data.
        text = dumps(tensor)
        described.append(b"".join((text[:-1], b',"data":', *numbers, b"}")) if numbers else text)
    head: dict[str, Any] = {"id": request.id} if request.id else {}
    head |= {
        "model_name": request.operation.name,
        "model_version": VERSION,
        "parameters": report.model_dump(),
    }
    return dumps(head)[:-1] + b',"outputs":[' + b",".join(described) + b"]}"
