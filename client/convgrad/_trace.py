"""Trace headers of the caller's OpenTelemetry span."""

from __future__ import annotations

import sys
from collections.abc import Mapping

__all__ = ["trace_headers"]


def trace_headers() -> Mapping[str, str]:
    """Return the headers of OpenTelemetry's propagators for the current span: ``traceparent``, ….

    Empty if the program has not imported OpenTelemetry; this package does not import it itself.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return {name.lower(): value for name, value in headers.items()}
