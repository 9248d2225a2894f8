"""``convgrad probe``: check whether the server that the environment's settings describe is ready.

For a container's HEALTHCHECK, which runs with the server's environment. It uses TLS if the server
does, and trusts exactly the server's certificate, whatever its name.
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

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to


def probe(argv: Sequence[str] | None = None) -> int:
    """Probe the server; return the exit status: 0 if ready, 1 if not, 2 for invalid settings."""
    parser = argparse.ArgumentParser(
        prog="convgrad probe",
        description="Check whether the server on this machine that the environment's settings "
        "describe (CONVGRAD_HTTP_PORT, CONVGRAD_TLS_CERTIFICATE and others) is ready. Uses "
        "CONVGRAD_MANAGEMENT_PORT if it is set. Without it, if clients need certificates, only "
        "checks that the port is open, because a probe has no certificate.",
        allow_abbrev=False,
    )
    parser.add_argument("--live", action="store_true", help="check only that the process answers")
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for the answer (default: 5)",
    )
    options = parser.parse_args(argv)
    try:
        # An error in the key file, which the server reloads, does not make the server unhealthy.
        settings = Settings(api_keys=None, otlp_endpoint=None)
    except ValidationError as error:
        print(f"convgrad probe: {error}", file=sys.stderr)
        return 2
    state = "live" if options.live else "ready"
    try:
        failure = _failure(settings, f"/v2/health/{state}", options.timeout)
    except (OSError, http.client.HTTPException) as error:
        failure = str(error) or type(error).__name__
    print(state if failure is None else f"not {state}: {failure}")
    return 0 if failure is None else 1


def _failure(settings: Settings, path: str, timeout_s: float) -> str | None:
    """Return why the health check failed, or None."""
    host = _WILDCARDS.get(settings.http_host, settings.http_host)
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
    # The probe connects to an address, not to the certificate's name.
    context.check_hostname = False
    # Trust this certificate itself, whoever signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
