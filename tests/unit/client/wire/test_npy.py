"""The npy codec: NumPy's own files both ways, and files that lie."""

from __future__ import annotations

import io
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import npy

arrays = hnp.arrays(
    st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.int64]),
    hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=5),
)


def saved(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_header(text: str, data: bytes = b"", version: int = 1) -> bytes:
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode("latin-1") + data


@given(arrays)
def test_files_of_numpy_are_read(array: NDArray[Any]) -> None:
    read = npy.decode(saved(array), name="x")
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()
    assert not read.flags.writeable


@given(arrays)
def test_numpy_reads_our_files(array: NDArray[Any]) -> None:
    read = np.load(io.BytesIO(b"".join(npy.encode(array))), allow_pickle=False)
    assert read.dtype == array.dtype
    assert read.shape == array.shape
    assert read.tobytes() == array.tobytes()


@given(arrays)
def test_the_header_joins_in_base64(array: NDArray[Any]) -> None:
    header, data = npy.encode(array)
    assert len(header) % 3 == 0
    assert len(header) % 64 == 0
    assert memoryview(data).nbytes == array.nbytes


def test_contiguous_data_is_not_copied() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    _, data = npy.encode(array)
    assert np.shares_memory(np.frombuffer(data, np.float64), array)
    file = bytearray(saved(array))
    assert np.shares_memory(npy.decode(file, name="x"), np.frombuffer(file, np.uint8))


def test_other_orders_are_written_row_major() -> None:
    array = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4).transpose(2, 0, 1)
    for view in (array, array[::-1, :, ::2], array.astype(">f4")):
        assert np.array_equal(np.load(io.BytesIO(b"".join(npy.encode(view)))), view)


def test_fortran_order_comes_out_row_major() -> None:
    array = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    read = npy.decode(saved(array), name="x")
    assert np.array_equal(read, array)
    assert read.flags.c_contiguous
    assert not read.flags.writeable


def test_unaligned_data_is_copied_to_where_it_is_aligned() -> None:
    shifted = bytearray(b"x") + saved(np.arange(3.0))
    read = npy.decode(memoryview(shifted)[1:], name="x")
    assert read.flags.aligned
    assert read.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("code", ["<V2", "|V2", "<u2", "<i2"])
