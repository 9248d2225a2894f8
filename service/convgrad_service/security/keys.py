"""API keys, of which the server stores only the hashes.

A key is 256 random bits, so a single SHA-256 is as good as a slow hash: it cannot be guessed. The
timing of the lookup by hash may reveal something about a hash, but no key follows from that. The
file has one line per key: ``name:hash``, optionally followed by

- limits that override the settings, as in ``max_inflight=4 max_inflight_bytes=1GiB
  max_requests_per_s=none max_flops_per_s=1e12``,
- ``scopes=infer,metrics`` to restrict what the key may do, see `SCOPES`,
- ``expires=2027-01-31T12:00:00Z``.

A name may have several keys, which share its limits, so that keys can be rotated. The file may be
edited while the server runs. Names appear in logs and metrics, keys and hashes never.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from convgrad.errors import PermissionDenied, Unauthenticated
from convgrad_service.engine.scheduling.quotas import NO_LIMITS, Caller, KeyLimits

INFER, METRICS, ADMIN = "infer", "metrics", "admin"
SCOPES = frozenset({INFER, METRICS, ADMIN})
"""``infer``: compute and store tensors; ``metrics``: read metrics and statistics; ``admin``:
register shared memory. Descriptions of the server need no scope."""

_FOLDERS = (
    ("/v2/systemsharedmemory", ADMIN),
    ("/v2/cudasharedmemory", ADMIN),
    ("/tensors", INFER),
    ("/metrics", METRICS),
)
# Clients of the protocol request this description of the server by POST.
_INDEX = "/v2/repository/index"
_METHODS = {
    "ModelInfer": INFER,
    "ModelStreamInfer": INFER,
    "ModelStatistics": METRICS,
}


_log = logging.getLogger("convgrad.keys")

KEY_REFUSALS = frozenset({Unauthenticated.code, PermissionDenied.code})
"""Error codes of requests refused for their key, before their operation is known."""

PREFIX = "cg_"
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
# Shortest interval between checks of the file.
_LOOK_S = 1.0
_LIMIT = "max_"
_LIMITS: Mapping[str, TypeAdapter[Any]] = {
    "inflight": TypeAdapter(Annotated[int, Field(gt=0)]),
    "inflight_bytes": TypeAdapter(Annotated[ByteSize, Field(gt=0)]),
    "requests_per_s": TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)]),
    "flops_per_s": TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)]),
}


class Key(NamedTuple):
    """One line of the file; ``expires_s`` is in seconds since the epoch."""

    caller: Caller
    expires_s: float | None = None


class KeysError(ValueError):
    """The key file is invalid; the message says why and where."""


def new_key() -> str:
    """Return a new random key. Only its hash is ever stored."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """Return the hash by which the file identifies a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys of one file, reloaded when it changes. Not thread-safe.

    ``limits`` apply to keys whose lines do not override them.

    Raises
    ------
    KeysError
        The file cannot be read, or has an invalid line.
    """

    def __init__(self, path: Path, limits: KeyLimits = NO_LIMITS) -> None:
        self._path, self._limits = path, limits
        self._seen = self._stamp()
        self._keys = read_keys(path, limits)
        self._looked_s = time.monotonic()

    def caller(self, authorization: str | None) -> Caller:
        """Return the caller whose key an Authorization header ``Bearer <key>`` holds.

        Raises
        ------
        Unauthenticated
            The key is missing, unknown or expired.
        """
        self._refresh()
        scheme, _, presented = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not presented:
            raise Unauthenticated(
                "this server needs an API key; expected the header Authorization: Bearer <key>"
            )
        found = self._keys.get(hash_of(presented.strip()))
        if found is None:
            raise Unauthenticated("the API key is not one that this server knows")
        if found.expires_s is not None and time.time() >= found.expires_s:
            expired = datetime.fromtimestamp(found.expires_s, UTC).isoformat()
            raise Unauthenticated(f"this API key of {found.caller.name!r} expired at {expired}")
        return found.caller

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
            self._keys = read_keys(self._path, self._limits)
        except KeysError as error:
            # A mistake in the file must neither admit nor lock out everybody.
            _log.error("the keys stay as they were: %s", error)
        else:
            _log.info("read %d keys from %s", len(self._keys), self._path)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


def read_keys(path: Path, limits: KeyLimits = NO_LIMITS) -> Mapping[str, Key]:
    """Read the keys, by hash. Empty lines and comments (#) are ignored.

    Raises
    ------
    KeysError
        The file cannot be read, or has an invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeysError(f"{path} cannot be read: {error}") from error
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            digest, key = read_line(text, limits)
        except KeysError as error:
            raise KeysError(f"{path}, line {number}: {error}") from None
        keys[digest] = key
    return keys


def read_line(line: str, limits: KeyLimits = NO_LIMITS) -> tuple[str, Key]:
    """Parse one line into a key's hash and properties.

    Raises
    ------
    KeysError
        The line is invalid; the message says what was expected.
    """
    key, _, words = line.partition(" ")
    name, _, digest = key.partition(":")
    if not (NAME.fullmatch(name) and _HASH.fullmatch(digest)):
        # The text is not quoted: it may be a key pasted into the wrong place.
        raise KeysError(
            "expected a name, a colon and 64 hexadecimal digits, as convgrad key prints them"
        )
    limits, scopes, expires_s = _properties(words, limits)
    return digest, Key(Caller(name, limits, scopes), expires_s)


# Cached, because thousands of lines may repeat, and they are read on the event loop.
@lru_cache(maxsize=1024)
def _properties(
    words: str, limits: KeyLimits
) -> tuple[KeyLimits, frozenset[str] | None, float | None]:
    given: dict[str, Any] = {}
    scopes: frozenset[str] | None = None
    expires_s: float | None = None
    for word in words.split():
        what, _, value = word.partition("=")
        if what == "scopes":
            scopes = _scopes(value)
        elif what == "expires":
            expires_s = _expires_s(value)
        else:
            given |= [_limit(word)]
    return limits._replace(**given), scopes, expires_s


def _limit(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    kind = _LIMITS.get(name.removeprefix(_LIMIT)) if name.startswith(_LIMIT) and equals else None
    if kind is None:
        names = ", ".join(f"{_LIMIT}{known}=…" for known in _LIMITS)
        raise KeysError(
            f"after a key's hash, expected one of {names}, scopes=…, expires=…; got {word[:64]!r}"
        )
    if value == "none":
        return name.removeprefix(_LIMIT), None
    try:
        return name.removeprefix(_LIMIT), kind.validate_python(value)
    except ValidationError as error:
        raise KeysError(
            f"{name}: {error.errors()[0]['msg']}, got {value[:64]!r} ('none' means no limit)"
        ) from None


def _scopes(value: str) -> frozenset[str] | None:
    found = frozenset(value.split(","))
    if not found <= SCOPES:
        known = ", ".join(sorted(SCOPES))
        raise KeysError(
            f"scopes: expected one or more of {known}, separated by commas; got {value[:64]!r}"
        )
    return None if found == SCOPES else found


def _expires_s(value: str) -> float:
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise KeysError(
            f"expires: expected a date or a time such as 2027-01-31T12:00:00Z; got {value[:64]!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def require_path(caller: Caller, verb: str, path: str) -> None:
    """Raise PermissionDenied unless the key may do this over HTTP."""
    if caller.scopes is None:
        return
    scope = next((scope for folder, scope in _FOLDERS if path.startswith(folder)), None)
    if scope is None and path.endswith("/stats"):
        scope = METRICS
    if scope is None and verb not in ("GET", "HEAD") and path != _INDEX:
        scope = INFER
    _require(caller, scope)


def require_method(caller: Caller, method: str) -> None:
    """Raise PermissionDenied unless the key may call this method over gRPC."""
    if caller.scopes is not None:
        _require(caller, ADMIN if "SharedMemory" in method else _METHODS.get(method))


def _require(caller: Caller, scope: str | None) -> None:
    assert caller.scopes is not None  # noqa: S101 - checked by both callers
    if scope is not None and scope not in caller.scopes:
        raise PermissionDenied(
            f"the API key {caller.name!r} has the scopes {', '.join(sorted(caller.scopes))}; this "
            f"needs the scope {scope}"
        )
