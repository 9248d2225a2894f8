"""An httpx transport that counts and times requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

import httpx

__all__ = ["Meter", "MeteredTransport"]


@dataclass(slots=True)
class Meter:
    """Bytes of bodies sent and received, and the duration of each request in seconds."""

    sent_bytes: int = 0
    received_bytes: int = 0
    durations_s: list[float] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return len(self.durations_s)

    @property
    def median_s(self) -> float:
        return median(self.durations_s) if self.durations_s else 0.0


class MeteredTransport(httpx.BaseTransport):
    """Forwards requests to another transport and records them in ``meter``."""

    def __init__(self, inner: httpx.BaseTransport, meter: Meter) -> None:
        self._inner = inner
        self._meter = meter

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        started = time.perf_counter()
        response = self._inner.handle_request(request)
        self._meter.sent_bytes += int(request.headers.get("Content-Length", 0))
        return httpx.Response(
            status_code=response.status_code,
            headers=response.headers,
            stream=_MeteredStream(response, started, self._meter),
            extensions=response.extensions,
        )

    def close(self) -> None:
        self._inner.close()


class _MeteredStream(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, started: float, meter: Meter) -> None:
        self._response = response
        self._started = started
        self._meter = meter

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._response.iter_raw():
            self._meter.received_bytes += len(chunk)
            yield chunk

    def close(self) -> None:
        self._response.close()
        self._meter.durations_s.append(time.perf_counter() - self._started)
