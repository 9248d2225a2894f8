"""Certificates for tests, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TlsFiles"]


@dataclass(frozen=True)
class TlsFiles:
    """An authority's certificate, and certificates with keys that it signed."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> TlsFiles:
        """An authority's, and what it signed for a server and a client."""
        made = cls(folder)
        made.found()
        for name in ("server", "client"):
            made.sign(name)
        return made

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def sign(self, name: str) -> None:
        """Make (again) what is signed for ``name``."""
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                      "-keyout", self.key(name), "-out", self.folder / "request",
                      "-subj", f"/CN={name}", "-addext", names)  # fmt: skip
        self._openssl("x509", "-req", "-in", self.folder / "request", "-CA", self.authority,
                      "-CAkey", self.key("ca"), "-CAcreateserial", "-days", "2",
                      "-copy_extensions", "copyall", "-out", self.certificate(name))  # fmt: skip

    def found(self) -> None:
        """Make the authority."""
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                      "-nodes", "-keyout", self.key("ca"), "-out", self.authority,
                      "-subj", "/CN=authority", "-days", "2")  # fmt: skip

    def server(self) -> dict[str, Any]:
        """Settings of a server with the certificate of that name."""
        return {"tls_certificate": self.certificate("server"), "tls_key": self.key("server")}

    def client_context(self, name: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority)
        if name is not None:
            context.load_cert_chain(self.certificate(name), self.key(name))
        return context

    @staticmethod
    def _openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
