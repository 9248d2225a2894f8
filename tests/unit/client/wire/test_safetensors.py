"""The safetensors codec against the reference one, both ways, and files that lie."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from safetensors import deserialize
from safetensors.numpy import save

from convgrad.contract import OPERATIONS
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import safetensors

DTYPES = [np.float16, np.float32, np.float64, np.int32, np.int64]
names = st.text(min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__" and name.isprintable()
)
tensors = st.dictionaries(
    names,
    hnp.arrays(
        st.sampled_from([*DTYPES, ml_dtypes.bfloat16]),
        hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4),
        elements=st.integers(-100, 100),
    ),
    max_size=4,
)


def joined(chunks: list[bytes | memoryview]) -> bytes:
    whole = b"".join(chunks)
    assert len(whole) == safetensors.total_bytes(chunks)
    return whole


def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(
    dtype: Any = "F32", shape: Any = (2,), data_offsets: Any = (0, 8), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets, **more}


def assert_same(read: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert read[name].tobytes() == array.tobytes()


@given(tensors, st.dictionaries(names, st.text(max_size=9), max_size=3))
def test_round_trip(given_tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    read, read_metadata = safetensors.decode(joined(safetensors.encode(given_tensors, metadata)))
    assert_same(read, given_tensors)
    assert read_metadata == metadata


@given(tensors)
def test_the_reference_reads_our_files(given_tensors: dict[str, Any]) -> None:
    # Not `safetensors.numpy.load`, which knows no bfloat16.
    entries = dict(deserialize(joined(safetensors.encode(given_tensors))))  # type: ignore[no-untyped-call]
    assert entries.keys() == given_tensors.keys()
    for name, array in given_tensors.items():
        dtype = DType.of(array.dtype)
        assert dtype is not None
        assert entries[name]["dtype"] == dtype.safetensors
        assert tuple(entries[name]["shape"]) == array.shape
        assert bytes(entries[name]["data"]) == array.tobytes()


@given(tensors, st.dictionaries(names, st.text(max_size=9), min_size=1, max_size=3))
def test_files_of_the_reference_are_read(
    given_tensors: dict[str, Any], metadata: dict[str, str]
) -> None:
    read, read_metadata = safetensors.decode(save(given_tensors, metadata))
    assert_same(read, given_tensors)
    assert read_metadata == metadata


def test_nothing_is_copied_and_everything_is_aligned() -> None:
    arrays: dict[str, NDArray[Any]] = {
        "half": np.ones(3, np.float16),
        "double": np.ones((2, 3)),
        "indices": np.ones((1, 5), np.int32),
    }
    chunks = safetensors.encode(arrays)
    assert all(
        any(np.shares_memory(np.frombuffer(chunk, np.uint8), array) for chunk in chunks[1:])
        for array in arrays.values()
    )
    body = bytearray(joined(chunks))
    read, _ = safetensors.decode(body)
    for array in read.values():
        assert np.shares_memory(array, np.frombuffer(body, np.uint8))
        assert array.flags.aligned
        assert not array.flags.writeable


def test_unaligned_data_is_copied_to_where_it_is_aligned() -> None:
    text = b'{"x":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}'
    text += b" " * (-(len(text) + 3) % 8)
    read, _ = safetensors.decode(file(text, np.array([1.0, 2.0]).tobytes()))
    assert read["x"].flags.aligned
    assert read["x"].tolist() == [1.0, 2.0]


def test_the_header_is_known_before_the_data() -> None:
    arrays: dict[str, NDArray[Any]] = {"a": np.ones((2, 1), np.float32), "b": np.ones(3)}
    specs = {"a": (DType.FLOAT32, (2, 1)), "b": (DType.FLOAT64, (3,))}
    header, order = safetensors.encode_header(specs, {"report": "{}"})
    assert header == safetensors.encode(arrays, {"report": "{}"})[0]
    assert order == ["b", "a"]


def test_strided_arrays_are_sent_row_major() -> None:
    array = np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)
    read, _ = safetensors.decode(joined(safetensors.encode({"x": array})))
    assert np.array_equal(read["x"], array)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "has 0 bytes, too few for its header's length"),
        (b"\x05\0\0\0\0\0\0", "has 7 bytes, too few"),
        (b"\xff" * 8, "header claims 18446744073709551615 bytes; at most 1048576 are read"),
        (file({"x": entry()}, length=500), "header claims 500 bytes, but only"),
        (file(b"[]"), "does not begin with {"),
        (file(b' {"a":1}'), "does not begin with {"),
        (file(b'{"a":'), "the safetensors header is not JSON"),
        (file(b'{"a\xff":1}'), "is not UTF-8"),
        (file(b'{"a":' * 100_000), "is nested too deep"),
        (file(b'{"a":NaN}'), "NaN is not valid JSON"),
        (file(b'{"a":1' + b"0" * 5000 + b"}"), "an int of thousands of digits"),
        (file(b'{"x":1,"x":2}'), 'the key "x" is repeated'),
        (file({"x": 5}), '"x": expected an object of dtype, shape and data_offsets'),
        (file({"x": {"dtype": "F32"}}), '"x": expected an object of dtype, shape and data_offsets'),
        (file({"x": entry(extra=1)}), '"x": expected an object of dtype, shape and data_offsets'),
        (
            file({"x": entry(dtype="I8")}, b"x" * 8),
            '"x": expected dtype to be one of F16, BF16, F32, F64, I32',
        ),
        (file({"x": entry(dtype="BOOL")}, b"x" * 8), '"x": expected dtype to be one of F16'),
        (file({"x": entry(dtype=["F32"])}, b"x" * 8), '"x": expected dtype to be one of F16'),
        (file({"x": entry(shape=[3])}, b"x" * 8), "takes 12 bytes, got 8"),
        (file({"x": entry(shape=[10**30])}, b"x" * 8), "takes 4000000000000"),
        (file({"x": entry(shape=[-2])}, b"x" * 8), "expected ints >= 0 in shape, got -2"),
        (file({"x": entry(shape=[True, 2])}, b"x" * 8), "expected ints >= 0 in shape, got true"),
        (file({"x": entry(shape=[2.0])}, b"x" * 8), "expected ints >= 0 in shape, got 2.0"),
        (file({"x": entry(shape="2")}, b"x" * 8), 'a list of at most 32 ints, got "2"'),
        (file({"x": entry(shape=[1] * 99)}, b"x" * 8), "a list of at most 32 ints"),
        (file({"x": entry(data_offsets=[8, 0])}, b"x" * 8), "expected data_offsets [begin, end]"),
        (file({"x": entry(data_offsets=[0])}, b"x" * 8), "expected data_offsets [begin, end]"),
        (file({"x": entry(data_offsets=[0, "8"])}, b"x" * 8), "expected data_offsets [begin"),
        (file({"x": entry(data_offsets=[-8, 0])}, b"x" * 8), "expected data_offsets [begin"),
        (file({"x": entry()}, b"x" * 7), "describes 8 bytes of data, but 7 follow"),
        (file({"x": entry()}, b"x" * 9), "describes 8 bytes of data, but 9 follow"),
        (file({"x": entry(data_offsets=[4, 12])}, b"x" * 12), "begins at byte 4, but the data bef"),
        (
            file({"x": entry(), "y": entry(data_offsets=[4, 12])}, b"x" * 12),
            '"y": its data begins at byte 4, but the data before it ends at 8',
        ),
        (
            file({"x": entry(), "y": entry(data_offsets=[12, 20])}, b"x" * 20),
            '"y": its data begins at byte 12, but the data before it ends at 8',
        ),
        (file({"x": entry(data_offsets=[0, 10**40])}, b"x" * 8), "describes about 1e40 bytes of"),
        (file({"__metadata__": 5}), "__metadata__: expected an object, got 5"),
        (file({"__metadata__": {"a": 5}}), '__metadata__: expected text under "a", got 5'),
        (file({"__metadata__": {"a": {}}}), '__metadata__: expected text under "a", got an obj'),
        (file({"x": entry(shape=[0, 2**62], data_offsets=[0, 0])}), "is too large"),
    ],
)
def test_files_that_lie_are_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        safetensors.decode(body)
    assert sentence in refused.value.detail
    assert len(refused.value.detail) < 300


@pytest.mark.parametrize("cut", range(1, 90, 4))
def test_a_truncated_file_is_refused(cut: int) -> None:
    body = joined(safetensors.encode({"x": np.ones(2), "y": np.ones(3, np.float32)}))
    with pytest.raises(MalformedRequest):
        safetensors.decode(body[:-cut])


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_refused_cleanly(rubbish: bytes, length: int) -> None:
    for body in (rubbish, file(b"{" + rubbish, length=length)):
        try:
            outcome = str(safetensors.decode(body)[0])
        except MalformedRequest as refused:
            outcome = refused.detail
        assert outcome == "{}" or "safetensors" in outcome or "expected" in outcome
        assert len(outcome) < 300


def test_parameters_ride_in_the_metadata() -> None:
    assert safetensors.parameters({"parameters": '{"stride": [2, 1]}'}) == {"stride": [2, 1]}
    assert safetensors.parameters({}) == {}
    assert safetensors.parameters({"format": "pt", "epoch": "3"}) == {}


def test_parameters_under_a_misspelt_name_are_refused() -> None:
    for name in ("paramters", "parameter", "Parameters", "PARAMS"):
        with pytest.raises(MalformedRequest, match='did you mean "parameters"'):
            safetensors.parameters({name: '{"stride": 2}'})
        with pytest.raises(MalformedRequest, match='did you mean "parameters"'):
            safetensors.parameters({"parameters": "{}", name: '{"stride": 2}'})


def test_parameters_beside_their_object_are_refused() -> None:
    fields = OPERATIONS["conv_bwd_data"].request.model_fields
    for name, meant in (("stride", "stride"), ("Padding", "padding"), ("strides", "stride")):
        with pytest.raises(MalformedRequest, match=f'such as "{meant}" are keys of the JSON'):
            safetensors.parameters({name: "2"}, fields)
    assert safetensors.parameters({"format": "pt", "epoch": "3", "total_size": "9"}, fields) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "parameters: expected a JSON object, got []"),
        ("{", "parameters is not JSON"),
        ('{"a":1,"a":1}', 'parameters: the key "a" is repeated'),
        ('{"a":-Infinity}', "parameters: -Infinity is not valid JSON"),
        ('{"a":' * 100_000, "parameters is nested too deep"),
    ],
)
def test_parameters_that_are_no_object_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        safetensors.parameters({"parameters": text})
    assert sentence in refused.value.detail


def test_arrays_of_other_types_are_not_written() -> None:
    with pytest.raises(TypeError, match="int8 is none of float16"):
        safetensors.encode({"x": np.ones(2, np.int8)})
