"""A form (multipart/form-data) with .npy files, as ``curl -F weight=@w.npy -F stride=2`` sends it.

A field that is named like a tensor is a .npy file. Any other is a parameter: JSON where it is JSON
(2, [1, 1], true), else the text itself (NHWC). The body is in the arena, and python-multipart
says where in it each field is; the tensors are then copied from there to their places.

Answers in NumPy files, .npy for one tensor and .npz for any number, have their report in
``X-Report``.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from convgrad.contract import Operation, Request, refuse_unknown
from convgrad.dtypes import DType
from convgrad.errors import MalformedRequest, NotAcceptable
from convgrad.wire import npy, strict_json
from convgrad.wire.sentences import shown
from convgrad.wire.shapes import checked_dtype, dtype_of
from convgrad_service.engine.execution import Execution, Source
from convgrad_service.http_api.content_types import content_type_parameters
from convgrad_service.http_api.long_base64 import DeferredTensor
from convgrad_service.http_api.transport import Chunk, Content
from convgrad_service.problems import Problem

MEDIA_TYPE = "multipart/form-data"
NPY = npy.MEDIA_TYPE
NPZ = "application/x-npz"
# The parser needs `bytes`, so it gets copies of blocks of this size.
_BLOCK_BYTES = 2**20
# A request has some twenty fields, and its parameters are short.
_MAX_FIELDS = 64
_MAX_PARAMETER_BYTES = 16 * 1024
# The server logs refusals itself.
_SILENT = logging.Logger("python_multipart", logging.CRITICAL)
# RFC 2046 allows 70 characters.
_MAX_BOUNDARY_BYTES = 70


@dataclass(slots=True)
class FormField:
    """One field: its headers by lower-case name, and the position of its data in the body."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    begin: int = 0
    size_bytes: int = 0

    def name(self) -> str:
        """The name in Content-Disposition; raises MalformedRequest if there is none."""
        disposition, parameters = parse_options_header(self.headers.get(b"content-disposition"))
        name = parameters.get(b"name")
        if disposition != b"form-data" or not name:
            raise MalformedRequest(
                'a part of the form has no name: expected Content-Disposition: form-data; name="…"'
            )
        encoding = self.headers.get(b"content-transfer-encoding", b"binary").strip().lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise MalformedRequest(
                f"{shown(_text(name))}: expected a file as it is, got the "
                f"Content-Transfer-Encoding {shown(_text(encoding))}"
            )
        return _text(name)


def decode_form(
    body: memoryview, operation: Operation, _: int | None, content_type: str
) -> tuple[dict[str, Any], Content]:
    """Return a request's fields and where their data is; see `RequestFormat`."""
    found = split_form(body, content_type_parameters(content_type).get("boundary", ""))
    refuse_unknown(operation.request, found)
    fields: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for name, part in found.items():
        data = body[part.begin : part.begin + part.size_bytes]
        if not data:
            continue  # browsers send unused fields empty
        if name in operation.tensors:
            dtype = npy_dtype(_text(part.headers.get(b"content-type", b"")), name)
            file = _File(data, name)
            fields[name] = npy.decode(file, name=name, dtype=dtype)
            sources[name] = file.fill if file.used else fields[name]
        else:
            fields[name] = _parameter(data, name)
    return fields, Content(sources)


def npy_dtype(content_type: str, name: str) -> DType | None:
    """Return the dtype in a .npy file's media type: ``application/x-npy; dtype=bfloat16``."""
    dtype = content_type_parameters(content_type).get("dtype")
    return None if dtype is None else checked_dtype(dtype, name=name)


def split_form(view: memoryview, boundary: str) -> dict[str, FormField]:
    """Parse a form into its fields, by name.

    Raises
    ------
    MalformedRequest
        It is not one, breaks off, names a field twice or has more than any request needs.
    """
    if not 1 <= len(boundary) <= _MAX_BOUNDARY_BYTES or not boundary.isascii():
        raise MalformedRequest(
            f"the Content-Type has no usable boundary: expected {MEDIA_TYPE}; boundary=… of 1 to "
            f"{_MAX_BOUNDARY_BYTES} characters"
        )
    splitter = _Splitter(boundary)
    try:
        for start in range(0, len(view), _BLOCK_BYTES):
            splitter.block_begin = start
            splitter.block = bytes(view[start : start + _BLOCK_BYTES])
            splitter.write(splitter.block)
    except FormParserError as refused:
        raise MalformedRequest(f"the form cannot be read: {refused}") from None
    if not splitter.ended:
        raise MalformedRequest(
            f"the form breaks off after {len(view):,} bytes: its last boundary is missing"
        )
    fields: dict[str, FormField] = {}
    for part in splitter.parts:
        name = part.name()
        if name in fields:
            raise MalformedRequest(
                f"the form has the field {shown(name)} twice; a list is one field, such as [1, 1]"
            )
        fields[name] = part
    return fields


