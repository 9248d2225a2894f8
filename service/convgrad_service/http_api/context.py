"""What is known of one HTTP exchange while it lasts: its id, its timings, how it ended."""

from __future__ import annotations

import re
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from convgrad_service.engine.timing import Timings

__all__ = ["RequestContext", "context_of"]

_KEY = "convgrad.context"
# Printable ASCII, spaces included: it goes back in a header and into log lines as it came.
_ACCEPTABLE_ID = re.compile(r"[ -~]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """One exchange. ``operation`` is set once the path is known to be one; ``code`` is "ok" or
    the code of the error it was answered with."""

    request_id: str
    timings: Timings = field(default_factory=Timings)
    operation: str | None = None
    code: str = "ok"
    status: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    @classmethod
    def begin(cls, scope: MutableMapping[str, Any]) -> RequestContext:
        """The context of the exchange of ``scope``, kept there for `context_of`."""
        context = cls(_request_id(scope["headers"]))
        scope[_KEY] = context
        return context

    def server_timing(self) -> bytes:
        """The value of Server-Timing: milliseconds, as that header has them."""
        stages = [*self.timings.stages_s.items(), ("total", self.timings.total_s)]
        return ", ".join(f"{name};dur={seconds * 1e3:.3f}" for name, seconds in stages).encode()


def context_of(scope: MutableMapping[str, Any]) -> RequestContext:
    """The context that the middleware put into ``scope``."""
    context: RequestContext = scope[_KEY]
    return context


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _ACCEPTABLE_ID.fullmatch(text := value.decode("latin-1")):
            return text
    return uuid.uuid4().hex
