"""TLS for both ports: the server's certificate, and clients' where they are asked for one.

Certificates are renewed while a server runs: a new connection gets what the files hold then.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from convgrad_service.server.settings import Settings

__all__ = ["Pem", "TlsError", "newest_pem", "server_context"]

# How often the files are looked at, at most.
_LOOK_S = 5.0

T = TypeVar("T")
# Of the certificate, of its key, and of the authorities of clients' certificates.
_Files = tuple[Path, Path, Path | None]


class TlsError(Exception):
    """The settings name no certificate that can be served; the sentence says why."""


class Pem(NamedTuple):
    """What the files of a certificate hold; ``authority`` is None where clients need none."""

    certificate: bytes
    key: bytes
    authority: bytes | None


def server_context(settings: Settings, protocol: str) -> ssl.SSLContext | None:
    """What a port that speaks ``protocol`` (its ALPN name) needs; None where TLS is off.

    Raises
    ------
    TlsError
        A file cannot be read, holds no such thing, or one of certificate and key is missing.
    """
    files = _files(settings)
    if files is None:
        return None
    renewed = _Renewed(files, lambda: _made(*files, protocol))

    def newest(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        handshake.context = renewed.current()

    listening = _made(*files, protocol)
    listening.sni_callback = newest  # called whether or not the client names one
    return listening


def newest_pem(settings: Settings) -> Callable[[], Pem] | None:
    """What gives the contents of the files, each time anew; None where TLS is off.

    Raises as `server_context`, at once and never later.
    """
    files = _files(settings)
    if files is None:
        return None

    def read() -> Pem:
        _made(*files, "h2")  # a TlsError where they do not belong together
        certificate, key, authority = files
        found = None if authority is None else authority.read_bytes()
        return Pem(certificate.read_bytes(), key.read_bytes(), found)

    return _Renewed(files, read).current


class _Renewed(Generic[T]):
    """What is made of some files, again whenever they have changed. For any thread."""

    def __init__(self, files: _Files, make: Callable[[], T]) -> None:
        self._files, self._make = [file for file in files if file is not None], make
        self._current = make()
        self._made_of, self._looked_s = _stamps(self._files), time.monotonic()

    def current(self) -> T:
        """What the files hold now; while they hold nothing whole, what they held before."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self._looked_s = time.monotonic()
            if (stamps := _stamps(self._files)) != self._made_of:
                # Half written, perhaps: then it is tried again.
                with contextlib.suppress(TlsError, OSError):
                    self._current, self._made_of = self._make(), stamps
        return self._current


def _files(settings: Settings) -> _Files | None:
    certificate, key, authority = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is not None and key is not None:
        return certificate, key, authority
    if certificate or key or authority:
        raise TlsError(
            "tls_certificate and tls_key belong together, and tls_client_ca to both; expected "
            "all that are needed, or none for plain text"
        )
    return None


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