class _Splitter(MultipartParser):
    """Records the positions of parts."""

    def __init__(self, boundary: str) -> None:
        super().__init__(boundary)
        self.logger = _SILENT
        self.parts: list[FormField] = []
        self.block = self._name = self._value = b""
        self.block_begin = 0
        self.ended = False

    def callback(
        self, name: str, data: bytes | None = None, start: int | None = 0, end: int | None = 0
    ) -> None:
        """See `MultipartParser`, which calls this with what it finds."""
        data, start, end = data or b"", start or 0, end or 0
        match name:
            case "part_begin":
                if len(self.parts) == _MAX_FIELDS:
                    raise MalformedRequest(f"the form has more than {_MAX_FIELDS} fields")
                self.parts.append(FormField())
            case "header_field":
                self._name += data[start:end]
            case "header_value":
                self._value += data[start:end]
            case "header_end":
                self.parts[-1].headers[self._name.lower()] = self._value
                self._name = self._value = b""
            case "part_data" if end > start:
                part = self.parts[-1]
                if part.size_bytes == 0:
                    # The end of the last block may have looked like the start of a boundary. The
                    # parser passes such bytes from its own memory.
                    within = start if data is self.block else start - end
                    part.begin = self.block_begin + within
                part.size_bytes += end - start
            case "end":
                self.ended = True


class _File(DeferredTensor):
    """The bytes of a file, not copied yet."""

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, part: slice) -> bytes:
        return bytes(self._data[part])

    def fill(self, target: NDArray[Any]) -> None:
        """Copy the elements into a contiguous array."""
        target.reshape(-1).view(np.uint8).data[:] = self._data[self._offset :]


def _parameter(data: memoryview, name: str) -> Any:
    if len(data) > _MAX_PARAMETER_BYTES:
        raise MalformedRequest(
            f"{name}: expected a parameter of at most {_MAX_PARAMETER_BYTES:,} bytes, got "
            f"{len(data):,}"
        )
    text = _text(bytes(data))
    try:
        return strict_json.loads(text, name)
    except MalformedRequest:
        return text


def _text(encoded: bytes) -> str:
    return encoded.decode("utf-8", "replace")


def encode_npy(execution: Execution) -> Sequence[Chunk]:
    """Encode the only output as a .npy file."""
    (array,) = execution.outputs.values()
    return npy.encode(array)


def encode_npz(execution: Execution) -> Sequence[Chunk]:
    """Encode all outputs as a .npz file, uncompressed."""
    collected = _Chunks()
    with zipfile.ZipFile(collected, "w") as archive:  # type: ignore[call-overload]
        for name, array in execution.outputs.items():
            # A fixed date, so that answers to the same request are identical.
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in npy.encode(array):
                    file.write(part)
    return collected.parts


def npy_content_type(array: NDArray[Any]) -> str:
    """Return the media type of an array's .npy file, with dtypes that NumPy lacks."""
    return f"{NPY}; dtype=bfloat16" if dtype_of(array) is DType.BFLOAT16 else NPY


def refuse_npy(request: Request, problem: Problem) -> None:
    """Raise NotAcceptable unless there is exactly one output, and it is not stored."""
    if len(problem.outputs) > 1:
        raise NotAcceptable(
            f"{NPY} holds one tensor, and the answer has {', '.join(problem.outputs)}; accept {NPZ}"
        )
    refuse_npz(request, problem)


def refuse_npz(request: Request, problem: Problem) -> None:
    """Raise NotAcceptable if an output is stored."""
    if request.store:
        raise NotAcceptable(
            "an answer in NumPy's files cannot name the outputs that were stored; accept "
            "application/json"
        )


class _Chunks:
    """A file for `zipfile` that collects what is written without copying.

    Each file's header is written again, in its place, once the checksum is known: readers of a
    stream, such as Java's, need it before the data.
    """

    def __init__(self) -> None:
        self.parts: list[Chunk] = []
        self._begins: dict[int, int] = {}
        self._at = 0

    def write(self, part: bytes | memoryview) -> int:
        number = self._begins.setdefault(self._at, len(self.parts))
        self.parts[number : number + 1] = [part]
        self._at += len(part)
        return len(part)

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> None:
        self._at = at

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
