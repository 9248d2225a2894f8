"""Messages of the Open Inference Protocol: classes, decompression, and inference without copies.

The classes have their own descriptor pool: in protobuf's default pool their names would collide
with those of any other copy of the protocol in the process, such as tritonclient's.

grpcio would decompress every message in its own memory, however many at a time: 3.6 MB sent to
sixty calls took 1.5 GB, and everybody waited for 15 s. So messages are decompressed here (gzip or
deflate).

Protobuf copies every ``bytes`` field when it parses, and again when the field is read. So the
tensors, which are fields of the outermost message, are cut out of a request by walking its field
tags, and protobuf parses the few hundred bytes that remain. A response is protobuf's encoding of
everything but the tensors, followed by the tensors' fields: fields may come in any order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, PayloadTooLarge
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import checked_shape, data_view, dtype_of, reshaped
from convgrad_service.oip.fields import VERSION, operation_named
from convgrad_service.oip.request import (
    InferInput,
    InferOutput,
    InferRequest,
    Span,
    dtype_named,
    input_region,
    output_region,
    protocol_name,
    split_reserved,
)

_POOL = DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("open_inference.binpb").read_bytes()
).file:
    _POOL.Add(_file)
SERVICE: ServiceDescriptor = _POOL.FindServiceByName("inference.GRPCInferenceService")
# Of messages without tensors, which have a few bytes.
_MAX_DECOMPRESSED_BYTES = 64 * 1024
_EITHER_HEADER = zlib.MAX_WBITS + 32
_GZIP, _ZLIB = b"\x1f\x8b", b"\x78"
_FINAL = "triton_final_response"
# The numbers of fields; an id has the same in requests and responses.
_MODEL_NAME, _ID, _RAW_INPUT_CONTENTS, _RAW_OUTPUT_CONTENTS, _INFER_RESPONSE = 1, 3, 7, 6, 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# Far more than a request has; each takes a microsecond to walk.
_MAX_FIELDS = 4096
# Protobuf expands numbers in `contents` up to eightfold.
_MAX_PARSED_BYTES = 16 * 2**20
_CONTENTS = {
    DType.FLOAT32: "fp32_contents",
    DType.FLOAT64: "fp64_contents",
    DType.INT32: "int_contents",
    DType.INT64: "int64_contents",
}
_INT64 = 2**63
Part = bytes | memoryview


def is_compressed(message: bytes) -> bool:
    """Return whether a message begins as gzip or zlib do.

    grpcio does not say so. As protobuf, 0x1f is a tag that no message can have, and 0x78 that of a
    field 15, which no message of this server has.
    """
    head = message[:2]
    return head == _GZIP or (head[:1] == _ZLIB and int.from_bytes(head, "big") % 31 == 0)


def decompress(message: bytes, max_bytes: int) -> bytes:
    """Decompress a message to at most ``max_bytes``.

    Raises MalformedRequest if it is damaged or incomplete, PayloadTooLarge if it is longer.
    """
    decompressor = zlib.decompressobj(_EITHER_HEADER)
    try:
        found = decompressor.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise MalformedRequest(f"the compressed message cannot be read: {error}") from None
    if len(found) > max_bytes:
        raise PayloadTooLarge(
            f"the message has more than {max_bytes:,} bytes once decompressed, the maximum"
        )
    if not decompressor.eof or decompressor.unused_data:
        raise MalformedRequest("the compressed message is not complete, or more follows its end")
    return found


def message(name: str) -> Any:
    """Return the class of a message, e.g. ``ModelReadyRequest``."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"inference.{name}"))


def parsed(body: bytes, message_class: Any) -> Any:
    """Parse a message without tensors, which may be compressed; raises MalformedRequest."""
    if is_compressed(body):
        body = decompress(body, _MAX_DECOMPRESSED_BYTES)
    try:
        return message_class.FromString(body)
    except DecodeError:
        raise MalformedRequest(f"the message is not a {message_class.DESCRIPTOR.name}") from None


_RequestMessage, _ResponseMessage = message("ModelInferRequest"), message("ModelInferResponse")
_StreamResponseMessage = message("ModelStreamInferResponse")


