"""Strategies for bodies that are wrong in every way that somebody may think of.

Three kinds: bytes of no form; good bodies with a few bytes changed; and requests that are well
formed and absurd, which is where sizes overflow and loops run for ever.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from convgrad.contract import OPERATIONS
from convgrad.wire import npy, safetensors
from convgrad.wire.json_tensors import decode_tensor

__all__ = ["BINARY", "JSON", "Shot", "shots"]

JSON, BINARY = "application/json", "application/vnd.safetensors"
FORM = "multipart/form-data; boundary=x"


@dataclass(frozen=True)
class Shot:
    """One request: where to, as what, with which bytes."""

    operation: str
    content_type: str
    body: bytes


_INTERESTING_INTS = [
    *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 65536),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64, 2**200),
]
_ints = st.sampled_from(_INTERESTING_INTS) | st.integers(-3, 9)
_scalars = (
    _ints
    | st.none()
    | st.booleans()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["NCHW", "NHWC", "GNHWC", "auto", "npy", "values", "high", "float32", "NaN"])
)
_json_values = st.recursive(
    _scalars | _ints,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(
            st.sampled_from(["data", "dtype", "shape", "d", "h", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
_sizes = st.lists(_ints, min_size=1, max_size=5)
_dtypes = st.sampled_from(
    ["float16", "bfloat16", "float32", "float64", "int32", "int64", "int8", "bool", "complex64", ""]
)


# The long ones are rare enough not to slow the run down, and common enough to be met.
_inserted = st.sampled_from(
    [b"{", b"]", b'"', b"9" * 40, b"[" * 100_000, b'{"a":' * 20_000, b" " * 500_000, b"1," * 90_000]
)


@st.composite
def _arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = draw(st.lists(st.integers(0, 4), min_size=0, max_size=6))
    dtype = draw(st.sampled_from(["f2", "f4", "f8", "i4", "i8", ">f4", "?", "c8", "u1"]))
    fill = draw(st.sampled_from([0.0, 1.0, -3.0]))
    array = np.full(shape, fill).astype(dtype)
    return np.asfortranarray(array) if draw(st.booleans()) else array


@st.composite
def _tensors(draw: st.DrawFn) -> Any:
    array = draw(_arrays())
    text = base64.b64encode(array.tobytes()).decode()
    form = draw(st.sampled_from(["data", "values", "npy", "odd"]))
    if form == "data":
        shape = draw(st.just(list(array.shape)) | _sizes)
        return {"data": text, "dtype": draw(_dtypes), "shape": shape}
    if form == "values" and array.dtype.kind in "fi":
        return {"values": array.tolist(), "dtype": draw(_dtypes)}
    if form == "npy" and array.dtype in (np.float16, np.float32, np.float64, np.int64):
        whole = b"".join(bytes(part) for part in npy.encode(np.ascontiguousarray(array)))
        return {"npy": base64.b64encode(draw(_damaged(whole))).decode()}
    return draw(_json_values)


@st.composite
def _damaged(draw: st.DrawFn, body: bytes) -> bytes:
    """``body`` after up to four small accidents."""
    changed = bytearray(body)
    for _ in range(draw(st.integers(0, 4))):
        if not changed:
            break
        at = draw(st.integers(0, len(changed) - 1))
        end = min(len(changed), at + draw(st.integers(0, 16)))
        accident = draw(st.sampled_from(["set", "cut", "insert", "repeat", "truncate"]))
        if accident == "set":
            changed[at] = draw(st.integers(0, 255))
        elif accident == "cut":
            del changed[at:end]
        elif accident == "insert":
            changed[at:at] = draw(
                st.binary(max_size=8) | st.sampled_from([b"{", b"]", b'"', b"9" * 40])
            )
        elif accident == "repeat":
            changed[at:at] = changed[at:end] * draw(st.sampled_from([1, 2, 500]))
        else:
            del changed[at:]
    return bytes(changed)


def _example(operation: str) -> dict[str, Any]:
    return dict(OPERATIONS[operation].example)


@st.composite
def _fields(draw: st.DrawFn, operation: str) -> dict[str, Any]:
    """The operation's example with some fields replaced by absurd ones, dropped or added."""
    fields = _example(operation)
    model = OPERATIONS[operation]
    names = sorted(model.request.model_fields)
    for name in draw(st.lists(st.sampled_from([*names, "extra", "Weight"]), max_size=3)):
        if name in model.tensors:
            fields[name] = draw(_tensors())
        else:
            fields[name] = draw(_ints | _sizes | st.lists(_sizes, max_size=4) | _json_values)
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=1)):
        del fields[name]
    return fields


def _as_binary(fields: dict[str, Any], operation: str) -> bytes:
    tensors, parameters = {}, {}
    for name, value in fields.items():
        try:
            tensors[name] = decode_tensor(value, name=name)
        except Exception:  # noqa: BLE001 - whatever is no tensor goes among the parameters
            parameters[name] = value
    return b"".join(safetensors.encode(tensors, {"parameters": json.dumps(parameters)}))


def _as_form(fields: dict[str, Any], operation: str) -> bytes:
    parts = []
    for name, value in fields.items():
        try:
            data = b"".join(bytes(part) for part in npy.encode(decode_tensor(value, name=name)))
        except Exception:  # noqa: BLE001 - likewise
            data = json.dumps(value).encode()
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(head.encode() + data + b"\r\n")
    return b"".join(parts) + b"--x--\r\n"


_WRITERS = {
    JSON: lambda fields, operation: json.dumps(fields).encode(),
    BINARY: _as_binary,
    FORM: _as_form,
}


@st.composite
def shots(draw: st.DrawFn) -> Shot:
    """Any request at all, most of them wrong."""
    operation = draw(st.sampled_from(sorted(OPERATIONS)))
    content_type = draw(st.sampled_from([JSON, JSON, BINARY, FORM]))
    if draw(st.integers(0, 9)) == 0:
        return Shot(operation, content_type, draw(st.binary(max_size=200)))
    fields = _example(operation) if draw(st.booleans()) else draw(_fields(operation))
    body = _WRITERS[content_type](fields, operation)
    return Shot(operation, content_type, draw(_damaged(body)) if draw(st.booleans()) else body)
