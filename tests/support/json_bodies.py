"""Whole JSON requests and answers, as no server holds them in memory at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convgrad.contract import Operation, Report
from convgrad.wire.json_tensors import Form
from convgrad_service.http_api.codecs import decode_json, json_answer
from convgrad_service.http_api.transport import LazyBase64

__all__ = ["decode_json_request", "encode_json_answer"]


def decode_json_request(
    body: bytes | bytearray | memoryview, operation: Operation
) -> dict[str, Any]:
    """A request's fields with all tensors filled, in newly allocated memory."""
    fields, content = decode_json(memoryview(body), operation)
    for name, source in content.sources.items():
        if not callable(source):
            continue
        array = np.empty(fields[name].shape, fields[name].dtype)
        source(array)
        array.flags.writeable = False
        fields[name] = array
    return fields


def encode_json_answer(
    outputs: Mapping[str, NDArray[Any]], report: Report, form: Form
) -> list[bytes | memoryview]:
    """All of `json_answer` at once."""
    return [
        chunk.encoded() if isinstance(chunk, LazyBase64) else chunk
        for chunk in json_answer(outputs, report, form)
    ]
