"""``convgrad probe``: whether the server that these settings describe takes work.

For a container's HEALTHCHECK, which runs beside the server with its environment: it speaks TLS
where the server does, and trusts the very certificate that the server was given, whatever its name.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from convgrad_service.server.settings import Settings

__all__ = ["probe"]

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to


def probe(argv: Sequence[str] | None = None) -> int:
    """Ask; the exit code: 0 if it takes work, 1 if not, 2 for bad settings."""
    parser = argparse.ArgumentParser(
        prog="convgrad probe",
        description="Ask the server on this machine that the environment's settings describe "
        "(CONVGRAD_HTTP_PORT, CONVGRAD_TLS_CERTIFICATE and others) whether it takes work; on "
        "CONVGRAD_MANAGEMENT_PORT where that is set. Where there is none, and clients must show "
        "certificates, only whether the port is open is asked: a probe has none to show.",
        allow_abbrev=False,
    )
    parser.add_argument("--live", action="store_true", help="ask only whether the process answers")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    try:
        # A slip in a file that the server reads again is no reason to call it ill.
        settings = Settings(api_keys=None, otlp_endpoint=None)
    except ValidationError as error:
        print(f"convgrad probe: {error}", file=sys.stderr)
        return 2
    question = "live" if options.live else "ready"
    try:
        refusal = _ask(settings, f"/v2/health/{question}", options.timeout)
    except (OSError, http.client.HTTPException) as error:
        refusal = str(error) or type(error).__name__
    print(question if refusal is None else f"not {question}: {refusal}")
    return 0 if refusal is None else 1


def _ask(settings: Settings, path: str, timeout_s: float) -> str | None:
    """What the server says against it; None if nothing."""
    host = _EVERYWHERE.get(settings.http_host, settings.http_host)
    connection: http.client.HTTPConnection
    if settings.management_port is not None:
        connection = http.client.HTTPConnection(host, settings.management_port, timeout=timeout_s)
    elif settings.tls_client_ca is not None:
        socket.create_connection((host, settings.http_port), timeout_s).close()
        return None
    elif settings.tls_certificate is None:
        connection = http.client.HTTPConnection(host, settings.http_port, timeout=timeout_s)
    else:
        connection = http.client.HTTPSConnection(
            host, settings.http_port, timeout=timeout_s, context=_trusting(settings.tls_certificate)
        )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(4096)
    finally:
        connection.close()
    if answer.status == 200:
        return None
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {answer.status}"


def _trusting(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificate)
    # Its name is its callers' business: here it is asked by an address.
    context.check_hostname = False
    # The certificate itself is the anchor, whoever signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
