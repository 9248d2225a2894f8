"""Encodes and decodes the .npy format without copying the data.

Source: NEP 1 and ``numpy.lib.format``, versions 1.0 to 3.0. The header is a Python literal; it is
parsed with a regular expression and never evaluated, and nothing is unpickled.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire.shapes import Buffer, Deferred, array_view, checked_shape, data_view, dtype_of

__all__ = ["MEDIA_TYPE", "Layout", "decode", "encode", "header_bytes", "layout"]

MEDIA_TYPE = "application/x-npy"
"""Media type of a bare file. Its parameter ``dtype`` marks bfloat16, which the file cannot."""

_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
# NumPy requires a multiple of 64 for alignment. With a multiple of 3, the base64 of the header has
# no padding, so header and data can be encoded separately and concatenated.
_HEADER_MULTIPLE = 192
_CODES = {
    DType.FLOAT16: "<f2",
    DType.BFLOAT16: "<V2",  # what numpy.save writes for ml_dtypes.bfloat16
    DType.FLOAT32: "<f4",
    DType.FLOAT64: "<f8",
    DType.INT32: "<i4",
    DType.INT64: "<i8",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items() if dtype is not DType.BFLOAT16}
# NumPy has no bfloat16, so other writers store it as various two-byte types.
_TWO_BYTE_CODES = frozenset({"<V2", "|V2", "<u2", "<i2"})

_ITEM = re.compile(
    r"""\s*(['"])(?P<key>descr|fortran_order|shape)\1\s*:\s*
        (?:(['"])(?P<text>[^'"]{1,16})\3 | (?P<flag>True|False) | \((?P<ints>[0-9,\sL]*)\))
        \s*(?:,|(?=\}))""",
    re.VERBOSE,
)


class _Header(NamedTuple):
    code: str
    fortran_order: bool
    shape: tuple[int, ...]


class Layout(NamedTuple):
    """The contents of a header: dtype, shape and order, and where the data begins."""

    dtype: DType
    shape: tuple[int, ...]
    fortran_order: bool
    data_offset: int


def encode(array: NDArray[Any]) -> list[bytes | memoryview]:
    """Return the header and data of a .npy file; contiguous data is not copied.

    bfloat16 is stored as 2-byte void items, as by numpy.save, so the dtype must be sent
    separately. The length of the header is always a multiple of 3 bytes.
    """
    return [_written_header(dtype_of(array), array.shape), data_view(array)]


def decode(buffer: Buffer | Deferred, *, name: str, dtype: DType | None = None) -> NDArray[Any]:
    """Decode the bytes of a .npy file into a read-only view.

    Only arrays in Fortran order and misaligned data are copied. ``dtype`` is the dtype sent with
    the file; it is required for bfloat16 and must otherwise match.

    Raises
    ------
    MalformedRequest
        Not a .npy file, an unreadable or false header, a pickled or structured array, or an
        element type that no operation accepts.
    """
    found = layout(buffer, name=name, dtype=dtype)
    if found.fortran_order and not isinstance(buffer, Buffer):
        buffer = buffer[:]  # reordering needs the data now
    array = array_view(
        buffer,
        found.dtype,
        found.shape[::-1] if found.fortran_order else found.shape,
        name=name,
        offset=found.data_offset,
    )
    if found.fortran_order and array.ndim > 1:
        array = np.ascontiguousarray(array.T)
        array.flags.writeable = False
    return array


def header_bytes(prefix: Buffer, *, name: str) -> int:
    """Return where the data begins, from the first 12 bytes of a file.

    Raises MalformedRequest if they are too short, are not from a .npy file, or announce a header
    over the size limit.
    """
    prefix = bytes(prefix[:12])
    if prefix[:6] != _MAGIC:
        raise MalformedRequest(f"{name}: not a .npy file (it does not begin with \\x93NUMPY)")
    if prefix[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise MalformedRequest(f"{name}: expected .npy version 1.0, 2.0 or 3.0")
    begin = 10 if prefix[6] == 1 else 12
    length = int.from_bytes(prefix[8:begin], "little")
    if length > _MAX_HEADER_BYTES:
        raise MalformedRequest(
            f"{name}: the .npy header claims {length} bytes; at most {_MAX_HEADER_BYTES} are read"
        )
    if len(prefix) < begin:
        raise _ends_early(name)
    return begin + length


def layout(buffer: Buffer | Deferred, *, name: str, dtype: DType | None = None) -> Layout:
    """Parse the header at the start of ``buffer``; ``dtype`` and errors as for `decode`."""
    data_offset = header_bytes(buffer[:12], name=name)
    begin = 10 if buffer[6:7] == b"\x01" else 12
    text = bytes(buffer[begin:data_offset])
    if len(text) < data_offset - begin:
        raise _ends_early(name)
    header = _parsed(text)
    if isinstance(header, str):
        raise MalformedRequest(f"{name}: {header}")
    checked_shape(header.shape, name=name)
    element = _element_type(header.code, dtype, name)
    return Layout(element, header.shape, header.fortran_order, data_offset)


def _ends_early(name: str) -> MalformedRequest:
    return MalformedRequest(f"{name}: the .npy file ends inside its header")


@lru_cache(maxsize=256)
def _parsed(text: bytes) -> _Header | str:
    """Parse a header; return an error message if it is invalid."""
    content = text.decode("latin-1").strip(" \n\r\t\0")
    if "descr" in content and re.search(r"""['"]descr['"]\s*:\s*\[""", content):
        return "the .npy file holds a structured array; expected plain numbers"
    found: dict[str, str] = {}
    position = 1
    while item := _ITEM.match(content, position):
        key = item["key"]
        if key in found:
            return f'the .npy header names "{key}" twice'
        found[key] = item[_VALUE_OF[key]] or ""
        if item[_VALUE_OF[key]] is None:
            return f'the .npy header has no usable "{key}"'
        position = item.end()
    if not content.startswith("{") or content[position:].strip() != "}" or len(found) != 3:
        return "the .npy header is not the dictionary of descr, fortran_order and shape"
    extents = [extent.strip().rstrip("L") for extent in found["shape"].split(",")]
    if extents[-1] == "":
        extents.pop()
    # No size in memory has more than 19 digits; longer numbers are invalid and slow to convert.
    if not all(extent.isdecimal() and len(extent) <= 19 for extent in extents):
        return "the .npy header's shape is not a list of sizes"
    return _Header(found["descr"], found["fortran_order"] == "True", tuple(map(int, extents)))


_VALUE_OF = {"descr": "text", "fortran_order": "flag", "shape": "ints"}


def _element_type(code: str, declared: DType | None, name: str) -> DType:
    """Return the element type, from the file's type code and the dtype sent with the file."""
    if code == "|O":
        raise MalformedRequest(f"{name}: the .npy file holds pickled objects, which are not read")
    if declared is DType.BFLOAT16 and code in _TWO_BYTE_CODES:
        return declared
    if code in ("<V2", "|V2") and declared is None:
        raise MalformedRequest(
            f'{name}: the .npy file holds 2-byte items of no type; for bfloat16 add "dtype": '
            f'"bfloat16" to the tensor, or dtype=bfloat16 to its Content-Type'
        )
    if code.startswith(">"):
        raise MalformedRequest(f"{name}: the .npy file is big-endian; expected little-endian")
    # A code without a byte order, as some writers leave it out, means this machine's, as in NumPy.
    dtype = _DTYPES.get("<" + code.lstrip("=<|"))
    if dtype is None:
        raise MalformedRequest(
            f"{name}: expected {', '.join(DType)}; the .npy file holds {_type_name(code)}"
        )
    if declared is not None and declared is not dtype:
        raise MalformedRequest(f"{name}: dtype says {declared}, but the .npy file holds {dtype}")
    return dtype


def _type_name(code: str) -> str:
    known = re.fullmatch(r"[<|=]?[?bBiufcmMSUV][0-9]{0,4}", code)
    try:
        return str(np.dtype(code)) if known else "an unknown type"
    except TypeError:
        return "an unknown type"


@lru_cache(maxsize=256)
def _written_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    extents = "(" + "".join(f"{int(extent)}, " for extent in shape).rstrip() + ")"
    if len(shape) > 1:
        extents = extents[:-2] + ")"
    text = f"{{'descr': '{_CODES[dtype]}', 'fortran_order': False, 'shape': {extents}, }}"
    length = -(-(len(_MAGIC) + 4 + len(text) + 1) // _HEADER_MULTIPLE) * _HEADER_MULTIPLE
    padded = text.ljust(length - len(_MAGIC) - 5) + "\n"
    return _MAGIC + b"\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode("ascii")
