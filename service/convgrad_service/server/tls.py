"""TLS for the HTTP and gRPC ports, with client certificates if the settings ask for them.

Renewed certificate files apply to new connections without a restart.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from convgrad_service.server.settings import Settings

_log = logging.getLogger("convgrad.server")
# Minimum interval between checks whether the files have changed.
_CHECK_S = 5.0

T = TypeVar("T")
# Certificate chain, private key, and authorities of client certificates.
_Files = tuple[Path, Path, Path | None]


class TlsError(Exception):
    """The certificate that the settings name cannot be used; the message says why."""


class Pem(NamedTuple):
    """Contents of the PEM files; ``authority`` is None if clients need no certificate."""

    certificate: bytes
    key: bytes
    authority: bytes | None


def server_context(settings: Settings, protocol: str) -> ssl.SSLContext | None:
    """Make the context of a port with the ALPN protocol ``protocol``; None if TLS is off.

    Raises
    ------
    TlsError
        A file cannot be read, is not valid PEM, or one of certificate and key is missing.
    """
    files = _files(settings)
    if files is None:
        return None
    reloaded = _Reloaded(files, lambda: _context(*files, protocol))

    def use_current(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        handshake.context = reloaded.current()

    context = _context(*files, protocol)
    context.sni_callback = use_current  # called even if the client sends no server name
    return context


def newest_pem(settings: Settings) -> Callable[[], Pem] | None:
    """Return a function that returns the files' current contents; None if TLS is off.

    Raises like `server_context`; the returned function does not raise.
    """
    files = _files(settings)
    if files is None:
        return None

    def read() -> Pem:
        _context(*files, "h2")  # raises TlsError if the files do not match
        certificate, key, authority = files
        authorities = None if authority is None else authority.read_bytes()
        return Pem(certificate.read_bytes(), key.read_bytes(), authorities)

    return _Reloaded(files, read).current


class _Reloaded(Generic[T]):
    """A value made from files, made again when they change. Thread-safe."""

    def __init__(self, files: _Files, make: Callable[[], T]) -> None:
        self._files, self._make = [file for file in files if file is not None], make
        self._current = make()
        self._stamps, self._checked_s = _stamps(self._files), time.monotonic()
        self._tried, self._failures = self._stamps, 0

    def current(self) -> T:
        """Return the value for the files' current contents, or the last one that was valid."""
        if time.monotonic() - self._checked_s > _CHECK_S:
            self._checked_s = time.monotonic()
            if (stamps := _stamps(self._files)) != self._stamps:
                try:
                    self._current, self._stamps = self._make(), stamps
                except (TlsError, OSError) as error:
                    # The files may be half written; each check tries again, the second warns.
                    self._failures = self._failures + 1 if stamps == self._tried else 1
                    self._tried = stamps
                    if self._failures == 2:
                        _log.warning("%s; the previous certificate remains in use", error)
        return self._current


def _files(settings: Settings) -> _Files | None:
    certificate, key, authority = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is not None and key is not None:
        return certificate, key, authority
    if certificate or key or authority:
        raise TlsError(
            "tls_certificate and tls_key must be set together, and tls_client_ca only with both; "
            "set none of the three for plain text"
        )
    return None


def _context(certificate: Path, key: Path, authority: Path | None, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    try:
        # An empty password makes an encrypted key an error instead of a prompt on the terminal.
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
