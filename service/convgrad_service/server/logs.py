"""Log lines: time, level, logger, message; a request's line is made of ``key=value`` pairs."""

from __future__ import annotations

import logging
import logging.config
import time

__all__ = ["configure_logs"]


def configure_logs(level: str) -> None:
    """Send ours and uvicorn's to stderr, from ``level`` up. stdout is left to the command."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "line": {
                    "format": "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s %(message)s",
                    "datefmt": "%Y-%m-%dT%H:%M:%S",
                    "()": _utc_formatter,
                }
            },
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
            "loggers": {
                name: {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
                for name in ("convgrad", "convgrad_service", "uvicorn")
            },
        }
    )


def _utc_formatter(format: str, datefmt: str) -> logging.Formatter:
    formatter = logging.Formatter(format, datefmt)
    formatter.converter = time.gmtime
    return formatter
