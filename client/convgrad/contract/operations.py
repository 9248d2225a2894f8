"""The registry of operations: inputs, outputs and a working example of each, by name.

Fields, tensors and the summary of an operation are taken from its request model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from convgrad.contract.adaptive_pooling import (
    AdaptiveAvgPoolBwdRequest,
    AdaptiveAvgPoolFwdRequest,
    AdaptiveMaxPoolBwdRequest,
    AdaptiveMaxPoolFwdRequest,
)
from convgrad.contract.average_pooling import AvgPoolBwdRequest, AvgPoolFwdRequest
from convgrad.contract.base import Request
from convgrad.contract.conv3d import Conv3dBackpropInputRequest, Conv3dTransposeRequest
from convgrad.contract.conv_double_backward import (
    ConvDoubleBackwardRequest,
    ConvTransposeDoubleBackwardRequest,
)
from convgrad.contract.conv_transpose import ConvTransposeBackwardRequest, ConvTransposeFwdRequest
from convgrad.contract.convolution import (
    ConvBackwardRequest,
    ConvBwdDataRequest,
    ConvFwdRequest,
    GroupedConvBwdWeightRequest,
)
from convgrad.contract.examples import EXAMPLES
from convgrad.contract.fused import GroupedConvConvFwdRequest
from convgrad.contract.pooling import (
    MaxPool1dBwdRequest,
    MaxPool1dFwdRequest,
    MaxPool2dBwdRequest,
    MaxPool2dFwdRequest,
    MaxPool3dBwdRequest,
    MaxPool3dFwdRequest,
)
from convgrad.contract.unpooling import MaxUnpoolBwdRequest, MaxUnpoolFwdRequest
from convgrad.dtypes import FLOATING, DType

__all__ = ["OPERATIONS", "Operation"]

_LAYOUTS_1D = ("NCW", "NWC", "NGCW", "NWGC", "GNWC")
_LAYOUTS_2D = ("NCHW", "NHWC", "NGCHW", "NHWGC", "GNHWC")
_LAYOUTS_3D = ("NCDHW", "NDHWC", "NGCDHW", "NDHWGC", "GNDHWC")
_GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
_SECOND_GRADIENTS = ("grad_grad_output", "grad_input", "grad_weight")
_LAYOUTS = _LAYOUTS_1D + _LAYOUTS_2D + _LAYOUTS_3D
_UNGROUPED = ("NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC")


@dataclass(frozen=True)
class Operation:
    """An operation: its request model, outputs, layouts and an example.

    ``outputs`` names every tensor an answer can hold, those always there first; ``layouts`` the
    values of ``layout`` (channels first by default), empty where each tensor has a
    format of its own; ``example`` is the JSON body of a small request that works.
    """

    request: type[Request]
    outputs: tuple[str, ...]
    layouts: tuple[str, ...] = _LAYOUTS
    dtypes: tuple[DType, ...] = FLOATING
    example: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(init=False)
    summary: str = field(init=False)
    tensors: tuple[str, ...] = field(init=False)
    required_tensors: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        set_once = object.__setattr__  # the dataclass is frozen
        set_once(self, "name", self.request.operation)
        set_once(self, "summary", (self.request.__doc__ or "").partition("\n")[0])
        set_once(self, "tensors", self.request.tensor_fields())
        set_once(self, "required_tensors", self.request.required_tensor_fields())
        set_once(self, "example", self.example or EXAMPLES[self.request.operation])


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        operation.name: operation
        for operation in (
            Operation(ConvBwdDataRequest, ("grad_input",)),
            Operation(GroupedConvBwdWeightRequest, ("grad_weight", "grad_bias")),
            Operation(MaxPool2dBwdRequest, ("grad_input",), ("NCHW", "NHWC")),
            Operation(MaxPool3dBwdRequest, ("grad_input",), ("NCDHW", "NDHWC")),
            Operation(Conv3dBackpropInputRequest, ("grad_input",), ()),
            Operation(GroupedConvConvFwdRequest, ("output",)),
            Operation(Conv3dTransposeRequest, ("output",), _LAYOUTS_3D),
            Operation(ConvFwdRequest, ("output",)),
            Operation(MaxPool2dFwdRequest, ("output", "indices"), ("NCHW", "NHWC")),
            Operation(MaxPool3dFwdRequest, ("output", "indices"), ("NCDHW", "NDHWC")),
            Operation(ConvBackwardRequest, _GRADIENTS),
            Operation(ConvTransposeFwdRequest, ("output",)),
            Operation(ConvTransposeBackwardRequest, _GRADIENTS),
            Operation(ConvDoubleBackwardRequest, _SECOND_GRADIENTS),
            Operation(ConvTransposeDoubleBackwardRequest, _SECOND_GRADIENTS),
            Operation(MaxPool1dFwdRequest, ("output", "indices"), ("NCW", "NWC")),
            Operation(MaxPool1dBwdRequest, ("grad_input",), ("NCW", "NWC")),
            Operation(AvgPoolFwdRequest, ("output",), _UNGROUPED),
            Operation(AvgPoolBwdRequest, ("grad_input",), _UNGROUPED),
            Operation(AdaptiveAvgPoolFwdRequest, ("output",), _UNGROUPED),
            Operation(AdaptiveAvgPoolBwdRequest, ("grad_input",), _UNGROUPED),
            Operation(AdaptiveMaxPoolFwdRequest, ("output", "indices"), _UNGROUPED),
            Operation(AdaptiveMaxPoolBwdRequest, ("grad_input",), _UNGROUPED),
            Operation(MaxUnpoolFwdRequest, ("output",), _UNGROUPED),
            Operation(MaxUnpoolBwdRequest, ("grad_input",), _UNGROUPED),
        )
    }
)
"""Every operation, by name."""
