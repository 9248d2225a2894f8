"""Logging to stderr, as text or JSON; each record is one line, tracebacks included."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Literal

from convgrad_service.engine.telemetry.record import ExchangeLine

LogFormat = Literal["text", "json"]


def configure_logs(level: str, format: LogFormat = "text") -> None:
    """Send the records of convgrad and uvicorn from ``level`` up to stderr.

    Everything else that Python would print there becomes a record too: warnings and errors of other
    packages, Python's warnings, and the tracebacks of unhandled exceptions.
    """
    if format == "json":
        # gRPC's library writes its own lines, such as those of failed handshakes.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # What no format shows need not be found out for every record (Python's logging HOWTO).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    for name in ("convgrad", "convgrad_service", "uvicorn", "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(level.upper())
    # Loggers without a handler use this one.
    logging.lastResort = logging.StreamHandler()
    logging.lastResort.setFormatter(handler.formatter)
    logging.lastResort.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    sys.excepthook = _log_unhandled
    threading.excepthook = lambda unhandled: _log_unhandled(*unhandled[:3])


def _log_unhandled(
    kind: type[BaseException],
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    if issubclass(kind, Exception):
        exc_info = kind, error or kind(), traceback
        logging.getLogger("convgrad").critical("unhandled exception", exc_info=exc_info)


class _UtcFormatter(logging.Formatter):
    def converter(self, timestamp: float | None) -> time.struct_time:
        return time.gmtime(timestamp)


class _TextFormatter(_UtcFormatter):
    """Time, level, logger, message; the message of a request is ``name=value`` pairs."""

    def __init__(self) -> None:
        line = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s"
        super().__init__(line, "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        # Log collectors treat each line as a record.
        return super().format(record).replace("\n", r"\n")


class _JsonFormatter(_UtcFormatter):
    """One JSON object per line; the fields of a request are its members."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        message: object = record.msg
        if isinstance(message, ExchangeLine):
            line |= message.fields()
        else:
            line["message"] = record.getMessage()
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
