"""The three JSON forms of a tensor, both ways, and objects that are none of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from convgrad.errors import MalformedRequest
from convgrad.wire.json_tensors import Form, decode_tensor, encode_tensor
from convgrad_service.http_api.long_base64 import b64decode

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64]
FORMS: list[Form] = ["npy", "data", "values"]


@st.composite
def any_bits(draw: st.DrawFn) -> NDArray[Any]:
    """Arrays of every dtype with any bits: NaNs, infinities and subnormals among them."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype).reshape(shape)


def sent(array: NDArray[Any], form: Form) -> Any:
    return json.loads(json.dumps(encode_tensor(array, form), allow_nan=False))


@given(any_bits(), st.sampled_from(["npy", "data"]))
def test_base64_forms_keep_every_bit(array: NDArray[Any], form: Form) -> None:
    for decode in ({}, {"b64decode": b64decode}):
        read = decode_tensor(sent(array, form), name="x", **decode)
        assert read.dtype == array.dtype
        assert read.shape == array.shape
        assert read.tobytes() == array.tobytes()
        assert not read.flags.writeable


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bits", [0x7F81, 0xFF8A, 0x7FC0])
def test_every_kind_of_nan_is_a_value(bits: int) -> None:
    array = np.array(bits, np.uint16).view(ml_dtypes.bfloat16)
    assert sent(array, "values") == {"values": "NaN", "dtype": "bfloat16"}


@given(any_bits())
def test_values_keep_every_value(array: NDArray[Any]) -> None:
    read = decode_tensor(sent(array, "values"), name="x")
    assert read.dtype == array.dtype
    # Nested lists cannot tell what stands behind an empty dimension.
    if array.size:
        assert read.shape == array.shape
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wanted = array.astype(np.float64).reshape(read.shape)
    np.testing.assert_array_equal(read.astype(np.float64), wanted)


def test_values_round_to_nearest_and_name_what_json_cannot() -> None:
    tensor = {"values": [0.1, 1, "NaN", "-Infinity", "Infinity"], "dtype": "float16"}
    read = decode_tensor(tensor, name="x")
    assert read.dtype == np.float16
    assert read[:2].tolist() == [np.float16(0.1), 1.0]
    assert np.isnan(read[2])
    assert read[3:].tolist() == [-np.inf, np.inf]
    assert encode_tensor(read, "values")["values"][2:] == ["NaN", "-Infinity", "Infinity"]


def test_a_single_number_is_a_tensor_of_no_dimensions() -> None:
    assert decode_tensor({"values": 3, "dtype": "float32"}, name="x").shape == ()


def test_the_forms_name_what_they_need() -> None:
    array = np.ones((2, 1), ml_dtypes.bfloat16)
    assert encode_tensor(array, "npy").keys() == {"npy", "dtype"}
    assert encode_tensor(array.astype(np.float32), "npy").keys() == {"npy"}
    assert encode_tensor(array, "data") == {
        "data": "gD+APw==",
        "dtype": "bfloat16",
        "shape": [2, 1],
    }


def values(value: Any, dtype: str = "float32") -> dict[str, Any]:
    return {"values": value, "dtype": dtype}


def data(text: Any, shape: Any = (1,), dtype: Any = "float32") -> dict[str, Any]:
    return {"data": text, "dtype": dtype, "shape": list(shape) if shape == (1,) else shape}