class CutRequest(NamedTuple):
    """A ModelInferRequest that has not been parsed.

    ``rest`` is all of the message but its id and its raw_input_contents; ``raw`` is where these are
    in it.
    """

    model: str
    id: str
    rest: bytes
    raw: list[Span]


def cut_infer_request(body: bytes) -> CutRequest:
    """Cut id and tensors out of a message.

    Raises MalformedRequest if it is not a sequence of fields, or the rest is too large to parse.
    """
    kept: list[bytes] = []
    spans: list[Span] = []
    texts = {_MODEL_NAME: b"", _ID: b""}
    at = keep_from = kept_bytes = 0
    for _ in range(_MAX_FIELDS):
        if at >= len(body):
            break
        start = at
        field, at, size = _field_at(body, at)
        if at + size > len(body):
            raise MalformedRequest(
                f"the message ends within a field: {len(body) - at:,} of {size:,} bytes"
            )
        if field in texts:
            texts[field] = body[at : at + size]
        if field in (_ID, _RAW_INPUT_CONTENTS):
            kept.append(body[keep_from:start])
            keep_from = at + size
        if field == _RAW_INPUT_CONTENTS:
            spans.append(Span(at, size))
        else:
            kept_bytes += at + size - start
            if kept_bytes > _MAX_PARSED_BYTES:
                raise MalformedRequest(
                    f"the message holds more than {_MAX_PARSED_BYTES:,} bytes besides its "
                    "raw_input_contents; send large tensors there"
                )
        at += size
    else:
        raise MalformedRequest(f"the message has more than {_MAX_FIELDS} fields")
    kept.append(body[keep_from:])
    try:
        return CutRequest(texts[_MODEL_NAME].decode(), texts[_ID].decode(), b"".join(kept), spans)
    except UnicodeDecodeError:
        raise MalformedRequest("the message is not a ModelInferRequest") from None


def read_infer_request(cut: CutRequest) -> InferRequest:
    """Parse a ModelInferRequest, without its id.

    Raises MalformedRequest if it cannot be parsed or is inconsistent, NotFound for unknown models.
    """
    try:
        parsed = _RequestMessage.FromString(cut.rest)
    except DecodeError:
        raise MalformedRequest("the message is not a ModelInferRequest") from None
    operation = operation_named(parsed.model_name, parsed.model_version)
    reserved = split_reserved(_parameters(parsed.parameters))
    spans = iter(cut.raw) if cut.raw else None
    request = InferRequest(
        operation,
        "",
        tuple(_input(tensor, spans) for tensor in parsed.inputs),
        tuple(
            InferOutput(each.name, True, output_region(_parameters(each.parameters), each.name))
            for each in parsed.outputs
        ),
        reserved.operation,
        timeout_s=reserved.timeout_s,
    )
    if left := len(list(spans or ())):
        raise MalformedRequest(
            f"raw_input_contents holds {len(cut.raw)} tensors, {left} more than there are inputs "
            "for"
        )
    return request


def _field_at(body: bytes, at: int) -> tuple[int, int, int]:
    """Return the number of a field, where its value begins, and its size.

    The number is 0 if the value is not delimited by its length.
    """
    tag, value_at = _varint(body, at)
    kind = tag & 7
    if kind == _LENGTH:
        size, value_at = _varint(body, value_at)
        return tag >> 3, value_at, size
    if kind == _VARINT:
        return 0, _varint(body, value_at)[1], 0
    if kind in (_FIXED64, _FIXED32):
        return 0, value_at, 8 if kind == _FIXED64 else 4
    raise MalformedRequest(f"the message has a field of wire type {kind} at byte {at}")


def encode_head(
    request: InferRequest,
    outputs: Mapping[str, NDArray[Any]],
    report: Report,
    *,
    in_stream: bool = False,
) -> bytes:
    """Encode a ModelInferResponse without `encode_tensors` and `response_id`.

    With ``in_stream`` it is marked as the last of its request.
    """
    head = _ResponseMessage(model_name=request.operation.name, model_version=VERSION)
    for name, value in report.model_dump().items():
        _set_parameter(head.parameters[name], value)
    if in_stream:
        head.parameters[_FINAL].bool_param = True
    for name in request.answer_names(outputs):
        array = outputs[name]
        output = head.outputs.add(
            name=name, datatype=protocol_name(dtype_of(array)), shape=array.shape
        )
        if name in request.store:
            _set_parameter(output.parameters["stored"], request.store[name])
    encoded: bytes = head.SerializeToString()
    return encoded


