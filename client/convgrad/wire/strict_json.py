"""Strict JSON parsing: NaN literals, duplicate keys and excessive nesting are errors.

The standard library accepts more than JSON and keeps the last of duplicate keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from convgrad.errors import MalformedRequest
from convgrad.wire.sentences import shown

__all__ = ["Pairs", "dumps", "loads", "loads_object"]

Pairs = list[tuple[str, Any]]


def loads(
    text: bytes | bytearray | memoryview | str,
    what: str,
    *,
    pairs_hook: Callable[[Pairs], dict[str, Any]] | None = None,
    position: Callable[[int], int] = lambda index: index,
) -> Any:
    """Parse ``text``, which error messages call ``what``, e.g. ``the body``.

    ``pairs_hook`` receives the items of every object before the check for duplicates.
    ``position`` maps an index into ``text`` to the index to report.

    Raises
    ------
    MalformedRequest
        Not UTF-8, not JSON, a duplicate key, a NaN literal, or nesting too deep.
    """

    def unique(pairs: Pairs) -> dict[str, Any]:
        found = dict(pairs) if pairs_hook is None else pairs_hook(pairs)
        if len(found) != len(pairs):
            raise MalformedRequest(f"{what}: the key {shown(_twice(pairs))} is repeated")
        return found

    def no_constant(name: str) -> Any:
        raise MalformedRequest(f'{what}: {name} is not valid JSON; write it as the string "{name}"')

    try:
        decoded = text if isinstance(text, str) else str(text, "utf-8")
        # RFC 8259 lets a byte order mark be ignored; .NET and PowerShell write one.
        decoded = decoded.removeprefix("\ufeff")
        return json.loads(decoded, object_pairs_hook=unique, parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise MalformedRequest(
            f"{what} is not UTF-8: byte {position(error.start)} cannot be decoded"
        ) from None
    except json.JSONDecodeError as error:
        if not error.doc.strip():
            raise MalformedRequest(f"{what} is empty; expected JSON") from None
        raise MalformedRequest(
            f"{what} is not JSON: {error.msg} (at {position(error.pos)})"
        ) from None
    except RecursionError:
        raise MalformedRequest(f"{what} is nested too deep to be a request") from None
    except ValueError:
        # The only other ValueError: an int with more digits than Python converts.
        raise MalformedRequest(f"{what} holds an int of thousands of digits") from None


def loads_object(
    text: bytes | bytearray | memoryview | str,
    what: str,
    *,
    pairs_hook: Callable[[Pairs], dict[str, Any]] | None = None,
    position: Callable[[int], int] = lambda index: index,
) -> dict[str, Any]:
    """Parse ``text`` with `loads` and check that it is an object."""
    found = loads(text, what, pairs_hook=pairs_hook, position=position)
    if not isinstance(found, dict):
        raise MalformedRequest(f"{what}: expected a JSON object, got {shown(found)}")
    return found


def dumps(value: Any) -> bytes:
    """Encode a value in as few bytes as possible, in ASCII; NaN is a ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def _twice(pairs: Pairs) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("called with unique keys")
