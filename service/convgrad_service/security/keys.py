"""API keys: who may call, by keys whose hashes alone are stored.

A key is 256 random bits, so one SHA-256 of it is as good as any slow hash: there is nothing to
guess. The file has a line a key: ``name:hash``, and after it what the key may have where that is
not what the settings say, as in ``max_inflight=4 max_inflight_bytes=1GiB max_requests_per_s=none``.
Lines may be added, changed and taken out while the server runs. Names appear in logs and metrics,
keys and hashes nowhere.
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
from typing import Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from convgrad.errors import Unauthenticated
from convgrad_service.engine.scheduling.quotas import NO_LIMITS, Caller, KeyLimits

__all__ = ["NAME", "KeyRing", "KeysError", "hash_of", "new_key", "read_keys", "read_line"]

_log = logging.getLogger("convgrad.keys")

PREFIX = "cg_"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
# How often the file is looked at, at most.
_LOOK_S = 1.0
_LIMIT = "max_"
_LIMITS: Mapping[str, TypeAdapter[Any]] = {
    "inflight": TypeAdapter(Annotated[int, Field(gt=0)]),
    "inflight_bytes": TypeAdapter(Annotated[ByteSize, Field(gt=0)]),
    "requests_per_s": TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)]),
}


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

    ``limits`` are those of keys whose lines do not say otherwise.

    Raises:
        KeysError: the file cannot be read, or has a line that is none.
    """

    def __init__(self, path: Path, limits: KeyLimits = NO_LIMITS) -> None:
        self._path, self._limits = path, limits
        self._seen = self._stamp()
        self._callers = read_keys(path, limits)
        self._looked_s = time.monotonic()

    def caller(self, authorization: str | None) -> Caller:
        """Whose key is in an Authorization header, ``Bearer <key>``, and what it may have.

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
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, presented_hash):
                found = caller
        if found is None:
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
            self._callers = read_keys(self._path, self._limits)
        except KeysError as error:
            # A slip in the file must neither let everybody in nor shut everybody out.
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.info("read %d keys from %s", len(self._callers), self._path)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def read_keys(path: Path, limits: KeyLimits = NO_LIMITS) -> Mapping[str, Caller]:
    """Callers by hash. Empty lines and those that begin with # mean nothing.

    Raises:
        KeysError: the file cannot be read, or has a line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
    callers: dict[str, Caller] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            digest, caller = read_line(text, limits)
        except KeysError as error:
            raise KeysError(f"{path}, line {number}: {error}") from None
        callers[digest] = caller
    return callers


def read_line(line: str, limits: KeyLimits = NO_LIMITS) -> tuple[str, Caller]:
    """The hash and the caller of one line.

    Raises:
        KeysError: it is no such line; the message says what was expected.
    """
    key, *words = line.split()
    name, _, digest = key.partition(":")
    if not (NAME.fullmatch(name) and _HASH.fullmatch(digest)):
        # What was found is not shown: it may be a key that was pasted into the wrong place.
        raise KeysError(
            "expected a name, a colon and 64 hexadecimal digits, as convgrad key prints them"
        )
    given = dict(_limit(word) for word in words)
    return digest, Caller(name, limits._replace(**given))


def _limit(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    kind = _LIMITS.get(name.removeprefix(_LIMIT)) if name.startswith(_LIMIT) and equals else None
    if kind is None:
        names = ", ".join(f"{_LIMIT}{known}=…" for known in _LIMITS)
        raise KeysError(f"after a key's hash, expected one of {names}; got {word[:64]!r}")
    if value == "none":
        return name.removeprefix(_LIMIT), None
    try:
        return name.removeprefix(_LIMIT), kind.validate_python(value)
    except ValidationError as error:
        raise KeysError(
            f"{name}: {error.errors()[0]['msg']}, or none; got {value[:64]!r}"
        ) from None
