"""Serialized inference messages, held against protobuf's own reading and writing of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import convgrad_service.grpc_api
from convgrad.contract import Report
from convgrad.errors import MalformedRequest, NotFound
from convgrad_service.engine.shm.registry import RegionPart
from convgrad_service.grpc_api.wire import (
    cut_infer_request,
    encode_head,
    encode_stream_error,
    encode_tensors,
    in_stream_response,
    message,
    read_infer_request,
    response_id,
)
from convgrad_service.oip.request import InferRequest, Span

Request = message("ModelInferRequest")
REPORT = Report(backend="cpu", kernel="k", flops=2**70, bytes=9, compute_s=0.5)
DTYPES: dict[str, Any] = {
    "FP16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT32": np.int32,
    "INT64": np.int64,
}


def test_the_compiled_protocol_is_that_of_its_source(tmp_path: Path) -> None:
    folder = Path(str(convgrad_service.grpc_api.__file__)).parent
    compiled = tmp_path / "open_inference.binpb"
    subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", f"-I{folder}"),
            f"--descriptor_set_out={compiled}",
            str(folder / "open_inference.proto"),
        ],
        check=True,
    )
    assert compiled.read_bytes() == (folder / "open_inference.binpb").read_bytes()


def test_names_and_numbers_are_tritons() -> None:
    """Whatever field ours have, theirs have under the same number, name and type."""
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2").DESCRIPTOR
    configs = pytest.importorskip("tritonclient.grpc.model_config_pb2").DESCRIPTOR
    from convgrad_service.grpc_api.wire import SERVICE

    def same(ours: Any, other: Any) -> int:
        compared = 0
        for field in ours.fields:
            found = other.fields_by_name[field.name]
            assert (field.number, field.type) == (found.number, found.type), field.full_name
            assert field.is_repeated == found.is_repeated, field.full_name
            compared += 1
            if field.message_type is not None:
                compared += same(field.message_type, found.message_type)
        return compared

    service = theirs.services_by_name["GRPCInferenceService"]
    compared = 0
    for method in SERVICE.methods:
        found = service.methods_by_name[method.name]
        assert (method.client_streaming, method.server_streaming) == (
            found.client_streaming,
            found.server_streaming,
        )
        compared += same(method.input_type, found.input_type)
        compared += same(method.output_type, found.output_type)
    assert compared > 100
    types = configs.enum_types_by_name["DataType"].values_by_name
    for value in SERVICE.file.enum_types_by_name["DataType"].values:
        assert types[value.name].number == value.number


def read_request(body: bytes) -> InferRequest:
    return read_infer_request(cut_infer_request(body))


def bytes_at(body: bytes, span: object) -> bytes:
    assert isinstance(span, Span)
    return body[span.start : span.start + span.size_bytes]


def request(*arrays: NDArray[Any], datatype: str = "FP32", raw: bool = True, **fields: Any) -> Any:
    made = Request(model_name="conv_bwd_data", **fields)
    for name, array in zip(("grad_output", "weight"), arrays, strict=False):
        made.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if raw:
            made.raw_input_contents.append(array.tobytes())
    return made


@pytest.mark.parametrize("datatype", DTYPES)
def test_raw_contents_are_spans_of_the_message(datatype: str) -> None:
    arrays = [np.arange(6).reshape(1, 1, 2, 3).astype(DTYPES[datatype]) + i for i in range(2)]
    made = request(*arrays, datatype=datatype, id="a" * 3)
    body = made.SerializeToString()
    read = read_request(body)
    assert (read.operation.name, read.outputs) == ("conv_bwd_data", ())
    assert cut_infer_request(body)[:2] == ("conv_bwd_data", "aaa")
    for tensor, array in zip(read.inputs, arrays, strict=True):
        assert (tensor.dtype.numpy, tensor.shape) == (array.dtype, array.shape)
        assert bytes_at(body, tensor.source) == array.tobytes()


@pytest.mark.parametrize(
    ("datatype", "contents"),
    [
        ("FP32", "fp32_contents"),
        ("FP64", "fp64_contents"),
        ("INT32", "int_contents"),
        ("INT64", "int64_contents"),
    ],
)
def test_typed_contents(datatype: str, contents: str) -> None:
    array = (np.arange(4).reshape(1, 1, 2, 2) - 2).astype(DTYPES[datatype])
    made = request(array, datatype=datatype, raw=False)
    getattr(made.inputs[0].contents, contents).extend(array.reshape(-1).tolist())
    found = read_request(made.SerializeToString()).inputs[0].source
    np.testing.assert_array_equal(found, array)


def test_parameters_of_other_servers_clients_have_no_effect() -> None:
    """KServe's client sends those of the binary data extension, MLServer's a content type."""
    made = request(np.zeros((1, 1, 2, 2), np.float32))
    made.outputs.add(name="grad_input")
    plain = read_request(made.SerializeToString())
    made.parameters["content_type"].string_param = "np"
    for tensor in (made.inputs[0], made.outputs[0]):
        tensor.parameters["content_type"].string_param = "np"
    made.inputs[0].parameters["binary_data_size"].int64_param = 16
    made.outputs[0].parameters["binary_data"].bool_param = True
    read = read_request(made.SerializeToString())
    assert (read.parameters, read.outputs) == (plain.parameters, plain.outputs)
    assert read.inputs[0].shape == plain.inputs[0].shape


def test_parameters_of_every_kind() -> None:
    made = request(np.zeros((1, 1, 2, 2), np.float32))
    made.parameters["alpha"].double_param = 0.5
    made.parameters["groups"].int64_param = 2
    made.parameters["stride"].string_param = "[2, 2]"
    made.parameters["deterministic"].bool_param = True
    made.parameters["dilation"].uint64_param = 3
    made.parameters["timeout"].int64_param = 1500
    made.parameters["triton_enable_empty_final_response"].bool_param = True
    made.outputs.add(name="grad_input").parameters["shared_memory_region"].string_param = "r"
    made.outputs[0].parameters["shared_memory_byte_size"].int64_param = 16
    read = read_request(made.SerializeToString())
    assert read.parameters == {
        "alpha": 0.5,
        "groups": 2,
        "stride": "[2, 2]",
        "deterministic": True,
        "dilation": 3,
    }
    assert read.timeout_s == 0.0015
    assert read.outputs[0].region == RegionPart("", "r", 0, 16)


def spoilt(change: Any, raw: bool = True) -> bytes:
    made = request(np.zeros((1, 1, 2, 2), np.float32), raw=raw)
    change(made)
    spoiled: bytes = made.SerializeToString()
    return spoiled


REFUSED = {
    "no data": (lambda m: m.ClearField("raw_input_contents"), "no data"),
    "too many raw": (lambda m: m.raw_input_contents.append(b""), "1 more than there are inputs"),
    "too few bytes": (lambda m: m.raw_input_contents.__setitem__(0, b"123"), "takes 16 bytes"),
    "unknown input": (lambda m: setattr(m.inputs[0], "name", "x"), "has no input"),
    "unknown output": (lambda m: m.outputs.add(name="x"), "has no output"),
    "unknown datatype": (lambda m: setattr(m.inputs[0], "datatype", "BOOL"), "expected datatype"),
    "negative shape": (lambda m: m.inputs[0].shape.append(-1), "expected ints >= 0"),
    "both contents": (
        lambda m: m.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4]),
        "must not be used together with raw_input_contents",
    ),
    "valueless parameter": (lambda m: m.parameters.get_or_create("alpha"), "has no value"),
    "timeout": (
        lambda m: setattr(m.parameters["timeout"], "string_param", "1"),
        "timeout: expected an int",
    ),
    "reserved": (
        lambda m: setattr(m.parameters["triton_x"], "bool_param", True),
        "reserved",
    ),
    "classification": (
        lambda m: setattr(
            m.outputs.add(name="grad_input").parameters["classification"], "int64_param", 2
        ),
        "no classification",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    change, sentence = REFUSED[name]
    with pytest.raises(MalformedRequest, match=sentence):
        read_request(spoilt(change))


def test_contents_of_the_wrong_kind() -> None:
    def ints(made: Any) -> None:
        made.inputs[0].contents.int_contents.extend([1, 2, 3, 4])

    def three(made: Any) -> None:
        made.inputs[0].contents.fp32_contents.extend([1, 2, 3])

    def half(made: Any) -> None:
        made.inputs[0].datatype = "FP16"
        made.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])

    for change, sentence in (
        (ints, "expected fp32_contents alone for FP32, got int_contents"),
        (three, "holds 3 elements"),
        (half, "FP16 cannot be sent in contents"),
    ):
        with pytest.raises(MalformedRequest, match=sentence):
            read_request(spoilt(change, raw=False))


def test_unknown_models() -> None:
    with pytest.raises(NotFound):
        read_request(Request(model_name="resnet").SerializeToString())
    with pytest.raises(NotFound):
        read_request(spoilt(lambda m: setattr(m, "model_version", "7")))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"\x0a", "ends within a number"),
        (b"\x0a\x05abc", "ends within a field: 3 of 5 bytes"),
        (b"\x3a\xff\xff\xff\xff\x0f", "ends within a field"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\xff" * 11, "more than 64 bits"),
        (b"\x0a\x02\xff\xfe", "not a ModelInferRequest"),
        (b"\x08\x01" * 5000, "more than 4096 fields"),
    ],
)
def test_bytes_that_are_no_message(body: bytes, sentence: str) -> None:
    with pytest.raises(MalformedRequest, match=sentence):
        read_request(body)


def test_what_protobuf_would_parse_is_bounded() -> None:
    made = request(np.zeros((1, 1, 2, 2), np.float32), raw=False)
    made.inputs[0].contents.bytes_contents.append(bytes(17 * 2**20))
    with pytest.raises(MalformedRequest, match="besides its raw_input_contents"):
        read_request(made.SerializeToString())


@given(st.lists(st.binary(max_size=40), max_size=4), st.text(max_size=20), st.binary(max_size=30))
def test_cutting_loses_nothing(raw: list[bytes], name: str, tail: bytes) -> None:
    made = Request(model_name=name, raw_input_contents=raw, id=name)
    body = made.SerializeToString()
    model, request_id, rest, spans = cut_infer_request(body)
    assert (model, request_id) == (name, name)
    assert [body[span.start : span.start + span.size_bytes] for span in spans] == raw
    made.ClearField("raw_input_contents")
    made.ClearField("id")
    assert Request.FromString(rest) == made
    try:
        cut_infer_request(body + tail)
        read_request(tail)
    except (MalformedRequest, NotFound):
        pass


def test_fields_in_any_order() -> None:
    """A message may hold its tensors first, and between its other fields."""
    array = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    made = request(array, array + 4)
    raw = list(made.raw_input_contents)
    made.ClearField("raw_input_contents")
    parts = [Request(raw_input_contents=[data]).SerializeToString() for data in raw]
    body = parts[0] + made.SerializeToString() + parts[1]
    read = read_request(body)
    tensor = read.inputs[1]
    assert bytes_at(body, tensor.source) == (array + 4).tobytes()


def test_answers_are_what_protobuf_reads() -> None:
    outputs = {
        "grad_input": np.arange(6).reshape(1, 2, 3).astype(ml_dtypes.bfloat16),
        "grad_bias": np.arange(300, dtype=np.int64)[::2],
    }
    made = Request(model_name="conv_backward", id="7")
    made.outputs.add(name="grad_bias")
    made.outputs.add(name="grad_input")
    read = read_request(made.SerializeToString())
    sends = dict.fromkeys(read.answer_names(outputs), True)
    answer = message("ModelInferResponse").FromString(
        b"".join(
            [
                encode_head(read, outputs, REPORT),
                response_id("7"),
                *encode_tensors(sends, outputs),
            ]
        )
    )
    assert (answer.model_name, answer.model_version, answer.id) == ("conv_backward", "1", "7")
    assert [output.name for output in answer.outputs] == ["grad_bias", "grad_input"]
    assert [output.datatype for output in answer.outputs] == ["INT64", "BF16"]
    assert list(answer.outputs[1].shape) == [1, 2, 3]
    assert answer.raw_output_contents[0] == outputs["grad_bias"].tobytes()
    assert answer.raw_output_contents[1] == outputs["grad_input"].tobytes()
    assert answer.parameters["kernel"].string_param == "k"
    assert answer.parameters["bytes"].int64_param == 9
    assert answer.parameters["flops"].double_param == 2**70

    streamed = message("ModelStreamInferResponse").FromString(
        b"".join(
            in_stream_response(
                [
                    encode_head(read, outputs, REPORT, in_stream=True),
                    response_id("7"),
                    *encode_tensors(sends, outputs),
                ]
            )
        )
    )
    assert streamed.infer_response.parameters["triton_final_response"].bool_param
    del streamed.infer_response.parameters["triton_final_response"]
    assert streamed.infer_response == answer
    assert not streamed.error_message


def test_errors_in_a_stream_name_their_request() -> None:
    body = request(np.zeros((1, 1, 2, 2), np.float32), id="9").SerializeToString()
    cut = cut_infer_request(body)
    answer = message("ModelStreamInferResponse").FromString(
        encode_stream_error(cut.model, cut.id, "no")
    )
    assert answer.error_message == "no"
    assert answer.infer_response.id == "9"
