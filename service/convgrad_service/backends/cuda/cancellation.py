"""Waiting for the GPU or the compiler until a request is cancelled."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from convgrad.errors import DeadlineExceeded
from convgrad_service.backends.base import Cancellation

__all__ = ["stop_if", "wait_for"]

_POLL_S = 0.05


def stop_if(cancelled: threading.Event | None) -> None:
    """Report progress and raise DeadlineExceeded if cancelled; called between a problem's steps."""
    if isinstance(cancelled, Cancellation):
        cancelled.advanced()
    if cancelled is not None and cancelled.is_set():
        raise DeadlineExceeded("the request was cancelled before it was computed")


def wait_for(compiled: Future[None] | None, cancelled: threading.Event | None) -> None:
    """Wait until kernels are compiled; raise the compiler's error, or as `stop_if`."""
    while compiled is not None:
        try:
            compiled.result(_POLL_S)
            break
        except TimeoutError:
            if cancelled is not None and cancelled.is_set():
                compiled.cancel()
            stop_if(cancelled)
