"""Checks of settings that need more than a type; each raises ValueError and says what is wrong."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from pydantic import ByteSize

from convgrad_service.security.keys import read_keys
from convgrad_service.server.warm_up import read_warm_up

_MiB = 2**20
PROCESSES_BYTES = 384 * _MiB
"""Memory of the interpreters, libraries and threads of a server's processes, and kept by malloc."""
LEAST_MEMORY_BYTES = PROCESSES_BYTES + 128 * _MiB


def valid_memory(size_bytes: ByteSize) -> ByteSize:
    """Return the memory that a server may use."""
    if size_bytes < LEAST_MEMORY_BYTES:
        raise ValueError(
            f"expected at least {LEAST_MEMORY_BYTES // _MiB} MiB, of which the server's processes "
            f"take {PROCESSES_BYTES // _MiB}, got {size_bytes:,} bytes"
        )
    return size_bytes


def valid_key_file(path: Path) -> Path:
    """Return the path of a file of API keys."""
    read_keys(path)
    return path


def valid_warm_up_file(path: Path) -> Path:
    """Return the path of a warm-up file."""
    read_warm_up(path)
    return path


def valid_tuning_table(path: Path) -> Path:
    """Return the path of a table of tuned layers."""
    # Imported here: reading it needs the GPU planner's modules, which take long to import.
    from convgrad_service.backends.cuda.tuning.tuned import read_table

    read_table(path)
    return path


def valid_otlp_endpoint(url: str) -> str:
    """Return the URL of an OTLP endpoint."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"expected a URL that begins with http:// or https://, got {url!r}")
    try:
        installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # a parent package is missing
        installed = False
    if not installed:
        raise ValueError("tracing needs convgrad[otel], which is not installed")
    return url


def valid_origins(origins: str) -> str:
    """Return comma-separated origins, as browsers send them in the header Origin."""
    for origin in filter(None, map(str.strip, origins.split(","))):
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+", origin):
            raise ValueError(
                f"{origin!r} is not an origin; expected scheme://host or scheme://host:port, in "
                "lower case and without a path, or *"
            )
    return origins