def encode_tensors(sends: Mapping[str, bool], outputs: Mapping[str, NDArray[Any]]) -> list[Part]:
    """Encode the raw_output_contents of a ModelInferResponse, in parts that refer to the arrays.

    ``sends`` has the answer's outputs: False if one is stored or in shared memory, so that its
    field is empty.
    """
    parts: list[Part] = []
    for name, sent in sends.items():
        data = data_view(outputs[name]) if sent else b""
        parts += _length_prefix(_RAW_OUTPUT_CONTENTS, len(data)), data
    return parts


def in_stream_response(parts: list[Part]) -> list[Part]:
    """Return a ModelStreamInferResponse of an encoded ModelInferResponse."""
    return [_length_prefix(_INFER_RESPONSE, sum(map(len, parts))), *parts]


def encode_stream_error(model: str, request_id: str, detail: str) -> bytes:
    """Encode a ModelStreamInferResponse for a request that failed."""
    answer = _StreamResponseMessage(error_message=detail)
    answer.infer_response.model_name = model
    answer.infer_response.id = request_id
    answer.infer_response.parameters[_FINAL].bool_param = True
    encoded: bytes = answer.SerializeToString()
    return encoded


def response_id(request_id: str) -> bytes:
    """Encode the id of a ModelInferResponse, to be appended to the rest of it."""
    text = request_id.encode()
    return _length_prefix(_ID, len(text)) + text


def _set_parameter(parameter: Any, value: Any) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, str):
        parameter.string_param = value
    elif isinstance(value, int) and abs(value) < _INT64:
        parameter.int64_param = value
    else:
        parameter.double_param = float(value)


def _input(tensor: Any, spans: Iterator[Span] | None) -> InferInput:
    name = tensor.name
    dtype = dtype_named(tensor.datatype, tensor=name)
    shape = checked_shape(list(tensor.shape), name=name)
    region = input_region(_parameters(tensor.parameters), name)
    has_contents = tensor.HasField("contents")
    if region is not None:
        if has_contents:
            raise MalformedRequest(f"{name}: expected contents or a shared-memory region, got both")
        return InferInput(name, dtype, shape, region)
    if has_contents:
        if spans is not None:
            raise MalformedRequest(
                f"{name}: contents must not be used together with raw_input_contents; expected all "
                "inputs in one of the two"
            )
        return InferInput(name, dtype, shape, _contents(tensor.contents, dtype, shape, name))
    span = None if spans is None else next(spans, None)
    if span is None:
        raise MalformedRequest(
            f"{name}: no data; expected it in raw_input_contents, contents or shared memory"
        )
    return InferInput(name, dtype, shape, span)


def _contents(contents: Any, dtype: DType, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    expected = _CONTENTS.get(dtype)
    if expected is None:
        raise MalformedRequest(
            f"{name}: {protocol_name(dtype)} cannot be sent in contents; send it in "
            "raw_input_contents"
        )
    filled = [field.name for field, _ in contents.ListFields()]
    if filled not in ([expected], []):
        raise MalformedRequest(
            f"{name}: expected {expected} alone for {protocol_name(dtype)}, got {', '.join(filled)}"
        )
    array = np.array(getattr(contents, expected), dtype.numpy)
    if array.size != int(np.prod(np.array(shape, object))):
        raise MalformedRequest(
            f"{name}: {expected} holds {array.size:,} elements; expected shape {shown(shape)}"
        )
    array.flags.writeable = False
    return reshaped(array, shape, name=name)


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise MalformedRequest(f"the parameter {shown(name)} has no value")
        values[name] = getattr(parameter, choice)
    return values


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at``, and its end."""
    if at < len(body) and body[at] < 0x80:
        return body[at], at + 1
    value = shift = 0
    while shift < 64:
        if at >= len(body):
            raise MalformedRequest("the message ends within a number")
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise MalformedRequest(f"the message has a number of more than 64 bits at byte {at}")


def _length_prefix(field: int, size: int) -> bytes:
    prefix = bytearray([field << 3 | _LENGTH])
    while size >= 0x80:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)
