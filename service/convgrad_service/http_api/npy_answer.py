"""Answers as NumPy's own files: .npy for one tensor, .npz for any number. How they were computed
stands in the header X-Report."""

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
from convgrad_service.engine.execution import Execution
from convgrad_service.engine.request import Result
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
    """The one output as a .npy file."""
    ((name, array),) = result.outputs.items()
    header, data = npy.encode(array)
    assert isinstance(data, memoryview)  # noqa: S101
    if result.progress is None:
        return [header, data]
    return [header, Arriving(data, partial(result.progress.until, name))]


def encode_npz(execution: Execution, result: Result) -> Sequence[Chunk]:
    """All outputs as a .npz file: a zip archive of .npy files that are stored as they are."""
    collected = _Chunks()
    with zipfile.ZipFile(collected, "w") as archive:  # type: ignore[call-overload]
        for name, array in result.outputs.items():
            # The dates of a zip archive would make two answers to the same request differ.
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as file:
                for part in npy.encode(array):
                    file.write(part)
    return collected.parts


def npy_content_type(array: NDArray[Any]) -> str:
    """The media type of an array's .npy file, with the dtype where the file cannot say it."""
    return f"{NPY}; dtype=bfloat16" if dtype_of(array) is DType.BFLOAT16 else NPY


def npy_headers(result: Result) -> Headers:
    """The headers of an answer in .npy."""
    ((_, array),) = result.outputs.items()
    return [(b"content-type", npy_content_type(array).encode()), _report(result)]


def npz_headers(result: Result) -> Headers:
    """The headers of an answer in .npz."""
    return [(b"content-type", NPZ.encode()), _report(result)]


def refuse_npy(request: Request, problem: Problem) -> None:
    """Raise NotAcceptable unless there is one output, and it is sent."""
    if len(problem.outputs) > 1:
        raise NotAcceptable(
            f"{NPY} holds one tensor, and the answer has {', '.join(problem.outputs)}; accept {NPZ}"
        )
    refuse_npz(request, problem)


def refuse_npz(request: Request, problem: Problem) -> None:
    """Raise NotAcceptable where an output is not sent but stored."""
    if request.store:
        raise NotAcceptable(
            "an answer in NumPy's files cannot name the outputs that were stored; accept "
            "application/json"
        )


def _report(result: Result) -> tuple[bytes, bytes]:
    return REPORT_HEADER.lower().encode(), result.report.model_dump_json().encode("ascii")


class _Chunks:
    """What `zipfile` writes to: it keeps each part as it comes, and copies none."""

    def __init__(self) -> None:
        self.parts: list[Chunk] = []

    def write(self, part: bytes | memoryview) -> int:
        self.parts.append(part)
        return len(part)

    def flush(self) -> None:
        """It has all there is."""
