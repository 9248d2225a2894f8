"""Encodes and decodes the safetensors format without copying the data.

A file has eight bytes of header length, a JSON header, and the contiguous data of the tensors.
Source: the specification in huggingface/safetensors, enforced strictly: no holes, overlaps or
duplicate keys, and sizes must match shapes.

Requests store their parameters as JSON under the metadata key ``parameters``, answers their report
under ``report``.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.sentences import shown, shown_count
from convgrad.wire.shapes import (
    Buffer,
    array_view,
    checked_bytes,
    checked_shape,
    data_view,
    dtype_of,
)

__all__ = [
    "MEDIA_TYPE",
    "Layout",
    "Placed",
    "data_order",
    "decode",
    "encode",
    "encode_header",
    "header_bytes",
    "layout",
    "parameters",
    "total_bytes",
]

MEDIA_TYPE = "application/vnd.safetensors"

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
# The format allows 100 MB. Requests have a handful of tensors; this is enough for ten thousand and
# limits the cost of parsing a hostile header.
_MAX_HEADER_BYTES = 1 << 20


class Placed(NamedTuple):
    """A tensor and the position of its bytes, relative to the end of the header."""

    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


class Layout(NamedTuple):
    """The contents of a header: the tensors in the order of their data."""

    tensors: dict[str, Placed]
    metadata: dict[str, str]
    data_bytes: int


def encode(
    tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """Return the header and each tensor's data as separate buffers, to be sent in order.

    C-contiguous arrays are not copied. Tensors are sorted by decreasing element size, so that each
    is aligned for its dtype.
    """
    specs = tuple((name, dtype_of(array), array.shape) for name, array in tensors.items())
    header, order = _header_again(specs, tuple((metadata or {}).items()))
    return [header, *(data_view(tensors[name]) for name in order)]


@lru_cache(maxsize=64)
def _header_again(
    specs: tuple[tuple[str, DType, tuple[int, ...]], ...], metadata: tuple[tuple[str, str], ...]
) -> tuple[bytes, list[str]]:
    """Cached `encode_header`, since programs send the same layer many times with other data."""
    return encode_header({name: (dtype, shape) for name, dtype, shape in specs}, dict(metadata))


def encode_header(
    specs: Mapping[str, tuple[DType, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[str]]:
    """Return the bytes before the data, and the order in which the tensors' data must follow."""
    order = data_order({name: dtype.itemsize for name, (dtype, _) in specs.items()})
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        dtype, shape = specs[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype.safetensors,
            "shape": [int(extent) for extent in shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, order


def data_order(itemsizes: Mapping[str, int]) -> list[str]:
    """Return the order of the tensors' data: by decreasing element size, for its alignment."""
    return sorted(itemsizes, key=lambda name: -itemsizes[name])


def total_bytes(chunks: Iterable[bytes | memoryview]) -> int:
    """Return the total size of the chunks: the Content-Length."""
    return sum(chunk.nbytes if isinstance(chunk, memoryview) else len(chunk) for chunk in chunks)


def decode(buffer: Buffer) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return the tensors, as read-only views of ``buffer``, and the metadata.

    Misaligned tensors are copied. Writers that pad the header to 8 bytes, like the reference
    implementation and `encode`, never cause that.

    Raises
    ------
    MalformedRequest
        The buffer is too short or too long, the header violates the format, or no operation
        accepts a tensor's dtype.
    """
    view = memoryview(buffer).cast("B")
    data_offset = header_bytes(view)
    described = layout(view[:data_offset], len(view) - data_offset)
    data = view[data_offset:]
    tensors = {
        name: array_view(data[placed.begin : placed.end], placed.dtype, placed.shape, name=name)
        for name, placed in described.tensors.items()
    }
    return tensors, described.metadata


def header_bytes(buffer: Buffer) -> int:
    """Return where the data begins, from the first 8 bytes of a body.

    Raises MalformedRequest if they are too short or announce a header over the size limit.
    """
    if len(buffer) < _LENGTH_BYTES:
        raise MalformedRequest(
            f"the safetensors body has {len(buffer)} bytes, too few for its header's length"
        )
    length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES:
        raise MalformedRequest(
            f"the safetensors header claims {length} bytes; at most {_MAX_HEADER_BYTES} are read"
        )
    return _LENGTH_BYTES + length


def layout(buffer: Buffer, data_bytes: int | None = None) -> Layout:
    """Parse the header at the start of ``buffer``.

    ``data_bytes`` is the number of bytes after the header, if known.

    Raises
    ------
    MalformedRequest
        As for `decode`.
    """
    header = _header(memoryview(buffer).cast("B"))
    metadata = _metadata(header.pop(_METADATA, {}))
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = _refuse_holes(entries, data_bytes)
    for name, placed in entries.items():
        checked_bytes(placed.dtype, placed.shape, placed.end - placed.begin, name=name)
    return Layout(entries, metadata, end)


def parameters(metadata: Mapping[str, str], fields: Iterable[str] = ()) -> dict[str, Any]:
    """Return the parameters in the metadata of a request, empty if there are none.

    ``fields`` are the names of the request's fields. Other metadata is ignored, except for keys
    that look like one of these or like a misspelt ``parameters``: they would have no effect.

    Raises
    ------
    MalformedRequest
        The parameters are not a JSON object, or the metadata has such a key.
    """
    for key in metadata.keys() - {"parameters"}:
        _refuse_meant_as_parameters(key, fields)
    return strict_json.loads_object(metadata.get("parameters", "{}"), "parameters")


def _refuse_meant_as_parameters(key: str, fields: Iterable[str]) -> None:
    lowered = key[:64].lower()
    if difflib.get_close_matches(lowered, ["parameters"], n=1, cutoff=0.7):
        raise MalformedRequest(
            f'unknown key {shown(key)} in {_METADATA}, did you mean "parameters"?'
        )
    for name in difflib.get_close_matches(lowered, list(fields), n=1, cutoff=0.8):
        raise MalformedRequest(
            f"unknown key {shown(key)} in {_METADATA}; parameters such as {shown(name)} are keys "
            'of the JSON object under "parameters"'
        )


def _header(view: memoryview) -> dict[str, Any]:
    length = header_bytes(view) - _LENGTH_BYTES
    text = bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    if len(text) < length:
        raise MalformedRequest(
            f"the safetensors header claims {length} bytes, but only {len(text)} follow"
        )
    if text[:1] != b"{":
        raise MalformedRequest("the safetensors header does not begin with {")
    return strict_json.loads_object(text, "the safetensors header")


def _metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise MalformedRequest(f"{_METADATA}: expected an object, got {shown(metadata)}")
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise MalformedRequest(
                f"{_METADATA}: expected text under {shown(key)}, got {shown(text)}"
            )
    return metadata


def _entry(name: str, entry: Any) -> Placed:
    label = shown(name)
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise MalformedRequest(
            f"{label}: expected an object of dtype, shape and data_offsets in the header"
        )
    dtype = DType.from_safetensors(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        known = ", ".join(member.safetensors for member in DType)
        raise MalformedRequest(
            f"{label}: expected dtype to be one of {known}, got {shown(entry['dtype'])}"
        )
    shape = checked_shape(entry["shape"], name=label)
    offsets = entry["data_offsets"]
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1]
    ):
        raise MalformedRequest(
            f"{label}: expected data_offsets [begin, end] with 0 <= begin <= end, "
            f"got {shown(offsets)}"
        )
    return Placed(dtype, shape, offsets[0], offsets[1])


def _refuse_holes(entries: Mapping[str, Placed], data_bytes: int | None) -> int:
    """Check that the tensors cover every byte of the data exactly once; return its size."""
    end_before = 0
    for name, placed in entries.items():
        if placed.begin != end_before:
            raise MalformedRequest(
                f"{shown(name)}: its data begins at byte {shown(placed.begin)}, but the data "
                f"before it ends at {shown(end_before)}"
            )
        end_before = placed.end
    if data_bytes is not None and end_before != data_bytes:
        raise MalformedRequest(
            f"the safetensors header describes {shown_count(end_before)} bytes of data, "
            f"but {data_bytes} follow"
        )
    return end_before
