"""The server's JSON decoder: the same answer as a plain parser's, and hostile bodies refused."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convgrad.contract import OPERATIONS, Report, validate
from convgrad.errors import MalformedRequest, ProblemTooLarge
from convgrad.wire.json_tensors import Form, decode_tensor, encode_tensor
from convgrad_service import long_json
from convgrad_service.http_api.codecs import refuse_endless_values
from convgrad_service.long_json import LongValues
from tests.support.json_bodies import decode_json_request, encode_json_answer

CONV = OPERATIONS["conv_bwd_data"]
REPORT = Report(backend="cpu", kernel="k", flops=1, bytes=2, compute_s=0.5)
LONG = b"A" * 100_000


def refusal(body: bytes) -> str:
    with pytest.raises(MalformedRequest) as refused:
        decode_json_request(body, CONV)
    assert len(refused.value.detail) < 500
    return refused.value.detail


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("form", ["npy", "data", "values"])
@pytest.mark.parametrize("extent", [2, 90])
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_a_body_becomes_arrays_and_parameters(
    dtype: str, form: Form, extent: int, buffer: Any
) -> None:
    array = np.arange(3 * extent * extent).reshape(1, 3, extent, extent)
    array = (array % 97).astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
    tensor = encode_tensor(array, form)
    body = {"grad_output": tensor, "stride": [2, 1], "weight": tensor, "accumulate": None}
    fields = decode_json_request(buffer(json.dumps(body).encode()), CONV)
    assert fields["stride"] == [2, 1]
    for name in ("grad_output", "weight"):
        assert fields[name].dtype == array.dtype
        assert np.array_equal(fields[name], array)
        assert fields[name].flags.aligned
    request = validate(CONV.request, fields)
    assert request.tensors().keys() == {"grad_output", "weight"}


@pytest.mark.parametrize("extent", [2, 90])
def test_a_byte_order_mark_is_ignored(extent: int) -> None:
    tensor = encode_tensor(np.ones((1, 3, extent, extent), np.float32), "data")
    body = json.dumps({"grad_output": tensor, "weight": tensor}).encode("utf-8-sig")
    assert decode_json_request(body, CONV)["weight"].shape == (1, 3, extent, extent)
    assert "the body is not UTF-8" in refusal(body.decode("utf-8-sig").encode("utf-16"))


@pytest.mark.parametrize("form", ["npy", "data", "values"])
def test_a_response_of_null_has_the_form_of_the_first_tensor(form: Form) -> None:
    tensor = encode_tensor(np.ones((1, 1, 1, 1), np.float32), form)
    body = {"grad_output": tensor, "weight": tensor, "response": None}
    assert decode_json_request(json.dumps(body).encode(), CONV)["response"] == form


def test_null_is_a_choice_that_is_not_set() -> None:
    tensor = encode_tensor(np.ones((1, 1, 1, 1), np.float32), "data")
    body = {
        "grad_output": tensor,
        "weight": tensor,
        "stride": None,
        "padding": None,
        "groups": None,
    }
    fields = decode_json_request(json.dumps(body).encode(), CONV)
    assert fields.keys() & body.keys() == {"grad_output", "weight", "groups"}
    fused = {"input": tensor, "weight0": tensor, "weight1": tensor, "conv0": {"stride": None}}
    operation = OPERATIONS["grouped_conv_conv_fwd"]
    assert decode_json_request(json.dumps(fused).encode(), operation)["conv0"] == {}


def test_no_array_refers_to_the_body() -> None:
    tensor = encode_tensor(np.ones((1, 1, 99, 99)), "npy")
    body = bytearray(json.dumps({"grad_output": tensor, "weight": tensor}).encode())
    fields = decode_json_request(body, CONV)
    body.clear()  # would raise BufferError if anything still looked into it
    assert fields["weight"].sum() == 99 * 99


@pytest.mark.parametrize("extent", [4, 64])
@pytest.mark.parametrize("slash", ["\\/", "\\u002f", "\\u002F"])
def test_escapes_in_base64_are_read(extent: int, slash: str) -> None:
    array = np.full((1, 1, extent, extent), -1, np.int64).view(np.float64)
    tensor = encode_tensor(array, "data")
    body = json.dumps({"grad_output": tensor, "weight": tensor}).replace("/", slash)
    assert slash in body
    fields = decode_json_request(body.encode(), CONV)
    assert fields["weight"].tobytes() == array.tobytes()


json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["npy", "data", 'a"', "\\", "b\\\\"]), inner)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5), json_texts), st.booleans())
def test_cutting_strings_out_changes_nothing(body: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json, "_FIRST_WINDOW_BYTES", 1)
        patch.setattr(long_json, "_LAST_WINDOW_BYTES", 4)
        values = LongValues(("npy", "data"), '""', 5, lambda value: value, "")
        try:
            read = _with_text(values.parse_object(memoryview(text), "it"))
        except MalformedRequest as refused:
            read = refused.detail
    assert read == body or "is not UTF-8" in read


def _with_text(value: Any) -> Any:
    if isinstance(value, memoryview):
        return json.loads(b'"' + bytes(value) + b'"')
    if isinstance(value, dict):
        return {key: _with_text(item) for key, item in value.items()}
    return [_with_text(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is empty; expected JSON"),
        (b"null", "the body: expected a JSON object, got null"),
        (b"[1]", "the body: expected a JSON object, got [1]"),
        (b'"' + LONG + b'"', "the body: expected a JSON object, got"),
        (b'"' + LONG, "not JSON: Unterminated string starting at (at 0)"),
        (b'{"weight":{"npy":"' + LONG, "not JSON: Unterminated string starting at (at 17)"),
        (b'{"stride":1} x', "Extra data (at 13)"),
        (b'{"stride":1,}', "the body is not JSON"),
        (b"\xff\xfe{\x00}\x00", "the body is not UTF-8: byte 0"),
        (b'{"\xff":1}', "the body is not UTF-8: byte 2 cannot be decoded"),
        (b'{"stride":1,"stride":2}', 'the key "stride" is repeated'),
        (b'{"weight":{"npy":"","npy":""}}', 'the key "npy" is repeated'),
        (
            b'{"weight":{"npy":"' + LONG + b'","npy":"' + LONG + b'"}}',
            'the key "npy" is repeated',
        ),
        (b'{"alpha":NaN}', "NaN is not valid JSON"),
        (b'{"alpha":-Infinity}', "-Infinity is not valid JSON"),
        (b'{"stride":1' + b"0" * 5000 + b"}", "an int of thousands of digits"),
        (b'{"strid":1}', 'unknown field "strid", did you mean "stride"?'),
        (b'{"weight":null}', "weight: expected a tensor"),
        (b'{"weight":{"store":"a"}}', "weight: expected a tensor to have one of"),
        (b'{"weight":{"stored":1}}', 'weight: expected "stored" to be the name of a tensor'),
        (b'{"weight":{"npy":"' + LONG + b'!"}}', 'weight: "npy" is not base64'),
        (b'{"weight":{"npy":"' + LONG + b'\\u00e9"}}', 'weight: "npy" is not base64'),
        (b'{"weight":{"npy":"' + LONG + b'\\q"}}', 'weight: "npy" is not base64'),
        (b'{"weight":{"npy":"' + LONG + b'\xff"}}', 'weight: "npy" is not base64'),
        (b'{"weight":{"npy":"' + LONG + b'\n"}}', 'weight: "npy" is not base64'),
        (b'{"weight":{"npy":"' + LONG + b'"}}', "weight: not a .npy file"),
        (b'{"weight":{"npy":"' + LONG + b'"},1}', "not JSON: Expecting property name"),
        (b'{"' + LONG + b'":1}', "unknown field"),
        (b'{"weight":{"' + LONG + b'":1}}', "weight: expected a tensor to have one of"),
        (b'{"weight":"' + LONG + b'"}', "weight: expected a tensor, an object with"),
        (b'{"npy":"' + LONG + b'"}', 'unknown field "npy"'),
        (b'{"weight":{"npy":["' + LONG + b'"]}}', 'weight: expected base64 text in "npy"'),
        (b'{"weight":{"npy":"' + b'\\"' * 50_000 + b'"}}', 'weight: "npy" is not base64'),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, sentence: str) -> None:
    assert sentence in refusal(body)


def test_the_position_of_an_error_counts_the_whole_body() -> None:
    # Not a trailing comma: of that each Python says another thing, at another place.
    body = b'{"weight":{"npy":"' + LONG + b'"},1}'
    assert f"(at {len(body) - 2})" in refusal(body)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"weight":{"values":' + b"[" * 100_000, "nested too deep"),
        (b'{"weight":"' + b'\\"' * 20_000_000 + b'"}', "besides long values"),
        (b'{"weight":{"npy":"' + b'\\"' * 20_000_000 + b'"}}', "besides long values"),
        (b'{"weight":"' + b"\\" * 40_000_000 + b'"}', "besides long values"),
        (b"[" + b'"",' * 10_000_000, "besides long values"),
        (b'{"npy":"",' * 4_000_000, "besides long values"),
        (b'{"data":' + b'"npy":"' * 200_000 + b'"' * 20_000_000, "besides long values"),
        (b'["' + (b"\\" * 900 + b'",') * 40_000, "besides long values"),
        (b'{"weight":{"values":[' + b"1," * 20_000_000, "besides long values"),
        (b" " * 40_000_000, "besides long values"),
        (b"{" + b"".join(b'"%d":0,' % i for i in range(90_000)) + b'"a":0}', 'unknown field "0"'),
    ],
    ids=range(13),
)
def test_hostile_bodies_cost_little_time_and_memory(body: bytes, sentence: str) -> None:
    tracemalloc.start()
    started_s = time.perf_counter()
    try:
        assert sentence in refusal(body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started_s < 60
    assert peak_bytes < 128 * 2**20


@pytest.mark.parametrize("form", ["npy", "data", "values"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_answer_is_what_the_client_reads(form: Form, dtype: str) -> None:
    array = np.arange(2000).reshape(2, 10, 100)
    array = (array % 97).astype(getattr(ml_dtypes, dtype, None) or np.dtype(dtype))
    indices = np.arange(6).reshape(2, 3)
    outputs = {"output": array.transpose(1, 0, 2), "indices": indices}
    answer = json.loads(b"".join(encode_json_answer(outputs, REPORT, form)))
    assert list(answer) == ["output", "indices", "report"]
    assert Report.model_validate(answer["report"]) == REPORT
    for name, expected in outputs.items():
        assert answer[name] == json.loads(json.dumps(encode_tensor(expected, form)))
        assert np.array_equal(decode_tensor(answer[name], name=name), expected)


@given(st.lists(st.integers(0, 5), max_size=5), st.integers(1, 9))
def test_values_are_written_in_blocks_as_in_one(shape: list[int], at_once: int) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json, "NUMBERS_AT_ONCE", at_once)
        answer = json.loads(b"".join(encode_json_answer({"output": array}, REPORT, "values")))
    assert answer["output"] == {"values": array.tolist(), "dtype": "float32"}


def test_values_of_millions_of_elements_are_refused() -> None:
    with pytest.raises(ProblemTooLarge, match='1,049,600; ask for "npy" or "data"'):
        refuse_endless_values(1025 * 1024, "values")
    refuse_endless_values(1025 * 1024, "npy")
