"""API keys: who may call, by keys whose hashes alone are stored.

A key is 256 random bits, so one SHA-256 of it is as good as any slow hash: there is nothing to
guess. The file has a line a key, ``name:hash``; lines may be added and taken out while the server
runs. Names appear in logs and metrics, keys and hashes nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from convgrad.errors import Unauthenticated

__all__ = ["NAME", "KeyRing", "KeysError", "hash_of", "new_key", "read_keys"]

_log = logging.getLogger("convgrad.keys")

PREFIX = "cg_"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
# How often the file is looked at, at most.
_LOOK_S = 1.0


class KeysError(ValueError):
    """The file of keys cannot be used; the message says why, and where."""


def new_key() -> str:
    """A fresh key. It is shown once, to whom it is for; the server keeps its hash."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys of one file, read again when it changes. For use in one thread.

    Raises:
        KeysError: the file cannot be read, or has a line that is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self._names = read_keys(path)
        self._looked_s = time.monotonic()

    def owner(self, authorization: str | None) -> str:
        """The name of the key in an Authorization header, ``Bearer <key>``.

        Every stored hash is compared, in constant time: how long it takes tells nothing.

        Raises:
            Unauthenticated: there is none, or none that the file knows.
        """
        self._refresh()
        scheme, _, presented = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not presented:
            raise Unauthenticated(
                "this server needs an API key; expected the header Authorization: Bearer <key>"
            )
        presented_hash = hash_of(presented.strip())
        found = ""
        for known, name in self._names.items():
            if hmac.compare_digest(known, presented_hash):
                found = name
        if not found:
            raise Unauthenticated("the API key is not one that this server knows")
        return found

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._names = read_keys(self._path)
        except KeysError as error:
            # A slip in the file must neither let everybody in nor shut everybody out.
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.info("read %d keys from %s", len(self._names), self._path)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def read_keys(path: Path) -> Mapping[str, str]:
    """Names by hash. Empty lines and those that begin with # mean nothing.

    Raises:
        KeysError: the file cannot be read, or has a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
    names: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, _, digest = text.partition(":")
        if not (NAME.fullmatch(name) and _HASH.fullmatch(digest)):
            raise KeysError(
                f"{path}, line {number}: expected a name, a colon and 64 hexadecimal digits, "
                "as convgrad key prints them"
            )
        names[digest] = name
    return names
