"""Problems: what a request asks for, with checked sizes, independent of how it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from convgrad.errors import InvalidProblem
from convgrad_service.problems.adaptive_maxpool import AdaptiveMaxPoolBwd, AdaptiveMaxPoolFwd
from convgrad_service.problems.avgpool import (
    AdaptiveAvgPoolBwd,
    AdaptiveAvgPoolFwd,
    AvgPoolBwd,
    AvgPoolFwd,
)
from convgrad_service.problems.base import Epilogue, Piece, Problem, TensorSpec
from convgrad_service.problems.conv3d_backprop_input import Conv3dBackpropInput
from convgrad_service.problems.conv_backward import ConvBackward
from convgrad_service.problems.conv_bwd_data import ConvBwdData
from convgrad_service.problems.conv_double_backward import (
    ConvDoubleBackward,
    ConvTransposeDoubleBackward,
)
from convgrad_service.problems.conv_fwd import ConvFwd
from convgrad_service.problems.conv_transpose import (
    Conv3dTranspose,
    ConvTransposeBackward,
    ConvTransposeFwd,
)
from convgrad_service.problems.examinations import examination_from
from convgrad_service.problems.geometry import ConvShape, PoolShape
from convgrad_service.problems.grouped_conv_bwd_weight import GroupedConvBwdWeight
from convgrad_service.problems.grouped_conv_conv_fwd import GroupedConvConvFwd
from convgrad_service.problems.layout_note import layout_note
from convgrad_service.problems.layouts import Layout
from convgrad_service.problems.max_unpool import MaxUnpoolBwd, MaxUnpoolFwd
from convgrad_service.problems.maxpool import MaxPoolBwd, MaxPoolFwd
from convgrad_service.problems.passes import ConvPasses, Pass
from convgrad_service.problems.pieces import run_in_pieces
from convgrad_service.problems.sizes import InconsistentSizes

__all__ = [
    "PROBLEMS",
    "AdaptiveAvgPoolBwd",
    "AdaptiveAvgPoolFwd",
    "AdaptiveMaxPoolBwd",
    "AdaptiveMaxPoolFwd",
    "AvgPoolBwd",
    "AvgPoolFwd",
    "Conv3dBackpropInput",
    "ConvBackward",
    "ConvBwdData",
    "ConvFwd",
    "ConvPasses",
    "ConvShape",
    "Epilogue",
    "GroupedConvBwdWeight",
    "GroupedConvConvFwd",
    "Layout",
    "MaxPoolBwd",
    "MaxPoolFwd",
    "MaxUnpoolBwd",
    "MaxUnpoolFwd",
    "Pass",
    "Piece",
    "PoolShape",
    "Problem",
    "TensorSpec",
    "problem_from",
    "run_in_pieces",
]


class _FromRequest(Protocol):
    def from_request(self, request: Any, /) -> Problem: ...


PROBLEMS: Mapping[str, _FromRequest] = MappingProxyType(
    {
        "conv_bwd_data": ConvBwdData,
        "grouped_conv_bwd_weight": GroupedConvBwdWeight,
        "maxpool2d_bwd": MaxPoolBwd,
        "maxpool3d_bwd": MaxPoolBwd,
        "conv3d_backprop_input": Conv3dBackpropInput,
        "grouped_conv_conv_fwd": GroupedConvConvFwd,
        "conv3d_transpose": Conv3dTranspose,
        "conv_fwd": ConvFwd,
        "maxpool2d_fwd": MaxPoolFwd,
        "maxpool3d_fwd": MaxPoolFwd,
        "conv_backward": ConvBackward,
        "conv_transpose_fwd": ConvTransposeFwd,
        "conv_transpose_backward": ConvTransposeBackward,
        "conv_double_backward": ConvDoubleBackward,
        "conv_transpose_double_backward": ConvTransposeDoubleBackward,
        "maxpool1d_fwd": MaxPoolFwd,
        "maxpool1d_bwd": MaxPoolBwd,
        "avg_pool_fwd": AvgPoolFwd,
        "avg_pool_bwd": AvgPoolBwd,
        "adaptive_avg_pool_fwd": AdaptiveAvgPoolFwd,
        "adaptive_avg_pool_bwd": AdaptiveAvgPoolBwd,
        "adaptive_max_pool_fwd": AdaptiveMaxPoolFwd,
        "adaptive_max_pool_bwd": AdaptiveMaxPoolBwd,
        "max_unpool_fwd": MaxUnpoolFwd,
        "max_unpool_bwd": MaxUnpoolBwd,
    }
)
"""The problem class of every operation, by the operation's name."""


def problem_from(operation: str, request: object) -> Problem:
    """Return the problem of a request.

    Raises
    ------
    InvalidProblem
        Sizes, types or parameters contradict each other; the message says what was found and what
        was expected.
    """
    problem = PROBLEMS.get(operation)
    if problem is not None:
        return _described(problem, request)
    return examination_from(request, lambda name, stated: _described(PROBLEMS[name], stated))


def _described(problem: _FromRequest, request: Any) -> Problem:
    try:
        return problem.from_request(request)
    except InconsistentSizes as refused:
        raise InvalidProblem(refused.detail + layout_note(request)) from None
