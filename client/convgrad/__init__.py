"""convgrad: gradients of convolution and pooling layers, computed on a server.

::

    import convgrad

    with convgrad.Client("http://127.0.0.1:8000") as client:
        grad_input = client.conv_bwd_data(grad_output, weight, stride=2, padding=1)

Names load on first use: ``import convgrad`` alone imports neither httpx nor pydantic nor NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from convgrad._version import __version__

if TYPE_CHECKING:
    from convgrad import _calls as calls
    from convgrad import check as check
    from convgrad import errors as errors
    from convgrad import layers as layers
    from convgrad._async_client import AsyncClient
    from convgrad._call import Answer, Call, Stored
    from convgrad._client import Client
    from convgrad._events import (
        EventHooks,
        FailureEvent,
        ProgressEvent,
        RequestEvent,
        ResponseEvent,
        RetryEvent,
    )
    from convgrad._parts import Part
    from convgrad._progress import progress_bars
    from convgrad._results import (
        ConvBackwardResult,
        ConvDoubleBackwardResult,
        ConvWeightResult,
        MaxPoolResult,
    )
    from convgrad.contract import Report
    from convgrad.dtypes import DType
    from convgrad.errors import (
        ClientError,
        ClientTimeout,
        ConnectionFailed,
        ConvgradError,
        DeadlineExceeded,
        DeviceOutOfMemory,
        DeviceUnavailable,
        GatewayError,
        Internal,
        InvalidAnswer,
        InvalidProblem,
        MalformedRequest,
        MethodNotAllowed,
        NotAcceptable,
        NotFound,
        Overloaded,
        PayloadTooLarge,
        PermissionDenied,
        ProblemTooLarge,
        RequestTimeout,
        ServiceError,
        Unauthenticated,
        UnsupportedMediaType,
        UnsupportedProblem,
    )

__all__ = [
    "Answer",
    "AsyncClient",
    "Call",
    "Client",
    "ClientError",
    "ClientTimeout",
    "ConnectionFailed",
    "ConvBackwardResult",
    "ConvDoubleBackwardResult",
    "ConvWeightResult",
    "ConvgradError",
    "DType",
    "DeadlineExceeded",
    "DeviceOutOfMemory",
    "DeviceUnavailable",
    "EventHooks",
    "FailureEvent",
    "GatewayError",
    "Internal",
    "InvalidAnswer",
    "InvalidProblem",
    "MalformedRequest",
    "MaxPoolResult",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "Overloaded",
    "Part",
    "PayloadTooLarge",
    "PermissionDenied",
    "ProblemTooLarge",
    "ProgressEvent",
    "Report",
    "RequestEvent",
    "RequestTimeout",
    "ResponseEvent",
    "RetryEvent",
    "ServiceError",
    "Stored",
    "Unauthenticated",
    "UnsupportedMediaType",
    "UnsupportedProblem",
    "__version__",
    "calls",
    "check",
    "errors",
    "layers",
    "progress_bars",
]

_HOMES = {
    "Answer": "convgrad._call",
    "AsyncClient": "convgrad._async_client",
    "Call": "convgrad._call",
    "Client": "convgrad._client",
    "ConvBackwardResult": "convgrad._results",
    "ConvDoubleBackwardResult": "convgrad._results",
    "ConvWeightResult": "convgrad._results",
    "DType": "convgrad.dtypes",
    "EventHooks": "convgrad._events",
    "FailureEvent": "convgrad._events",
    "MaxPoolResult": "convgrad._results",
    "Part": "convgrad._parts",
    "ProgressEvent": "convgrad._events",
    "Report": "convgrad.contract",
    "RequestEvent": "convgrad._events",
    "ResponseEvent": "convgrad._events",
    "RetryEvent": "convgrad._events",
    "Stored": "convgrad._call",
    "progress_bars": "convgrad._progress",
}
_MODULES = {
    "calls": "convgrad._calls",
    "check": "convgrad.check",
    "errors": "convgrad.errors",
    "layers": "convgrad.layers",
}

if not TYPE_CHECKING:  # a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _MODULES:
            found = importlib.import_module(_MODULES[name])
        else:
            # Every name not listed is an error class: all of convgrad.errors is public.
            home = importlib.import_module(_HOMES.get(name, "convgrad.errors"))
            found = getattr(home, name)
        globals()[name] = found  # later accesses skip __getattr__
        return found

    def __dir__() -> list[str]:
        return sorted(set(globals()) | set(__all__))
