"""What an answer holds, in either form of the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numpy.typing import NDArray

from convgrad.contract import Report
from convgrad_service.oip.request import InferRequest

__all__ = ["answer_names", "answer_outputs", "report_parameters"]


def answer_names(request: InferRequest, computed: Iterable[str]) -> list[str]:
    """The outputs that the answer holds: those the request names, in its order, else all."""
    return [wanted.name for wanted in request.outputs] or list(computed)


def answer_outputs(
    request: InferRequest, outputs: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The arrays of `answer_names`."""
    return {name: outputs[name] for name in answer_names(request, outputs)}


def report_parameters(report: Report) -> dict[str, Any]:
    """The report as the protocol's response parameters."""
    return report.model_dump()