ZEROS = base64.b64encode(bytes(4)).decode()
NOT_BASE64 = 'x: "data" is not base64'


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (None, "expected a tensor, an object with"),
        (5, 'an object with "npy", "data" or "values", got 5'),
        ([1, 2], "got [1, 2]"),
        ({}, "got none of them"),
        ({"stored": "a"}, "got none of them"),
        ({"npy": "", "values": []}, 'got "npy" and "values"'),
        ({"npy": "", "shape": [1]}, 'unknown key "shape"; npy takes dtype'),
        (values([1]) | {"shape": [1]}, 'unknown key "shape"; values takes dtype'),
        ({"npy": None}, 'expected base64 text in "npy", got null'),
        ({"npy": [ZEROS]}, 'expected base64 text in "npy", got ["AAAAAA=="]'),
        ({"npy": ZEROS}, "not a .npy file"),
        ({"npy": ZEROS, "dtype": "int8"}, "expected dtype to be one of float16, bfloat16, float32"),
        ({"data": ZEROS, "shape": [1]}, 'missing "dtype", which "data" needs'),
        ({"data": ZEROS, "dtype": "float32"}, 'missing "shape", which "data" needs'),
        ({"data": [[0.0]], "dtype": "float32"}, 'expected a list of numbers in "values"'),
        (data(ZEROS, dtype=["float32"]), "expected dtype to be one of float16"),
        (data(ZEROS, dtype="F32"), 'got "F32"'),
        (data(ZEROS, dtype="complex64"), 'got "complex64"'),
        (data(ZEROS, shape=5), "expected shape to be a list of at most 32 ints, got 5"),
        (data(ZEROS, shape=[True]), "expected ints >= 0 in shape, got true"),
        (data(ZEROS, shape=[-1]), "expected ints >= 0 in shape, got -1"),
        (data(ZEROS, shape=[1.0]), "expected ints >= 0 in shape, got 1.0"),
        (data(ZEROS, shape=[2]), "shape [2] of float32 takes 8 bytes, got 4"),
        (data(ZEROS, shape=[10**30]), "of float32 takes 4000000000000000000000000000000 bytes"),
        (data(ZEROS, shape=[10**300] * 9), "takes about 1e2700 bytes"),
        (data("AAAAAAA="), "takes 4 bytes, got 5"),
        (data(ZEROS + "\n"), NOT_BASE64),
        (data("AAAAAA="), NOT_BASE64),
        (data("AAAAAA"), NOT_BASE64),
        (data("AAAAAA==AAAA"), NOT_BASE64),
        (data("AAAA-_=="), NOT_BASE64),
        (data("AA AAAA=="), NOT_BASE64),
        (data("AAAAé==="), NOT_BASE64),
        (data("\ud800AAA"), NOT_BASE64),
        (data("="), NOT_BASE64),
        (data("A"), NOT_BASE64),
        ({"values": [1]}, 'missing "dtype", which "values" needs'),
        (values([1], "bool"), "expected dtype to be"),
        (values([[1], [1, 2]]), "values are ragged, lists of different lengths at depth 2"),
        (values([[1], 2]), "values are ragged, lists of different lengths at depth 2"),
        (values([True]), "expected numbers in values, got true"),
        (values([None]), "expected numbers in values, got null"),
        (values({}), "expected numbers in values, got an object"),
        (values([{}]), "expected numbers in values, got an object"),
        (values("NaN, you know"), '"Infinity" or "-Infinity" in values, got "NaN, you know"'),
        (values(["nan"]), 'in values, got "nan"'),
        (values([float("inf")]), 'an infinity is written as the string "Infinity"'),
        (values([float("nan")]), "nan does not fit float32"),
        (values([65520], "float16"), "65520 does not fit float16"),
        (values([1e39]), "1e+39 does not fit float32"),
        (values([10**400]), "values hold an int too large for float32"),
        (values([2**31], "int32"), "2147483648 does not fit int32"),
        (values([2**63], "int64"), "9223372036854775808 does not fit int64"),
        (values([-(10**99)], "int64"), "an int of 329 bits does not fit int64"),
        (values([1.0], "int64"), "expected ints in values of int64, got 1.0"),
        (values([True], "int32"), "expected ints in values of int32, got true"),
        (values(["NaN"], "int32"), 'expected ints in values of int32, got "NaN"'),
    ],
)
def test_what_is_no_tensor_is_refused_the_same_by_client_and_server(
    tensor: Any, sentence: str
) -> None:
    sentences = set()
    for decode in ({}, {"b64decode": b64decode}):
        with pytest.raises(MalformedRequest) as refused:
            decode_tensor(tensor, name="x", **decode)
        sentences.add(refused.value.detail)
    assert len(sentences) == 1
    assert sentence in sentences.pop()


def test_deep_nesting_is_refused_whatever_the_stack() -> None:
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(MalformedRequest, match="nested more than 32 lists deep"):
        decode_tensor(values(nested), name="x")


@given(st.text(alphabet="AB+/=\n é", max_size=12))
def test_client_and_server_agree_on_what_base64_is(text: str) -> None:
    outcomes: set[bytes | str] = set()
    for decode in ({}, {"b64decode": b64decode}):
        try:
            array = decode_tensor(data(text, shape=[0], dtype="float32"), name="x", **decode)
            outcomes.add(array.tobytes())
        except MalformedRequest as refused:
            outcomes.add(refused.detail)
    assert len(outcomes) == 1
