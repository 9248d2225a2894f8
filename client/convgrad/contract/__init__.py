"""The contract shared by client and server: request models, operation registry and report."""

from __future__ import annotations

from convgrad.contract.adaptive_pooling import (
    AdaptiveAvgPoolBwdRequest,
    AdaptiveAvgPoolFwdRequest,
    AdaptiveMaxPoolBwdRequest,
    AdaptiveMaxPoolFwdRequest,
)
from convgrad.contract.average_pooling import AvgPoolBwdRequest, AvgPoolFwdRequest
from convgrad.contract.base import Parameters, Request, drop_unset, refuse_unknown, validate
from convgrad.contract.conv3d import Conv3dBackpropInputRequest, Conv3dTransposeRequest, Region
from convgrad.contract.conv_double_backward import (
    ConvDoubleBackwardRequest,
    ConvTransposeDoubleBackwardRequest,
)
from convgrad.contract.conv_transpose import ConvTransposeBackwardRequest, ConvTransposeFwdRequest
from convgrad.contract.convolution import (
    ConvBackwardRequest,
    ConvBwdDataRequest,
    ConvFwdRequest,
    ConvRequest,
    GroupedConvBwdWeightRequest,
)
from convgrad.contract.fused import ConvParameters, GroupedConvConvFwdRequest
from convgrad.contract.operations import OPERATIONS, Operation
from convgrad.contract.pooling import (
    MaxPool1dBwdRequest,
    MaxPool1dFwdRequest,
    MaxPool2dBwdRequest,
    MaxPool2dFwdRequest,
    MaxPool3dBwdRequest,
    MaxPool3dFwdRequest,
    MaxPoolBwdRequest,
    MaxPoolFwdRequest,
)
from convgrad.contract.report import Report
from convgrad.contract.stored_names import check_stored_name
from convgrad.contract.tensor_schema import tensor_json_schema
from convgrad.contract.unpooling import MaxUnpoolBwdRequest, MaxUnpoolFwdRequest

__all__ = [
    "OPERATIONS",
    "AdaptiveAvgPoolBwdRequest",
    "AdaptiveAvgPoolFwdRequest",
    "AdaptiveMaxPoolBwdRequest",
    "AdaptiveMaxPoolFwdRequest",
    "AvgPoolBwdRequest",
    "AvgPoolFwdRequest",
    "Conv3dBackpropInputRequest",
    "Conv3dTransposeRequest",
    "ConvBackwardRequest",
    "ConvBwdDataRequest",
    "ConvDoubleBackwardRequest",
    "ConvFwdRequest",
    "ConvParameters",
    "ConvRequest",
    "ConvTransposeBackwardRequest",
    "ConvTransposeDoubleBackwardRequest",
    "ConvTransposeFwdRequest",
    "GroupedConvBwdWeightRequest",
    "GroupedConvConvFwdRequest",
    "MaxPool1dBwdRequest",
    "MaxPool1dFwdRequest",
    "MaxPool2dBwdRequest",
    "MaxPool2dFwdRequest",
    "MaxPool3dBwdRequest",
    "MaxPool3dFwdRequest",
    "MaxPoolBwdRequest",
    "MaxPoolFwdRequest",
    "MaxUnpoolBwdRequest",
    "MaxUnpoolFwdRequest",
    "Operation",
    "Parameters",
    "Region",
    "Report",
    "Request",
    "check_stored_name",
    "drop_unset",
    "refuse_unknown",
    "tensor_json_schema",
    "validate",
]