def test_bfloat16_is_two_byte_items_and_a_name(code: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    header = f"{{'descr': '{code}', 'fortran_order': False, 'shape': (2, 3), }}\n"
    file = with_header(header, array.tobytes())
    read = npy.decode(file, name="x", dtype=DType.BFLOAT16)
    assert read.dtype == array.dtype
    assert np.array_equal(read, array)


def test_bfloat16_round_trip_through_numpy() -> None:
    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    ours = b"".join(npy.encode(array))
    assert np.load(io.BytesIO(ours)).view(ml_dtypes.bfloat16).tolist() == array.tolist()
    assert npy.decode(saved(array), name="x", dtype=DType.BFLOAT16).tolist() == array.tolist()


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (3,), 'descr': '<f8', 'fortran_order': False}",
        '{"descr": "<f8", "fortran_order": False, "shape": (3L,), }   \n',
        "{ 'descr':'=f8' ,'fortran_order':False,'shape':( 3, ) , }",
        "{'descr': '<f8', 'fortran_order': True, 'shape': (3,), }",
        "{'descr': 'f8', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '|f8', 'fortran_order': False, 'shape': (3,), }",
    ],
)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_other_writers_are_read(header: str, version: int) -> None:
    file = with_header(header, np.arange(3.0).tobytes(), version)
    assert npy.decode(file, name="x").tolist() == [0.0, 1.0, 2.0]


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        (b"", "not a .npy file"),
        (pickle.dumps([1]), "not a .npy file"),
        (saved(np.ones(2))[:5], "not a .npy file"),
        (saved(np.ones(2))[:9], "ends inside its header"),
        (saved(np.ones(2))[:50], "ends inside its header"),
        (saved(np.ones(2))[:-1], "takes 16 bytes, got 15"),
        (saved(np.ones(2)) + b"x", "takes 16 bytes, got 17"),
        (with_header(HEADER, version=4), "expected .npy version 1.0, 2.0 or 3.0"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "the .npy header claims 4294967295 bytes"),
        (with_header(HEADER.replace("(2,)", f"({10**18},)")), f"takes {4 * 10**18} bytes, got 0"),
        (with_header(HEADER.replace("(2,)", f"({10**30},)")), "is not a list of sizes"),
        (with_header(HEADER.replace("(2,)", f"(0, {10**18}, {10**18})")), "is too large"),
        (with_header(HEADER.replace("(2,)", "(-2,)")), "is not the dictionary"),
        (with_header(HEADER.replace("(2,)", "(,)")), "is not a list of sizes"),
        (with_header(HEADER.replace("(2,)", "(2 3)")), "is not a list of sizes"),
        (with_header(HEADER.replace("(2,)", "(" + "1," * 99 + ")")), "at most 32 ints"),
        (with_header(HEADER.replace("'<f4'", "True")), 'has no usable "descr"'),
        (with_header(HEADER.replace("'<f4'", "[('a', '<f4')]")), "structured array"),
        (with_header(HEADER.replace("<f4", "|O")), "pickled objects, which are not read"),
        (with_header(HEADER.replace("<f4", ">f4")), "is big-endian; expected little-endian"),
        (with_header(HEADER.replace("<f4", "|b1")), "holds bool"),
        (with_header(HEADER.replace("<f4", "|i1")), "holds int8"),
        (with_header(HEADER.replace("<f4", "<c8")), "holds complex64"),
        (with_header(HEADER.replace("<f4", "<M8")), "holds datetime64"),
        (with_header(HEADER.replace("<f4", "<u9999")), "holds an unknown type"),
        (with_header(HEADER.replace("<f4", "rubbish")), "holds an unknown type"),
        (with_header(HEADER.replace("<f4", "<V2")), 'add "dtype": "bfloat16" to the tensor'),
        (with_header("{'descr': '<f4', " + HEADER[1:]), 'names "descr" twice'),
        (with_header("{'descr': '<f4'}"), "is not the dictionary"),
        (with_header(HEADER + "x"), "is not the dictionary"),
        (with_header("__import__('os').system('true')"), "is not the dictionary"),
        (with_header("(" * 9000), "is not the dictionary"),
        (saved(np.array([None, {}], dtype=object)), "pickled objects, which are not read"),
    ],
)
def test_files_that_lie_are_refused(file: bytes, sentence: str) -> None:
    with pytest.raises(MalformedRequest) as refused:
        npy.decode(file, name="weight")
    assert refused.value.detail.startswith("weight: ")
    assert sentence in refused.value.detail
    assert len(refused.value.detail) < 300


def test_the_declared_dtype_must_agree_with_the_file() -> None:
    with pytest.raises(MalformedRequest, match=r"dtype says float32, but the \.npy file holds f"):
        npy.decode(saved(np.ones(2)), name="x", dtype=DType.FLOAT32)


def test_arrays_of_other_types_are_not_written() -> None:
    with pytest.raises(TypeError, match="bool is none of float16"):
        npy.encode(np.ones(2, bool))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_cleanly(rubbish: bytes) -> None:
    for file in (rubbish, b"\x93NUMPY\x01\x00" + rubbish):
        with pytest.raises(MalformedRequest):
            npy.decode(file, name="x")


@given(st.data())
def test_a_flipped_byte_gives_an_array_or_a_sentence(data: st.DataObject) -> None:
    file = bytearray(saved(np.arange(6, dtype=np.float32).reshape(2, 3)))
    file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        outcome = str(npy.decode(file, name="x").nbytes)
    except MalformedRequest as refused:
        outcome = refused.detail
    assert outcome == "24" or outcome.startswith("x: ")
    assert len(outcome) < 300
