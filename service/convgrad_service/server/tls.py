"""TLS for both ports: the server's certificate, and clients' where they are asked for one.

Certificates are renewed while a server runs: a new connection gets what the files hold then.
"""

from __future__ import annotations

import ssl
import time
from pathlib import Path

from convgrad_service.server.settings import Settings

__all__ = ["TlsError", "server_context"]

# How often the files are looked at, at most.
_LOOK_S = 5.0


class TlsError(Exception):
    """The settings name no certificate that can be served; the sentence says why."""


def server_context(settings: Settings, protocol: str) -> ssl.SSLContext | None:
    """What a port that speaks ``protocol`` (its ALPN name) needs; None where TLS is off.

    Raises
    ------
    TlsError
        A file cannot be read, holds no such thing, or one of certificate and key is missing.
    """
    certificate, key, authority = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None or key is None:
        if certificate or key or authority:
            raise TlsError(
                "tls_certificate and tls_key belong together, and tls_client_ca to both; expected "
                "all that are needed, or none for plain text"
            )
        return None
    files = [certificate, key, *([authority] if authority else [])]
    current = _made(certificate, key, authority, protocol)
    made_of, looked_s = _stamps(files), time.monotonic()

    def newest(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        nonlocal current, made_of, looked_s
        if time.monotonic() - looked_s > _LOOK_S:
            looked_s = time.monotonic()
            if (stamps := _stamps(files)) != made_of:
                try:
                    current, made_of = _made(certificate, key, authority, protocol), stamps
                except TlsError:
                    return  # half written, perhaps: the old one serves until it is whole
        handshake.context = current

    listening = _made(certificate, key, authority, protocol)
    listening.sni_callback = newest  # called whether or not the client names one
    return listening


def _made(certificate: Path, key: Path, authority: Path | None, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        # The empty password: a key that needs one is refused instead of asked for on a terminal.
        context.load_cert_chain(certificate, key, password="")
        if authority is not None:
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        raise TlsError(
            f"cannot serve TLS with {certificate}, {key}"
            f"{f' and {authority}' if authority else ''}: {error}"
        ) from None
    return context


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    stamps = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            stamps.append((0, 0))
        else:
            stamps.append((found.st_mtime_ns, found.st_ino))
    return stamps
