"""Encodes and decodes tensors in JSON bodies, in three forms.

::

    {"npy": "<base64 of a .npy file>"}                          needs "dtype" for bfloat16
    {"data": "<base64>", "dtype": "float32", "shape": [2, 3]}   little-endian, row-major
    {"values": [[1, 2], [3, 4]], "dtype": "float32"}            "NaN", "Infinity", "-Infinity"

Used by client and server. The server passes a faster base64 codec, which does not change what is
accepted or the error messages.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import npy
from convgrad.wire.json_values import array_from_values, values_from_array
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import (
    Deferred,
    array_view,
    checked_dtype,
    checked_shape,
    data_view,
    dtype_of,
)

__all__ = ["FORMS", "Base64Text", "Decode", "Form", "decode_tensor", "encode_tensor"]

Form = Literal["npy", "data", "values"]
FORMS = frozenset(get_args(Form))
Base64Text: TypeAlias = str | memoryview
"""Base64 as a Python string, or as the bytes between the quotes of a JSON text."""
Decode: TypeAlias = Callable[[Base64Text], bytes | bytearray | Deferred]


def _b64decode(text: Base64Text) -> bytes:
    if len(text) % 4:
        raise ValueError  # strict_mode accepts padding after a complete group: "AAAA="
    return binascii.a2b_base64(text, strict_mode=True)


def _b64encode(parts: list[bytes | memoryview]) -> str:
    return "".join(binascii.b2a_base64(part, newline=False).decode("ascii") for part in parts)


def decode_tensor(
    tensor: Any,
    *,
    name: str,
    b64decode: Decode = _b64decode,
) -> NDArray[Any]:
    """Decode a JSON object into a read-only array; error messages call it ``name``.

    ``b64decode`` must reject other characters and wrong padding with ValueError.

    Raises
    ------
    MalformedRequest
        The object has none of the three forms, or contradicts itself.
    """
    if not isinstance(tensor, Mapping):
        raise MalformedRequest(
            f'{name}: expected a tensor, an object with "npy", "data" or "values", '
            f"got {shown(tensor)}"
        )
    forms = [form for form in _DECODERS if form in tensor]
    if len(forms) != 1:
        found = " and ".join(f'"{form}"' for form in forms) or "none of them"
        raise MalformedRequest(
            f'{name}: expected a tensor to have one of "npy", "data" and "values", got {found}'
        )
    decode, keys = _DECODERS[forms[0]]
    for key in tensor:
        if key not in keys:
            raise MalformedRequest(
                f"{name}: unknown key {shown(key)}; {forms[0]} takes {', '.join(keys[1:])}"
            )
    return decode(tensor, name, b64decode)


def encode_tensor(
    array: NDArray[Any],
    form: Form,
    *,
    b64encode: Callable[[list[bytes | memoryview]], Any] = _b64encode,
) -> dict[str, Any]:
    """Encode ``array`` as an object for json.dumps.

    ``b64encode`` receives consecutive parts of the data. All but the last have a multiple of 3
    bytes, so that their base64 can be concatenated. Its return value is put into the object.
    """
    dtype = dtype_of(array)
    if form == "values":
        return {"values": values_from_array(array), "dtype": dtype.value}
    if form == "data":
        return {
            "data": b64encode([data_view(array)]),
            "dtype": dtype.value,
            "shape": list(array.shape),
        }
    encoded: dict[str, Any] = {"npy": b64encode(npy.encode(array))}
    if dtype is DType.BFLOAT16:
        encoded["dtype"] = dtype.value
    return encoded


def _from_npy(tensor: Mapping[str, Any], name: str, b64decode: Decode) -> NDArray[Any]:
    declared = tensor.get("dtype")
    dtype = None if declared is None else checked_dtype(declared, name=name)
    return npy.decode(_base64(tensor["npy"], "npy", name, b64decode), name=name, dtype=dtype)


def _from_data(tensor: Mapping[str, Any], name: str, b64decode: Decode) -> NDArray[Any]:
    if isinstance(tensor["data"], list):
        raise MalformedRequest(
            f'{name}: "data" is base64 text; expected a list of numbers in "values"'
        )
    for key in ("dtype", "shape"):
        if key not in tensor:
            raise MalformedRequest(f'{name}: missing "{key}", which "data" needs')
    dtype = checked_dtype(tensor["dtype"], name=name)
    shape = checked_shape(tensor["shape"], name=name)
    data = _base64(tensor["data"], "data", name, b64decode)
    return array_view(data, dtype, shape, name=name)


def _from_values(tensor: Mapping[str, Any], name: str, _: Decode) -> NDArray[Any]:
    if "dtype" not in tensor:
        raise MalformedRequest(f'{name}: missing "dtype", which "values" needs')
    dtype = checked_dtype(tensor["dtype"], name=name)
    return array_from_values(tensor["values"], dtype, name=name)


def _base64(text: Any, key: str, name: str, b64decode: Decode) -> bytes | bytearray | Deferred:
    if not isinstance(text, str | memoryview):
        raise MalformedRequest(f'{name}: expected base64 text in "{key}", got {shown(text)}')
    try:
        return b64decode(text)
    except ValueError:
        raise MalformedRequest(
            f'{name}: "{key}" is not base64 (A-Z a-z 0-9 + / with = padding at its end, '
            "without line breaks)"
        ) from None


_DECODERS: Mapping[
    str, tuple[Callable[[Mapping[str, Any], str, Decode], NDArray[Any]], tuple[str, ...]]
] = {
    "npy": (_from_npy, ("npy", "dtype")),
    "data": (_from_data, ("data", "dtype", "shape")),
    "values": (_from_values, ("values", "dtype")),
}
