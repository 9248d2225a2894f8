"""Logging to stderr, as text or JSON; each record is one line, tracebacks included."""

from __future__ import annotations

import json
import logging
import logging.config
import time
from typing import Literal

from convgrad_service.engine.telemetry.access_log import ExchangeLine

__all__ = ["LogFormat", "configure_logs"]

LogFormat = Literal["text", "json"]


def configure_logs(level: str, format: LogFormat = "text") -> None:
    """Send the records of convgrad and uvicorn from ``level`` up to stderr."""
    formatter = _JsonFormatter if format == "json" else _TextFormatter
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"line": {"()": formatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "loggers": {
                name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
                for name in ("convgrad", "convgrad_service", "uvicorn")
            },
        }
    )


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
