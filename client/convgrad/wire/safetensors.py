"""The safetensors format, both ways, without copying the data.

Eight bytes of header length, a JSON header, then the tensors' data end to end. Source: the
format's own description (huggingface/safetensors). Read as strictly as it is written there: no
holes, no overlaps, no key twice, sizes that match their shapes.

Requests carry their parameters as JSON text under the metadata key ``parameters``, answers their
report under ``report``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest
from convgrad.wire import strict_json
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import Buffer, array_view, checked_shape, data_view, dtype_of

__all__ = ["MEDIA_TYPE", "decode", "encode", "encode_header", "parameters", "total_bytes"]

MEDIA_TYPE = "application/vnd.safetensors"

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ENTRY_KEYS = frozenset({"dtype", "shape", "data_offsets"})
# The format allows 100 MB. A request names a handful of tensors; this holds ten thousand, and
# bounds what parsing a hostile header can cost.
_MAX_HEADER_BYTES = 1 << 20


def encode(
    tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """The header and each tensor's data, to be sent one after another; nothing is joined.

    A C-contiguous array is sent from where it lies. Wider elements come first, so that every
    tensor is aligned for its dtype.
    """
    header, order = encode_header(
        {name: (dtype_of(array), array.shape) for name, array in tensors.items()}, metadata
    )
    return [header, *(data_view(tensors[name]) for name in order)]


def encode_header(
    specs: Mapping[str, tuple[DType, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, list[str]]:
    """The file up to its data, and the order in which the tensors' data must follow.

    An answer can begin with it before its first element is computed.
    """
    order = sorted(specs, key=lambda name: -specs[name][0].itemsize)
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


def total_bytes(chunks: Iterable[bytes | memoryview]) -> int:
    """The size of a scattered body: its Content-Length."""
    return sum(chunk.nbytes if isinstance(chunk, memoryview) else len(chunk) for chunk in chunks)


def decode(buffer: Buffer) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors, as read-only views of ``buffer``, and the metadata.

    A tensor whose data is not aligned for its dtype is copied; writers that pad the header to 8
    bytes, as the reference one and `encode` do, never cause that.

    Raises
    ------
    MalformedRequest
        The buffer is truncated or has bytes too many, the header is not what the format allows,
        or a tensor's dtype is none that an operation takes.
    """
    view = memoryview(buffer).cast("B")
    header, data_offset = _header(view)
    metadata = _metadata(header.pop(_METADATA, {}))
    data = view[data_offset:]
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    _refuse_holes({name: offsets for name, (_, _, offsets) in entries.items()}, len(data))
    tensors = {
        name: array_view(data[begin:end], dtype, shape, name=name)
        for name, (dtype, shape, (begin, end)) in entries.items()
    }
    return tensors, metadata


def parameters(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a request, from its metadata; none where there are none.

    Raises MalformedRequest unless they are a JSON object.
    """
    return strict_json.loads_object(metadata.get("parameters", "{}"), "parameters")


def _header(view: memoryview) -> tuple[dict[str, Any], int]:
    if len(view) < _LENGTH_BYTES:
        raise MalformedRequest(
            f"the safetensors body has {len(view)} bytes, too few for its header's length"
        )
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES:
        raise MalformedRequest(
            f"the safetensors header claims {length} bytes; at most {_MAX_HEADER_BYTES} are read"
        )
    text = bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + length])
    if len(text) < length:
        raise MalformedRequest(
            f"the safetensors header claims {length} bytes, but only {len(text)} follow"
        )
    if text[:1] != b"{":
        raise MalformedRequest("the safetensors header does not begin with {")
    return strict_json.loads_object(text, "the safetensors header"), _LENGTH_BYTES + length


def _metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise MalformedRequest(f"{_METADATA}: expected an object, got {shown(metadata)}")
    for key, text in metadata.items():
        if not isinstance(text, str):
            raise MalformedRequest(
                f"{_METADATA}: expected text under {shown(key)}, got {shown(text)}"
            )
    return metadata


def _entry(name: str, entry: Any) -> tuple[DType, tuple[int, ...], tuple[int, int]]:
    label = shown(name)
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise MalformedRequest(
            f"{label}: expected an object of dtype, shape and data_offsets in the header"
        )
    dtype = DType.from_safetensors(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        known = ", ".join(member.safetensors for member in DType)
        raise MalformedRequest(f"{label}: expected dtype {known}, got {shown(entry['dtype'])}")
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
    return dtype, shape, (offsets[0], offsets[1])


def _refuse_holes(offsets: Mapping[str, tuple[int, int]], data_bytes: int) -> None:
    """Tensors must cover the data from its first byte to its last, each byte once."""
    end_before = 0
    for name, (begin, end) in sorted(offsets.items(), key=lambda item: item[1]):
        if begin != end_before:
            raise MalformedRequest(
                f"{shown(name)}: its data begins at byte {shown(begin)}, but the data before it "
                f"ends at {shown(end_before)}"
            )
        end_before = end
    if end_before != data_bytes:
        raise MalformedRequest(
            f"the safetensors header describes {shown(end_before)} bytes of data, "
            f"but {data_bytes} follow"
        )
