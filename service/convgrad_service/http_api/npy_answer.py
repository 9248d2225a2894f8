"""Answers as NumPy files: .npy for one tensor, .npz for any number; the report is in X-Report."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Request
from convgrad.dtypes import DType
from convgrad.errors import NotAcceptable
from convgrad.wire import npy
from convgrad.wire.shapes import dtype_of
from convgrad_service.engine.execution import Execution, Result
from convgrad_service.http_api.problem_details import Headers
from convgrad_service.http_api.response import Arriving, Chunk
from convgrad_service.problems import Problem

__all__ = [
    "NPY",
    "NPZ",
    "REPORT_HEADER",
    "encode_npy",
    "encode_npz",
    "npy_content_type",
    "npy_headers",
    "npz_headers",
    "refuse_npy",
    "refuse_npz",
]

NPY = npy.MEDIA_TYPE
NPZ = "application/x-npz"
REPORT_HEADER = "X-Report"


def encode_npy(execution: Execution, result: Result) -> Sequence[Chunk]:
    """Encode the only output as a .npy file."""
    ((name, array),) = result.outputs.items()
    header, data = npy.encode(array)
    assert isinstance(data, memoryview)  # noqa: S101
    if result.progress is None:
        return [header, data]
    return [header, Arriving(data, partial(result.progress.until, name))]


def encode_npz(execution: Execution, result: Result) -> Sequence[Chunk]:
    """Encode all outputs as a .npz file, uncompressed."""
    collected = _Chunks()
    with zipfile.ZipFile(collected, "w") as archive:  # type: ignore[call-overload]
        for name, array in result.outputs.items():
            # A fixed date, so that answers to the same request are identical.
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in npy.encode(array):
                    file.write(part)
    return collected.parts


def npy_content_type(array: NDArray[Any]) -> str:
    """Return the media type of an array's .npy file, with dtypes that NumPy lacks."""
    return f"{NPY}; dtype=bfloat16" if dtype_of(array) is DType.BFLOAT16 else NPY


def npy_headers(result: Result) -> Headers:
    """Return the headers of a .npy answer."""
    ((_, array),) = result.outputs.items()
    return [(b"content-type", npy_content_type(array).encode()), _report(result)]


def npz_headers(result: Result) -> Headers:
    """Return the headers of a .npz answer."""
    return [(b"content-type", NPZ.encode()), _report(result)]


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


def _report(result: Result) -> tuple[bytes, bytes]:
    return REPORT_HEADER.lower().encode(), result.report.model_dump_json().encode("ascii")


class _Chunks:
    """A file for `zipfile` that collects what is written without copying."""

    def __init__(self) -> None:
        self.parts: list[Chunk] = []

    def write(self, part: bytes | memoryview) -> int:
        self.parts.append(part)
        return len(part)

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""
