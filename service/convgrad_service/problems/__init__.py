"""Problems: what a request means, sized and checked, and nothing of how it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from convgrad_service.problems.base import Epilogue, Piece, Problem, TensorSpec
from convgrad_service.problems.conv_bwd_data import ConvBwdData
from convgrad_service.problems.conv_fwd import ConvFwd
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.grouped_conv_bwd_weight import GroupedConvBwdWeight
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.maxpool import MaxPoolBwd, MaxPoolFwd

__all__ = [
    "PROBLEMS",
    "ConvBwdData",
    "ConvFwd",
    "ConvShape",
    "Epilogue",
    "GroupedConvBwdWeight",
    "Layout",
    "MaxPoolBwd",
    "MaxPoolFwd",
    "Piece",
    "PoolShape",
    "Problem",
    "TensorSpec",
    "problem_from",
]


class _FromRequest(Protocol):
    def from_request(self, request: Any, /) -> Problem: ...


PROBLEMS: Mapping[str, _FromRequest] = MappingProxyType(
    {
        "conv_bwd_data": ConvBwdData,
        "grouped_conv_bwd_weight": GroupedConvBwdWeight,
        "maxpool2d_bwd": MaxPoolBwd,
        "maxpool3d_bwd": MaxPoolBwd,
        "conv_fwd": ConvFwd,
        "maxpool2d_fwd": MaxPoolFwd,
        "maxpool3d_fwd": MaxPoolFwd,
    }
)
"""The problem class of every operation, by its name."""


def problem_from(operation: str, request: object) -> Problem:
    """The problem that a request of this operation states.

    Raises:
        InvalidProblem: its sizes, types or parameters contradict each other; the sentence says
            what was found and what was expected.
    """
    return PROBLEMS[operation].from_request(request)
