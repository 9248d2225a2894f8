"""The caller's trace, where the program keeps one with OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Mapping

__all__ = ["trace_headers"]


def trace_headers() -> Mapping[str, str]:
    """What OpenTelemetry's propagators send of the current span: ``traceparent`` and its like.

    Nothing where the program has not imported OpenTelemetry, which this package never does first.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return {name.lower(): value for name, value in headers.items()}
